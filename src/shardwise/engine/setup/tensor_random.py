"""Random numbers of tensor-parallel models: those of one tensor group draw equally where activations are whole, and
differently where each rank has its own part, from a column-wise layer's output to the row-wise layer that follows.

Both kinds of draws follow from the state of the device's default generator, which must be equal on the ranks of one
tensor group. So recomputation, which restores that state, draws the same again; and ranks with parts of different sizes
still agree afterwards. Nothing waits for the device.

Where no such regions are known, ranks with parts of one size drop the same of each, and those with parts of different
sizes go on alike after each dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import DeviceMesh

from shardwise import accelerators, device_tools

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class RandomRegions:
    """Switches the device's default generator between draws for whole activations and draws for this rank's part."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """mesh: the tensor axis."""
        self._device = accelerators.of_kind(mesh.device_type)
        self._rank = mesh.get_local_rank()
        self._whole: Tensor | None = None
        """The state to go on with after the region; None outside of regions."""
        self._is_paused = False
        """Whether the region goes on after the module that is called now."""

    def watch(
        self, model: nn.Module, begins: Sequence[str], ends: Sequence[str], undivided: Sequence[nn.Module] = ()
    ) -> None:
        """Begin a region after the forward of each module in `begins`; end it after that of one in `ends`, or of the
        module that contains the first. The modules `undivided` are outside of it, wherever they are called."""
        for name in begins:
            model.get_submodule(name).register_forward_hook(self._enter)
        for name in ends:
            model.get_submodule(name).register_forward_hook(self._leave)
        for name in {name.rpartition(".")[0] for name in begins}:  # also where recomputation stops early
            model.get_submodule(name).register_forward_hook(self._leave, always_call=True)
        for module in undivided:
            module.register_forward_pre_hook(self._pause)
            module.register_forward_hook(self._resume, always_call=True)

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if self._whole is not None or not module.training:
            return
        if _draws_nothing():
            return
        state = device_tools.random_state(self._device).numpy().tobytes()
        self._whole = _following(self._device, state, 0)
        device_tools.set_random_state(self._device, _following(self._device, state, 1 + self._rank))

    def _leave(self, *_: Any) -> None:
        if self._whole is not None:
            device_tools.set_random_state(self._device, self._whole)
            self._whole = None

    def _pause(self, *_: Any) -> None:
        self._is_paused = self._whole is not None
        self._leave()

    def _resume(self, module: nn.Module, *_: Any) -> None:
        if self._is_paused:
            self._is_paused = False
            self._enter(module)


class EvenDraws:
    """Lets ranks go on with equal states after a dropout, whatever the sizes of the parts that they have dropped from.
    Without that, ranks whose parts have different sizes would also drop differently where activations are whole: their
    replicated parameters would drift apart, silently."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """mesh: the tensor axis."""
        self._device = accelerators.of_kind(mesh.device_type)
        self._before: Tensor | None = None

    def watch(self, model: nn.Module) -> None:
        """Do so after each module that is one of torch's dropouts. Repeated, it changes nothing more."""
        for module in model.modules():
            if isinstance(module, DROPOUTS):
                module.register_forward_pre_hook(self._note)
                module.register_forward_hook(self._go_on, always_call=True)

    def _note(self, module: nn.Module, *_: Any) -> None:
        self._before = None
        if module.training and module.p and not _draws_nothing():
            self._before = device_tools.random_state(self._device)

    def _go_on(self, *_: Any) -> None:
        if self._before is not None:
            state = self._before.numpy().tobytes()
            device_tools.set_random_state(self._device, _following(self._device, state, 0))
            self._before = None


def _draws_nothing() -> bool:
    """Whether the model is traced now."""
    return torch.compiler.is_compiling() or detect_fake_mode() is not None


def _following(device: torch.device, state: bytes, number: int) -> Tensor:
    """Return one of the states that follow from a state."""
    seed = xxhash.xxh3_64_intdigest(state, seed=number) >> 1
    return torch.Generator(device).manual_seed(seed).get_state()
