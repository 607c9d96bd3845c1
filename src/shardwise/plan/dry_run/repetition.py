"""Finds blocks of a model that are the same, so that a dry run need not run all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from shardwise.plan.dry_run.forward import TrainingForward
from shardwise.plan.dry_run.gpu_kernels import full_sequences, package_kernels
from shardwise.plan.dry_run.job import Job

_LONGEST_PERIOD = 8
"""The longest period, in blocks, with which a stack may repeat itself."""
_BARE = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has: parameters, buffers and children are compared one by one."""
_HOOKS = frozenset(name for name in _BARE if name.endswith(("_hooks", "_hooks_always_called")))


@dataclass(frozen=True, slots=True)
class Stack:
    """The blocks of one container; those from `start` up to `stop` repeat themselves."""

    container: str
    """fqn of the nn.ModuleList or nn.Sequential."""
    start: int
    stop: int
    period: int
    """Block i is the same as block i + period."""
    params: int
    """Elements of all parameters of the whole model."""

    def depths(self, slots: int) -> Iterator[tuple[int, int]]:
        """Yield pairs: how many of the repeated blocks to keep, and how many in a second model; the fewest first.

        Both models end at the same block of a period as the whole stack does, and at the same slot: the engine uses its
        slots in turn, so what is still gathered at the end of forward may depend on the number of blocks. Yields
        nothing if so few blocks repeat that running all of them takes less time.

        slots: the job's number of slots.
        """
        whole = self.stop - self.start
        gap = math.lcm(self.period, slots)
        depth = gap + whole % gap
        spent = depth
        while (spent := spent + depth + gap) < whole:
            yield depth, depth + gap
            depth += gap

    def cut(self, builder: Callable[[], nn.Module], depth: int) -> Callable[[], nn.Module]:
        """Return a builder of the same model with only the first `depth` of the repeated blocks."""

        def build() -> nn.Module:
            model = builder()
            blocks: Any = model.get_submodule(self.container)
            del blocks[self.start + depth : self.stop]
            return model

        return build


def repeated_blocks(builder: Callable[[], nn.Module], job: Job) -> Stack | None:
    """Return the stack of blocks that repeat themselves, in the longest container. None if cutting it would save
    nothing.

    Blocks are the same if all of these are equal: types of modules; shapes, dtypes and requires_grad of parameters and
    buffers; settings; hooks; the block's entries in lists of the configuration; and its graph, which is the operations
    with their arguments' shapes that one forward of the whole model runs in it, on the meta device. A setting may
    differ if it is the block's own number in every block, or a module's own name. A tied parameter equals only itself.
    """
    if callable(job.units) and not isinstance(job.units, type):
        return None  # a function may depend on names
    prove = _repeated_blocks if _is_hashable(builder) else _repeated_blocks.__wrapped__
    return prove(
        builder,
        Job(
            seq_len=job.seq_len,
            micro_batch=1,  # blocks that differ do so with one sequence, too
            loss=job.loss,
            slots=job.slots,
            activation_checkpointing=job.activation_checkpointing if (job.recomputation.every or 1) > 1 else "none",
        ),
    )


@lru_cache(maxsize=32)
def _repeated_blocks(builder: Callable[[], nn.Module], job: Job) -> Stack | None:
    """Find repeated blocks. `job` has only the fields that matter here, so that strategies share the cached result."""
    try:
        with torch.device("meta"):
            model = builder()
        stacks = [
            (name, list(module.children()))
            for name, module in model.named_modules()
            if type(module) in {nn.ModuleList, nn.Sequential}
        ]
        name, blocks = max(stacks, key=lambda stack: len(stack[1]), default=("", []))
        if not blocks or len({id(block) for block in blocks}) < len(blocks):
            return None
        graphs = _graphs(model, blocks, job)
    except Exception:  # the dry run of the whole model reports the error
        return None
    described = _described(model, name, blocks)
    alike = [(*description, graph) for description, graph in zip(described, graphs, strict=True)]
    params = sum(parameter.numel() for parameter in model.parameters())
    found = [Stack(name, *_longest_run(alike, period), period, params) for period in _periods(job)]
    best = min(found, key=lambda stack: (stack.start + len(blocks) - stack.stop, stack.period))
    return best if any(best.depths(job.slots)) else None


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:  # such as a callable dataclass
        return False
    return True


def _periods(job: Job) -> list[int]:
    every = job.recomputation.every or 1
    return sorted({math.lcm(period, every) for period in range(1, _LONGEST_PERIOD + 1)})


def _longest_run(alike: Sequence[object], period: int) -> tuple[int, int]:
    """Return (start, stop) of the longest run of items in which each equals the one a period later."""
    best = (0, 0)
    start = 0
    for index in range(len(alike) + 1):
        ends = index + period >= len(alike) or alike[index] != alike[index + period]
        if not ends:
            continue
        stop = min(index + period, len(alike)) if index > start else start
        best = max(best, (start, stop), key=lambda run: run[1] - run[0])
        start = index + 1
    return best


# What a block is ------------------------------------------------------------------------------------------------------


def _described(model: nn.Module, container: str, blocks: Sequence[nn.Module]) -> list[tuple[object, ...]]:
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    lists = list(_lists(getattr(model, "config", None), len(blocks)))
    facts = [
        {
            **dict(_facts(block, "", f"{container}.{number}".lstrip("."), uses)),
            **{f"config.{name}": values[number] for name, values in lists},
        }
        for number, block in enumerate(blocks)
    ]
    names = dict.fromkeys(name for fact in facts for name in fact)  # blocks of several kinds have different ones
    numbers = {name for name in names if all(fact.get(name, number) == number for number, fact in enumerate(facts))}
    return [tuple((name, value) for name, value in fact.items() if name not in numbers) for fact in facts]


def _facts(module: nn.Module, path: str, block: str, uses: Counter[int]) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of everything to compare of a module at `path` in the block with fqn `block`."""
    own_name = block + path
    yield f"{path}:type", type(module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            tied = id(parameter) if uses[id(parameter)] > 1 else None
            yield f"{path}.{name}", (parameter.shape, parameter.dtype, parameter.requires_grad, tied)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield f"{path}.{name}", (buffer.shape, buffer.dtype, name in module._non_persistent_buffers_set)
    for name, value in vars(module).items():
        if name in _HOOKS:
            yield f"{path}.{name}", _setting(list(value.values()), module, own_name)
        elif name not in _BARE:
            yield f"{path}.{name}", _setting(value, module, own_name)
    for name, child in module.named_children():
        yield from _facts(child, f"{path}.{name}", block, uses)


def _setting(value: object, owner: nn.Module, own_name: str = "") -> object:
    """Return a value that can be compared. Anything but plain data is compared by identity. A string that is the
    module's own name, as PEFT stores it, is equal in all blocks."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        return ("own name",) if value == own_name else value
    if isinstance(value, tuple | list):
        return (type(value), *(_setting(item, owner, own_name) for item in value))
    if isinstance(value, dict):
        items = value.items()
        return (dict, *((_setting(key, owner, own_name), _setting(item, owner, own_name)) for key, item in items))
    if isinstance(value, partial):
        return (
            partial,
            id(value.func),
            _setting(value.args, owner, own_name),
            _setting(value.keywords, owner, own_name),
        )
    if isinstance(value, MethodType) and value.__self__ is owner:
        return ("own", id(value.__func__))
    return (type(value), id(value))


def _lists(config: object, length: int) -> Iterator[tuple[str, Sequence[object]]]:
    """Yield the lists of a configuration, and of configurations inside it, that have an entry for each block."""
    for name, value in vars(config).items() if hasattr(config, "__dict__") else ():
        if isinstance(value, tuple | list) and len(value) == length:
            yield name, [_setting(item, nn.Module()) for item in value]
        elif hasattr(value, "to_dict"):
            yield from ((f"{name}.{inner}", values) for inner, values in _lists(value, length))


# What a block does ----------------------------------------------------------------------------------------------------


class _Graphs(TorchDispatchMode):
    """Notes the operations of each block, on the meta device. If an operation returns new memory, torch runs it once;
    for equal arguments its result is made from the noted shape, which takes half the time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[list[object]] = []
        self.order: list[int] = []
        self.inside = False
        self._known: dict[object, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `FakeTensors`

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves, structure = tree_flatten((args, kwargs))
        if self.inside:
            self.found[-1].append((func, *map(_argument, leaves)))
        arguments = _all_of_it(leaves) if _makes_new_memory(func) else None
        if arguments is None:
            return func(*args, **kwargs)
        call = func, structure, *arguments
        if call in self._known:
            shape, stride, dtype = self._known[call]
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        out = func(*args, **kwargs)
        if type(out) is Tensor and _is_plain(out):
            self._known[call] = out.shape, out.stride(), out.dtype
        return out


@cache
def _makes_new_memory(func: Any) -> bool:
    schema = func._schema
    return not schema.is_mutable and not any(returned.alias_info for returned in schema.returns)


def _all_of_it(leaves: Sequence[Any]) -> list[object] | None:
    """Return everything that a result depends on. None if that is more than shapes and plain values."""
    described: list[object] = []
    for value in leaves:
        if isinstance(value, Tensor):
            if not _is_plain(value):
                return None
            described.append((value.shape, value.stride(), value.storage_offset(), value.dtype))
        elif value is None or isinstance(value, _COMPARED):
            described.append((type(value), value))
        else:
            return None
    return described


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_meta and tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


_COMPARED = bool | int | float | str | torch.dtype | torch.device | torch.layout | torch.memory_format


def _argument(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad
    return value if isinstance(value, int | float | str | torch.dtype) else type(value)


def _graphs(model: nn.Module, blocks: Sequence[nn.Module], job: Job) -> list[tuple[object, ...]]:
    """Return the operations of every block in one forward, on the meta device. Raises ValueError unless each block is
    called once, in order."""
    mode = _Graphs()

    def enter(number: int) -> Callable[..., None]:
        def note(module: nn.Module, args: Any) -> None:
            mode.order.append(number)
            mode.found.append([])
            mode.inside = True

        return note

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        mode.inside = False

    handles: list[Any] = []
    for number, block in enumerate(blocks):
        handles += [block.register_forward_pre_hook(enter(number)), block.register_forward_hook(leave)]
    try:
        feed = TrainingForward(model, job)
        with torch.device("meta"), full_sequences(), package_kernels(model, job), mode:
            feed.loss(model, feed.inputs())
    finally:
        for handle in handles:
            handle.remove()
    if mode.order != list(range(len(blocks))):
        raise ValueError("blocks are not called one after the other")
    return [tuple(operations) for operations in mode.found]
