"""The engine's assumptions about the thread in which autograd runs the nodes of a device.

On CPUs backward runs in the caller's thread. A device that is written in Python has its own thread, like a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from torch.utils import backend_registration

TOY = """
import os, threading, weakref
from functools import partial
import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("toy")

class Toy(torch.Tensor):
    @staticmethod
    def __new__(cls, raw):
        toy = torch.Tensor._make_wrapper_subclass(cls, raw.size(), dtype=raw.dtype, device="toy:0")
        toy.raw = raw
        return toy

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raw = lambda value: value.raw if isinstance(value, Toy) else value
        kwargs = {key: "cpu" if key == "device" else value for key, value in (kwargs or {}).items()}
        out = func(*tree_map(raw, args), **tree_map(raw, kwargs))
        return tree_map(lambda value: Toy(value) if isinstance(value, torch.Tensor) else value, out)

def backward(loss):
    try:
        loss.backward(retain_graph=True)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    assert not fails

def play(fails):
    "Two backwards of one graph; the first queues a callback. Returns whether it was alive in the second one's hook."
    seen, callbacks = [], []
    def hook(grad):
        seen.append([callback() is not None for callback in callbacks])
        if not callbacks:
            callback = partial(finish)
            callbacks.append(weakref.ref(callback))
            torch.autograd.Variable._execution_engine.queue_callback(callback)
            where["hook"] = here()
    def finish():
        where["callback"] = here()
    doubled = Toy(torch.ones(2)).requires_grad_() * 2
    squared = doubled * doubled
    squared.register_hook(hook)
    loss = squared.sum()
    if fails:
        doubled.add_(1)
    for _ in range(2):
        backward(loss)
    return seen[1][0]

def here():
    return threading.get_ident(), torch._C._current_graph_task_id() >= 0, torch.is_grad_enabled()

where = {}
fails = False
play(fails)
assert where["hook"] == where["callback"], "one thread, inside the backward, without grad mode"
assert where["hook"][0] != threading.get_ident()
assert where["hook"][1:] == (True, False)
fails = True
assert not any(play(fails) for _ in range(500))
print("done", flush=True)
os._exit(0)
"""


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices written in Python",
)
def test_the_callback_of_a_backward_that_raised_is_gone_when_the_next_hook_fires() -> None:
    """By that the engine tells a backward that goes on from one that raised. (When the first `backward()` returns to
    its caller the device's thread may still hold the callback, so only hooks may ask.)"""
    done = subprocess.run([sys.executable, "-c", TOY], capture_output=True, text=True, timeout=120, env={**os.environ})
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
