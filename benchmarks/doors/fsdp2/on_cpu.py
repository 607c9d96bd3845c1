"""What stands in for a GPU where FSDP2's tests, which are written for one, run on CPU ranks."""

from __future__ import annotations

import ast
import contextlib
import time
import unittest
from typing import Any


class ToCpu(ast.NodeTransformer):
    """Names of devices and backends in a test's source; line numbers stay."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and node.value.split(":")[0] == "cuda":
            return ast.copy_location(ast.Constant("cpu"), node)
        return ast.copy_location(ast.Constant("gloo"), node) if node.value == "nccl" else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        first = node.values[0] if node.values else None
        is_device = isinstance(first, ast.Constant) and str(first.value).startswith("cuda")
        return ast.copy_location(ast.Constant("cpu"), node) if is_device else self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        is_asked = node.id in {"TEST_CUDA", "HAS_GPU", "HAS_CUDA"}
        return ast.copy_location(ast.Constant(True), node) if is_asked else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "_local_tensor":
            return ast.copy_location(ast.Call(ast.Attribute(node.value, "to_local", ast.Load()), [], []), node)
        if node.attr != "cuda":
            return node
        is_torchs = isinstance(node.value, ast.Name) and node.value.id == "torch"
        there = ast.Name("cuda_on_cpu", ast.Load()) if is_torchs else ast.Attribute(node.value, "cpu", node.ctx)
        return ast.copy_location(there, node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.keywords = [given for given in node.keywords if given.arg not in {"device_ids", "device_id"}]
        if isinstance(node.func, ast.Attribute) and node.func.attr == "device":
            node.args = node.args[:1]  # processors have no index
        if isinstance(node.func, ast.Name) and node.func.id == "CPUOffloadPolicy":
            node.keywords = [ast.keyword("pin_memory", ast.Constant(False))]  # there is nothing to pin it for
        return node


class Stream:
    """Of a device that finishes everything at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


class Event:
    """What has happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class CudaOnCpu:
    """`torch.cuda` in the tests. What it lacks skips the test that asks for it."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self.devices = 2

    def device_count(self) -> int:
        return self.devices

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: object = None) -> Stream:
        return Stream()

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def set_device(self, device: object) -> None: ...

    def synchronize(self, device: object = None) -> None: ...

    def empty_cache(self) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def _sleep(self, cycles: int) -> None:
        time.sleep(cycles / 1e3)  # a cycle a millisecond: `get_cycles_per_ms` is exchanged too

    def __getattr__(self, name: str) -> Any:
        raise unittest.SkipTest(f"needs torch.cuda.{name}")
