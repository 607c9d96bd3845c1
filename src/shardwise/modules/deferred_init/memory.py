"""The real storages on which recorded operations are replayed, all on one device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from shardwise import accelerators, device_tools
from shardwise.modules.deferred_init.op import Op, View


class RealStorages:
    """Real storages, by the numbers of the recorded ones. A missing one is allocated, uninitialised, on first use."""

    def __init__(self, nbytes: Sequence[int], device: torch.device) -> None:
        """`nbytes`: sizes of the recorded storages, by number."""
        self.device = device
        self._nbytes = nbytes
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __contains__(self, storage: object) -> bool:
        return storage in self._storages

    def __iter__(self) -> Iterator[int]:
        return iter(self._storages)

    def drop(self, storages: Iterable[int]) -> None:
        """Free these storages; missing ones are ignored."""
        for storage in storages:
            self._storages.pop(storage, None)

    def real(self, view: View) -> Tensor:
        """Return the real tensor at a view's place."""
        if view.storage not in self._storages:
            blank = torch.empty(self._nbytes[view.storage], dtype=torch.uint8, device=self.device)
            self._storages[view.storage] = blank.untyped_storage()
        real = torch.empty(0, dtype=view.dtype, device=self.device)
        return real.set_(self._storages[view.storage], view.offset, view.size, view.stride)

    def arguments(self, *trees: Any) -> Any:
        """Return recorded arguments with real tensors in place of views."""
        return tree_map(self._argument, trees)

    def run(self, op: Op, seed: int | None = None) -> None:
        """Run an operation, on the CPU if the device has no kernel for it.

        `seed`: seeds the generator of the device that runs it, whose state is restored afterwards. None: an operation
        that draws continues from the generator's present state.
        """
        try:
            self._run(op, seed)
        except NotImplementedError:
            self.run_on_cpu(op, seed)

    def run_on_cpu(self, op: Op, seed: int | None = None) -> None:
        """Run an operation on the CPU, wherever the storages are."""
        host = RealStorages(self._nbytes, accelerators.CPU)
        host._storages = {number: self._storages[number].cpu() for number in op.touched if number in self}
        host._run(op, seed)
        self._storages |= {number: host._storages[number].to(device=self.device) for number in op.writes}

    def _run(self, op: Op, seed: int | None) -> None:
        args, kwargs = self.arguments(op.args, op.kwargs)
        if self.device.type != "cpu" and any(argument.name == "device" for argument in op.func._schema.arguments):  # type: ignore[attr-defined]
            kwargs["device"] = self.device
        if seed is not None and "generator" in kwargs:
            kwargs["generator"] = None  # the device's default, not the recorded CPU generator
        with nullcontext() if seed is None else device_tools.seeded(self.device, seed):
            out = op.func(*args, **kwargs)
        of_constants = any(isinstance(leaf, Tensor) for leaf in tree_leaves((op.args, op.kwargs)))
        results = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
        for view, tensor in zip(op.outputs, results, strict=True):
            if view is None:
                continue
            storage = tensor.untyped_storage()
            laid_out = (tensor.stride(), tensor.storage_offset()) == (view.stride, view.offset)
            if not of_constants and laid_out and storage.nbytes() == self._nbytes[view.storage]:
                self._storages[view.storage] = storage
            else:  # an alias of a constant, which later operations may write to, or not laid out as recorded
                self.real(view).copy_(tensor)

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, View):
            return self.real(leaf)
        return leaf.to(self.device) if isinstance(leaf, Tensor) else leaf
