"""FSDP2's test files as modules, with FSDP2 or with shardwise behind FSDP2's names."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

if importlib.util.find_spec("expecttest") is None:  # torch's base of test cases wants it, none of these tests does
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]

import torch
import torch.distributed as dist
import torch.distributed._composable.fsdp
import torch.distributed.fsdp
from torch.testing._internal import common_distributed, common_fsdp, common_utils

from benchmarks.doors.fsdp2.on_cpu import CudaOnCpu, ToCpu
from shardwise.comm.backends.gloo import GlooCollectives
from shardwise.comm.backends.shared_memory.collectives import ShmCollectives
from shardwise.compat import fsdp2
from shardwise.fsdp.sharded_parameter import ShardedParameter

FOLDER = "test/distributed/_composable/fsdp"
FILES = (
    "autograd",
    "clip_grad_norm_",
    "comm",
    "compile",
    "extensions",
    "frozen",
    "grad_scaler",
    "init",
    "logging",
    "memory",
    "mixed_precision",
    "overlap",
    "state",
    "state_dict",
    "training",
)
CUDA = CudaOnCpu()
inside: set[str] = set()
"""Names of FSDP2's own functions that the running test has watched, where shardwise does not call them."""


class Case(NamedTuple):
    name: str
    """file.test"""
    kind: type[unittest.TestCase]
    test: str
    devices: int
    """How many the test is told that there are."""

    @property
    def ranks(self) -> int:
        CUDA.devices = self.devices
        return getattr(self.kind(self.test), "world_size", 1)


class OnRanks(common_utils.TestCase):  # type: ignore[misc]
    """In place of the classes that start processes or threads: the ranks are there, `running.py` has started them."""

    @property
    def world_size(self) -> int:
        return CUDA.device_count()

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def process_group(self) -> Any:
        return dist.group.WORLD

    def run_subtests(self, *args: Any, **kwargs: Any) -> Any:
        return common_distributed.run_subtests(self, *args, **kwargs)

    def perThreadSetUp(self) -> None:  # noqa: N802 - torch's name
        """Of the tests that were written for threads."""

    def setUp(self) -> None:
        super().setUp()
        self.perThreadSetUp()


def exchange(engine: str) -> None:
    """Put CPU ranks, and with `engine` "shardwise" shardwise, behind the names that the tests import."""
    common_distributed.skip_if_lt_x_gpu = _needing
    common_distributed.requires_nccl_version = lambda *_: lambda function: function
    common_fsdp.FSDPTest = common_fsdp.FSDPTestMultiThread = OnRanks
    common_fsdp.test_compiled_fsdp = lambda **_: lambda function: function  # eagerly; the name of torch 2.6
    common_utils.get_cycles_per_ms = common_fsdp.get_cycles_per_ms = lambda: 1.0
    torch.get_device_module = lambda *_: CUDA
    if engine != "shardwise":
        return
    modules = [torch.distributed.fsdp, torch.distributed._composable.fsdp, common_fsdp]
    modules.append(sys.modules["torch.distributed._composable.fsdp.fully_shard"])
    for name in ("fully_shard", "FSDPModule", "UnshardHandle", "register_fsdp_forward_method", "share_comm_ctx"):
        for module in modules:
            if hasattr(module, name):
                setattr(module, name, getattr(fsdp2, name))
    common_fsdp.check_sharded_parity = same_as
    for name in filter(lambda name: name.startswith("patch_"), dir(common_fsdp)):
        setattr(common_fsdp, name, _watching(name))
    common_fsdp.patch_register_post_backward_hook_backward = _counting_in_backward


def load(source: Path, engine: str) -> types.ModuleType:
    """A test file as a module. Names that this torch does not have any more skip the test that calls them."""
    tree = ast.fix_missing_locations(ToCpu().visit(ast.parse(source.read_text())))
    module = types.ModuleType(source.stem)
    module.__dict__.update(__file__=str(source), cuda_on_cpu=CUDA)
    sys.modules[source.stem] = module
    for statement in tree.body:
        try:
            exec(compile(ast.Module([statement], []), str(source), "exec"), module.__dict__)
        except ImportError:
            if not isinstance(statement, ast.ImportFrom):
                raise
            _import_what_is_there(statement, module)
    if engine == "shardwise":
        of_ours = {
            "DTensor": ShardedParameter,
            "CommDebugMode": CountingCollectives,
            "RegisterPostBackwardFunction": types.SimpleNamespace(backward=lambda: None),
        }
        module.__dict__.update({name: ours for name, ours in of_ours.items() if hasattr(module, name)})
    return module


def cases(module: types.ModuleType) -> Iterator[Case]:
    for kind in list(vars(module).values()):
        if isinstance(kind, type) and issubclass(kind, unittest.TestCase) and kind.__module__ == module.__name__:
            for test in unittest.TestLoader().getTestCaseNames(kind):
                needed = getattr(getattr(kind, test), "devices_needed", 1)
                short = module.__name__.removeprefix("test_fully_shard_")
                yield Case(f"{short}.{test}", kind, test, max(2, needed))


def _import_what_is_there(statement: ast.ImportFrom, module: types.ModuleType) -> None:
    found: Any = None
    with contextlib.suppress(ImportError):
        found = importlib.import_module(statement.module or "")
    for alias in statement.names:
        whole = f"{statement.module}.{alias.name}"
        setattr(module, alias.asname or alias.name, getattr(found, alias.name, _Gone(whole)))


class _Gone:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise unittest.SkipTest(f"torch {torch.__version__} has no {self._name}")


def _needing(devices: int, **_: Any) -> Callable[[Any], Any]:
    def mark(tested: Any) -> Any:
        tested.devices_needed = devices
        return tested

    return mark


# For shardwise --------------------------------------------------------------------------------------------------------


def same_as(case: unittest.TestCase, whole: Any, sharded: Any, prefixes_to_ignore: tuple[str, ...] = ()) -> None:
    """In place of `check_sharded_parity`: this rank's pieces of weights and gradients are those of the whole model."""
    equal = case.assertEqual  # of torch's TestCase: tensors too, within a tolerance
    for (name, one), (theirs, piece) in zip(whole.named_parameters(), sharded.named_parameters(), strict=True):
        for prefix in prefixes_to_ignore:
            theirs = theirs.replace(prefix, "")  # noqa: PLW2901 - one prefix after another
        equal(name, theirs)
        assert isinstance(piece, ShardedParameter)
        equal(piece.shape, one.shape)
        own = slice(piece.fragment.start, piece.fragment.stop)
        equal(piece.to_local(), one.detach().flatten()[own])
        equal(piece.grad is None, one.grad is None, name)
        if one.grad is not None:
            assert isinstance(piece.grad, ShardedParameter)
            equal(piece.grad.to_local(), one.grad.flatten()[own])


def _watching(name: str) -> Callable[..., Any]:
    @contextlib.contextmanager
    def patched(replacement: object) -> Iterator[None]:
        inside.add(name)
        yield

    return patched


@contextlib.contextmanager
def _counting_in_backward(counted: Callable[[], object]) -> Iterator[None]:
    """In place of what counts FSDP2's own node of the graph: units whose reduction begins in backward, not after it."""
    with _wrapped("reduce_scatter", lambda: torch._C._current_autograd_node() is not None and counted()):
        yield


@contextlib.contextmanager
def _wrapped(name: str, before: Callable[[], object]) -> Iterator[None]:
    """Inside, `before` is called before each such collective of shardwise's."""
    with contextlib.ExitStack() as exits:
        for kind in (ShmCollectives, GlooCollectives):
            original: Any = getattr(kind, name)

            def calling(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                before()
                return _original(*args, **kwargs)

            setattr(kind, name, calling)
            exits.callback(setattr, kind, name, original)
        yield


class CountingCollectives:
    """In place of `CommDebugMode`: counts all_gathers and reduce_scatters of shardwise's under c10d's names."""

    def __init__(self) -> None:
        self._counts: dict[Any, int] = {}

    def get_comm_counts(self) -> dict[Any, int]:
        return self._counts

    def get_total_counts(self) -> int:
        return sum(self._counts.values())

    def __enter__(self) -> Self:
        self._exit = contextlib.ExitStack()
        for name, counted in (("all_gather", "_allgather_base_"), ("reduce_scatter", "_reduce_scatter_base_")):
            count = functools.partial(self._count, getattr(torch.ops.c10d, counted))
            self._exit.enter_context(_wrapped(name, count))
        return self

    def _count(self, counted: Any) -> None:
        self._counts[counted] = self._counts.get(counted, 0) + 1

    def __exit__(self, *raised: object) -> None:
        self._exit.close()
