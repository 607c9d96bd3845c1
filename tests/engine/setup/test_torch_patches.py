"""Patches of other libraries: none when shardwise is imported, each one once at the first `sw.shard`."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import UsageError

STATE = """
    import importlib, pkgutil, signal, sys, threading, warnings
    import torch
    from torch.nn.modules import module as modules
    from torch.optim import Optimizer, optimizer as optimizers
    from torch.utils import _foreach_utils

    def state():
        found = {}
        for name, table in (
            ("autograd", torch.autograd), ("Tensor", torch.Tensor), ("Module", torch.nn.Module),
            ("Parameter", torch.nn.Parameter), ("Optimizer", Optimizer), ("clip", torch.nn.utils.clip_grad_norm_),
        ):
            found |= {f"{name}.{key}": id(value) for key, value in vars(table).items() if key != "graph"}
        for where in (modules, optimizers):
            found |= {key: [*value] for key, value in vars(where).items()
                      if key.startswith("_global_") and isinstance(value, dict)}
        found["clip types"] = list(_foreach_utils._foreach_supported_types)
        found["optimizer types"] = list(optimizers._foreach_supported_types)
        found["signals"] = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        found["hooks"] = [sys.excepthook, threading.excepthook, sys.unraisablehook, warnings.showwarning]
        found["defaults"] = [torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()]
        return found

    def changed(before):
        now = state()
        return sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
"""

IMPORTS = """
    import shardwise
    names = ["shardwise", *(found.name for found in pkgutil.walk_packages(shardwise.__path__, "shardwise."))]
    names.remove("shardwise.__main__")
    others = ("shardwise.integrations.", "shardwise.jax", "shardwise.train.on_jax.")  # they import other libraries
    names = [name for name in names if not name.startswith(others)]
    assert len(names) > 150, names
    import torch.distributed.checkpoint, torch.distributed.tensor, torch.distributed.fsdp
    before = state()
    for name in names:
        importlib.import_module(name)
    assert changed(before) == [], changed(before)
"""

SHARDS = """
    import shardwise as sw
    sw.Strategy, sw.ShardedParameter, sw.shard
    before = state()
    sw.shard(torch.nn.Linear(3, 2))
    print(changed(before))
    before = state()
    sw.shard(torch.nn.Linear(3, 2))
    assert changed(before) == [], changed(before)
"""


def run(script: str) -> str:
    """Run code in a new process and return what it prints."""
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    text = textwrap.dedent(STATE) + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300, env=clean)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sharding_loads_no_other_engine() -> None:
    """FSDP's module takes half a second, three times what ours take together. Nor what a plain model does not need."""
    loads = "import sys, torch, shardwise as sw; sw.shard(torch.nn.Linear(2, 2)); print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, timeout=300, check=True)
    loaded = set(done.stdout.split())
    assert "shardwise.fsdp.shard" in loaded
    for extension in ("all_gather", "few_bits", "offloaded"):
        assert f"shardwise.engine.extensions.{extension}" not in loaded
    for special in ("adoption", "group_kinds", "materialisers", "offloading"):
        assert f"shardwise.engine.setup.{special}" not in loaded
    assert loaded.isdisjoint({"shardwise.modules.adapters", "shardwise.modules.linear_weights"})
    assert not any(name.startswith("shardwise.modules.deferred_init") for name in loaded)
    assert loaded.isdisjoint({"torch.distributed.fsdp", "torch.distributed.tensor"})


@pytest.mark.slow
def test_importing_every_module_changes_nothing() -> None:
    run(IMPORTS)


def test_the_first_shard_changes_these_and_the_second_nothing() -> None:
    expected = [
        "Optimizer.load_state_dict",
        "_global_optimizer_post_hooks",
        "_global_optimizer_pre_hooks",
        "autograd._engine_run_backward",
        "clip types",
        "optimizer types",
    ]
    assert run(SHARDS).strip() == str(expected)


@pytest.mark.parametrize("is_built_first", [True, False])
def test_an_optimizer_of_parameters_from_before_raises(is_built_first: bool) -> None:
    """Its zero_grad would drop nothing."""
    model = nn.Linear(3, 2)
    before = list(model.parameters())
    optimizer = torch.optim.SGD(before, lr=0.1)
    sw.shard(model)
    if not is_built_first:
        optimizer = torch.optim.SGD(before, lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    for call in (optimizer.step, lambda: optimizer.load_state_dict(optimizer.state_dict())):
        with pytest.raises(UsageError, match=r"SGD holds 'weight' as it was before .* build the optimizer after sw.sh"):
            call()
