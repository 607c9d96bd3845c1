"""Counts the bytes that this rank sends, from outside the engine that sends them.

Independent counts:

- `counting()` wraps the methods of c10d's `ProcessGroup` and `Backend` classes. Every function of
  `torch.distributed` ends in one of them, and so do engines that call a process group directly, so each
  operation is seen once. P2P sends count their actual bytes; a collective counts what its ring (or chain)
  algorithm must send per rank, whatever the backend really does.
- `counting_functional()` watches what torch dispatches for functional collectives, which DTensors communicate by.
- `loopback_sent_bytes()` reads the kernel's counter of the loopback interface, which sees what the backend
  really did, packet headers and other programs' traffic included.

Operations issued from C++ do not pass through c10d's methods in Python: those of DDP's reducer (count them through a
Python communication hook that issues the same all_reduce) and functional collectives. The ratio of the kernel's count
to the others shows whether something was missed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend, GradBucket, ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode


class Wire:
    """What one rank has sent so far: calls and bytes by the name of the c10d method."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._sent: dict[str, Fraction] = {}
        self._by_group: dict[ProcessGroup, Fraction] = {}

    def add(self, operation: str, sent: Fraction | int, group: ProcessGroup | None = None) -> None:
        """Add a call's bytes. group: what it was called on, None if that is a backend."""
        self.calls[operation] += 1
        self._sent[operation] = self._sent.get(operation, Fraction(0)) + sent
        if group is not None:
            self._by_group[group] = self._by_group.get(group, Fraction(0)) + sent

    def reset(self) -> None:
        for each in (self.calls, self._sent, self._by_group):
            each.clear()

    @property
    def sent_bytes(self) -> dict[str, float]:
        """Bytes by operation; whole numbers unless a ring's chunks do not divide evenly."""
        return {name: float(sent) for name, sent in self._sent.items()}

    def sent_over(self, ranks: Sequence[int]) -> float:
        """Return the bytes sent over process groups of these ranks."""
        found = (sent for group, sent in self._by_group.items() if dist.get_process_group_ranks(group) == list(ranks))
        return float(sum(found, Fraction(0)))

    @property
    def total_sent_bytes(self) -> float:
        return float(sum(self._sent.values(), Fraction(0)))


class _Call:
    """One call of a c10d method: who calls it, with which arguments, by position or by name."""

    def __init__(self, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.size: int = group.size()
        self.rank: int = group.rank()
        self._args = args
        self._kwargs = kwargs

    def input(self, position: int, *names: str) -> Any:
        for name in names:
            if name in self._kwargs:
                return self._kwargs[name]
        return self._args[position]

    def root(self, position: int) -> int:
        """The root rank, given as an integer `root` or as `rootRank` of an options object."""
        for value in (*self._args[position:], *self._kwargs.values()):
            if isinstance(value, int):
                return value
            if hasattr(value, "rootRank"):
                return int(value.rootRank)
        return 0

    def split_sizes(self, position: int, name: str) -> list[int]:
        sizes = self._kwargs.get(name, self._args[position] if len(self._args) > position else [])
        return [int(size) for size in sizes]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a tensor or in nested sequences of tensors."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Iterable):
        for item in value:
            yield from _tensors(item)


def _bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))


def _all_gather(call: _Call) -> int:
    return (call.size - 1) * _bytes(call.input(1, "input", "inputs", "input_tensors", "input_tensor"))


def _reduce_scatter(call: _Call) -> Fraction:
    whole = call.input(1, "inputTensor", "inputs", "input_tensors", "input")
    return Fraction((call.size - 1) * _bytes(whole), call.size)


def _all_reduce(call: _Call) -> Fraction:
    return Fraction(2 * (call.size - 1) * _bytes(call.input(0, "tensors", "tensor")), call.size)


def _chain(call: _Call) -> Fraction:
    """Broadcast and reduce pass the payload over N - 1 of N links: the mean over ranks."""
    return Fraction((call.size - 1) * _bytes(call.input(0, "tensors", "tensor")), call.size)


def _gather(call: _Call) -> int:
    return 0 if call.rank == call.root(2) else _bytes(call.input(1, "input_tensors", "input_tensor"))


def _scatter(call: _Call) -> int:
    if call.rank != call.root(2):
        return 0
    received = _bytes(call.input(0, "output_tensors", "output_tensor"))
    return (call.size - 1) * received


def _all_to_all(call: _Call) -> int:
    chunks = list(_tensors(call.input(1, "input_tensors", "input")))
    return sum(_bytes(chunk) for rank, chunk in enumerate(chunks) if rank != call.rank)


def _all_to_all_single(call: _Call) -> int:
    tensor = next(_tensors(call.input(1, "input")))
    sizes = call.split_sizes(3, "input_split_sizes")
    if not sizes:
        return (call.size - 1) * _bytes(tensor) // call.size
    row_bytes = _bytes(tensor) // max(sum(sizes), 1)
    return sum(size * row_bytes for rank, size in enumerate(sizes) if rank != call.rank)


def _send(call: _Call) -> int:
    return _bytes(call.input(0, "tensors"))


_RULES: dict[str, Callable[[_Call], Fraction | int]] = {
    "allgather": _all_gather,
    "all_gather_single": _all_gather,
    "_allgather_base": _all_gather,
    "allgather_coalesced": _all_gather,
    "all_gather_single_coalesced": _all_gather,
    "allgather_into_tensor_coalesced": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter,
    "reduce_scatter_single_coalesced": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _reduce_scatter,
    "allreduce": _all_reduce,
    "allreduce_coalesced": _all_reduce,
    "broadcast": _chain,
    "reduce": _chain,
    "gather": _gather,
    "scatter": _scatter,
    "alltoall": _all_to_all,
    "alltoall_base": _all_to_all_single,
    "all_to_all_single": _all_to_all_single,
    "send": _send,
}


def _counted(wire: Wire, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    rule = _RULES[name]

    @wraps(method)
    def call_and_count(group: Any, *args: Any, **kwargs: Any) -> Any:
        wire.add(name, rule(_Call(group, args, kwargs)), group if isinstance(group, ProcessGroup) else None)
        return method(group, *args, **kwargs)

    return call_and_count


@contextmanager
def counting() -> Iterator[Wire]:
    """Count what this process sends through c10d, over all of its process groups, inside the context.

    Yields:
        The running count of this rank; read or `reset()` it at any time.
    """
    wire = Wire()
    originals: list[tuple[type, str, Any]] = []
    try:
        owners: tuple[type, ...] = (ProcessGroup, Backend)
        for owner in owners:
            for name in _RULES.keys() & vars(owner).keys():
                method = vars(owner)[name]
                originals.append((owner, name, method))
                setattr(owner, name, _counted(wire, name, getattr(owner, name)))
        yield wire
    finally:
        for owner, name, method in originals:
            setattr(owner, name, method)


def _functional_all_to_all(args: Sequence[Any], group: ProcessGroup) -> Fraction | int:
    given, _, sizes = args[:3]
    others = sum(size for rank, size in enumerate(sizes) if rank != group.rank())
    return Fraction(given.nbytes * others, max(given.shape[0], 1))


_FUNCTIONAL: dict[str, Callable[[Sequence[Any], ProcessGroup], Fraction | int]] = {
    "all_reduce": lambda args, group: Fraction(2 * (group.size() - 1) * args[0].nbytes, group.size()),
    "all_gather_into_tensor": lambda args, group: (group.size() - 1) * args[0].nbytes,
    "reduce_scatter_tensor": lambda args, group: Fraction((group.size() - 1) * args[0].nbytes, group.size()),
    "all_to_all_single": _functional_all_to_all,
}
_SENDS_NOTHING = {"wait_tensor", "_wrap_tensor_autograd"}


class _Functional(TorchDispatchMode):
    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # its local operations come here next
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "_c10d_functional" and name not in _SENDS_NOTHING:
            group = _resolve_process_group(args[-1])
            self._wire.add(name, _FUNCTIONAL[name](args, group), group)
        return func(*args, **(kwargs or {}))


@contextmanager
def counting_functional(wire: Wire) -> Iterator[None]:
    """Add what this process sends by functional collectives inside the context, backwards included.

    Raises:
        KeyError: for a functional collective that has no rule here.
    """
    with _Functional(wire):
        yield


def python_all_reduce_hook(group: ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Do what DDP's built-in reduction does, through Python, where `counting` sees it."""
    averaged = bucket.buffer().div_(group.size())
    future = dist.all_reduce(averaged, group=group, async_op=True).get_future()
    reduced: Future[Tensor] = future.then(lambda done: done.value()[0])
    return reduced


def loopback_sent_bytes(table: Path = Path("/proc/net/dev")) -> int | None:
    """Return the bytes that the loopback interface has sent since boot, None where it cannot be read."""
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, fields = line.partition(":")
        if name.strip() == "lo":
            return int(fields.split()[8])
    return None
