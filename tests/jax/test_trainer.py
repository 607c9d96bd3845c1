"""`shardwise train` with JAX: the same configuration, data, run directory and checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("rich")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

import shardwise.jax as swj  # noqa: E402
from shardwise.errors import ConfigError, MeshError, UserError  # noqa: E402
from shardwise.jax import models  # noqa: E402
from shardwise.train.config.files import load  # noqa: E402
from shardwise.train.config.shared_keys import shared_keys  # noqa: E402
from shardwise.train.on_jax import trainer  # noqa: E402
from shardwise.train.on_jax.model import loss_of  # noqa: E402
from shardwise.train.on_jax.processes import RunProcesses  # noqa: E402
from tests.jax.runs import losses_of, steps_of, train  # noqa: E402

ROOT = Path(__file__).parents[2]


def test_a_run(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = losses_of(whole)
    assert losses[-1] < losses[0] - 0.3
    assert [path.name for path in sorted((whole / "checkpoints").iterdir())] == ["step-000004", "step-000006"]
    first = steps_of(whole)[0]
    assert (first["world_size"], first["tokens"], first["step"]) == (4, 256, 1)
    assert first["memory"]["optimizer"] > first["memory"]["param_shards"] > 0
    assert json.loads((whole / "evaluations.jsonl").read_text())["step"] == 6
    with contextlib.chdir(whole.parents[1]):
        train("log.name=whole")
    assert "runs/whole is finished" in capsys.readouterr().out
    model = models.from_config(models.read_config(whole / "final"), jax.random.key(0))
    loaded = swj.checkpoint.load_pretrained(whole / "final", like=model)
    stored = load_file(whole / "final" / "model.safetensors")
    np.testing.assert_array_equal(loaded.embed_tokens.embedding[...], stored["model.embed_tokens.weight"])


def test_a_run_goes_on_as_if_it_had_not_stopped(whole: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted_after(3, "log.name=parts", "checkpoint.every=10")
    assert [path.name for path in Path("runs/parts/checkpoints").iterdir()] == ["step-000003"]
    train("log.name=parts", "checkpoint.every=10", "parallel.ranks=2", "train.micro_batch=2")
    said = capsys.readouterr().out
    assert "interrupted after step 3: saved as runs/parts/checkpoints/step-000003" in said
    assert "resuming from runs/parts/checkpoints/step-000003: step 4 is next" in said
    np.testing.assert_allclose(losses_of("parts"), losses_of(whole), rtol=1e-5)
    one, other = (load_file(run / "final" / "model.safetensors") for run in (whole, Path("runs/parts")))
    for name in one:
        np.testing.assert_allclose(one[name], other[name], atol=2e-5)


def interrupted_after(steps: int, *overrides: str) -> None:
    """A run that has a signal in its step `steps`."""
    from shardwise.train.on_jax.trainer import Trainer

    take = Trainer._take

    def noted(self: Trainer, step: int, state: Any) -> Any:
        self.interruption.asked = step + 1 == steps
        return take(self, step, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_take", noted)
        train(*overrides)


@pytest.mark.slow
def test_the_torch_engine_trains_alike(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    from shardwise.train import trainer as torch_trainer

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained("start")
    start = ["model.config=none", "model.path=start", "data.tokenizer=bytes"]
    start += ["train.steps=20", "train.schedule=cosine", "checkpoint.every=10"]
    of_torch = ["parallel.backend=torch", "parallel.ranks=1"]
    train("log.name=jax", *start)
    torch_trainer.run(load("tiny.toml", [*of_torch, "log.name=torch", *start]))
    np.testing.assert_allclose(losses_of("jax"), losses_of("torch"), rtol=1e-3)
    norms = [[step["grad_norm"] for step in steps_of(name)] for name in ("jax", "torch")]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-2)
    transformers.AutoModelForCausalLM.from_pretrained("runs/jax/final")

    for name, other in (("from-torch", "torch"), ("from-jax", "jax")):
        shutil.copytree(f"runs/{other}/checkpoints/step-000010", f"runs/{name}/checkpoints/step-000010")
    train("log.name=from-torch", *start)
    torch_trainer.run(load("tiny.toml", [*of_torch, "log.name=from-jax", *start]))
    for name, other in (("from-torch", "torch"), ("from-jax", "jax")):
        assert [step["step"] for step in steps_of(name)] == list(range(11, 21))
        np.testing.assert_allclose(losses_of(name), losses_of(other)[10:], rtol=1e-3)
    cold = losses_of("torch")[10] - losses_of("torch")[19]
    assert cold > 1e-2  # steps move the loss by more than what is compared
    state = [
        load_file(f"runs/{name}/checkpoints/step-000020/optimizer.safetensors") for name in ("torch", "from-torch")
    ]
    name = "model.layers.1.mlp.up_proj.weight.exp_avg_sq"
    np.testing.assert_allclose(state[1][name], state[0][name], rtol=0.05, atol=1e-9)


def test_a_cache_whose_programs_can_wait_for_ever_is_turned_off(folder: Path) -> None:
    try:
        jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
        train("train.steps=1")
        assert not jax.config.jax_enable_compilation_cache
        assert not (folder / "cache").exists()
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.parametrize(
    ("override", "error", "said"),
    [
        ("train.on_nonfinite=skip", ConfigError, r'train\.on_nonfinite = "skip" is not supported'),
        ("train.optimizer=muon", ConfigError, r'train\.optimizer = "muon" is not supported with .*backend = "jax"'),
        ("lora.r=4", ConfigError, r"lora\.r = 4 is not supported"),
        ("parallel.strategy=shard_grad_op", ConfigError, r'parallel\.strategy = "shard_grad_op"'),
        ("train.activation_checkpointing=every-2", ConfigError, r'"every-2" is not supported'),
        ("parallel.ranks=64", MeshError, r"parallel\.ranks=64, but JAX has 8 devices \(cpu\)"),
        ("model.config.hidden_sise=3", ConfigError, r"model\.config\.hidden_sise is not a key .*hidden_size"),
        ("model.config.model_type=mamba", ConfigError, r"model_type='mamba': must be one of the JAX models"),
        ("train.global_batch=6", ConfigError, r"train\.global_batch=6 is not a multiple"),
        ("model.config.vocab_size=100", ConfigError, r"vocab_size=100, but the tokenizer needs 320"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    folder: Path, override: str, error: type[UserError], said: str
) -> None:
    with pytest.raises(error, match=said):
        train(override)
    assert not Path("runs").exists() or not list(Path("runs").rglob("*.jsonl"))


FACTORIES = """
import jax.numpy as jnp
from flax import nnx

def without_key(): ...
def raises(key): raise ValueError("of mine")
def no_model(key): return {"w": jnp.ones((64, 64))}

class Short(nnx.Module):
    def __init__(self, key): self.w = nnx.Param(jnp.ones((64, 64)))
    def __call__(self, ids): return self.w[...][ids[:, :1] % 64]
"""


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (
            "without_key",
            r"factory='theirs:without_key' failed when it was called with a jax\.random\.key: TypeError: "
            r"without_key\(\)",
        ),
        ("raises", r"was called with a jax\.random\.key: ValueError: of mine"),
        (
            "no_model",
            r"its model failed when it was called with ids of shape \(1, 32\): TypeError: 'dict' object is not "
            "callable",
        ),
        (
            "Short",
            r"returns \(1, 1, 64\) for ids of shape \(1, 32\); it must return logits of shape \(1, 32, at least 320\)",
        ),
    ],
)
def test_factories_that_cannot_be(folder: Path, monkeypatch: pytest.MonkeyPatch, factory: str, said: str) -> None:
    (folder / "theirs.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ConfigError, match=said):
        train("model.config=none", f"model.factory=theirs:{factory}")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"}, "JAX_COORDINATOR_ADDRESS is set, so JAX_NUM_PROCESSES"),
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES='two' in the environment: must be a whole number"),
    ],
)
def test_an_environment_that_cannot_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said):
        train()


@pytest.mark.slow
def test_a_factory_hybrid_and_recomputation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mine.py").write_text(
        "from shardwise.jax import models\n"
        "def make(key):\n"
        "    config = dict(model_type='gpt2', vocab_size=320, n_embd=32, n_layer=2, n_head=2, n_positions=64)\n"
        "    return models.from_config(config, key)\n"
    )
    monkeypatch.syspath_prepend(folder)
    train(
        "model.config=none",
        "model.factory=mine:make",
        "parallel.strategy=hybrid_shard",
        "parallel.shard_group=2",
        "train.activation_checkpointing=full",
        "parallel.param_dtype=bf16",
        "checkpoint.asynchronous=true",
        "train.eval_every=3",
    )
    assert losses_of("tiny")[-1] < losses_of("tiny")[0] - 0.2
    assert json.loads(Path("runs/tiny/final/config.json").read_text())["model_type"] == "gpt2"
    assert len(Path("runs/tiny/evaluations.jsonl").read_text().splitlines()) == 3


def test_a_factory_with_dropout_begins_with_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "dropping.py").write_text(
        "import jax\nfrom flax import nnx\n"
        "class Net(nnx.Module):\n"
        "    def __init__(self, rngs):\n"
        "        self.embed = nnx.Embed(320, 8, rngs=rngs)\n"
        "        self.dropout = nnx.Dropout(0.5, rngs=rngs)\n"
        "    def __call__(self, ids):\n"
        "        return self.embed.attend(self.dropout(self.embed(ids)))\n"
        "def make(key):\n"
        "    return Net(nnx.Rngs(key))\n"
    )
    monkeypatch.syspath_prepend(folder)
    (folder / "weights").mkdir()
    save_file({"embed.embedding": np.zeros((320, 8), np.float32)}, folder / "weights/model.safetensors")
    train("model.config=none", "model.factory=dropping:make", "model.weights=weights", "train.steps=1")
    assert losses_of("tiny") == pytest.approx([np.log(320)])


@pytest.mark.slow
def test_the_command_without_torch(folder: Path) -> None:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    program = (
        "import sys; sys.modules['torch'] = None; sys.argv[1:] = sys.argv[1:]\n"
        "import shardwise.train.data.tokenizer as t\n"
        "t.files_of = lambda tokenizer: {}\n"  # transformers writes them, and looks for torch
        "from shardwise.cli.app import run\n"
        "sys.exit(run(['train', 'tiny.toml', '--backend', 'jax', *sys.argv[1:]]))"
    )
    environment = {**os.environ, "PYTHONPATH": path}
    settings = ["parallel.backend=torch", "checkpoint.every=0"]
    done = subprocess.run(
        [sys.executable, "-c", program, *settings], env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert "starting 4 cpu devices, 6 steps: runs/tiny" in done.stdout
    assert "done: runs/tiny/final" in done.stdout


class Dropping(nnx.Module):
    """Of a factory: random while it trains."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.dropout(self.embed(ids)) @ self.embed.embedding[...].T


def test_evaluation_drops_nothing() -> None:
    mesh = swj.mesh(devices=jax.devices()[:1])
    module = swj.shard(Dropping(nnx.Rngs(0)), mesh)
    state = swj.train_step(loss_of, optax.sgd(0.1), mesh).init(module)
    batch = {"ids": jnp.arange(8, dtype=jnp.int32)[None], "labels": jnp.arange(8, dtype=jnp.int32)[None]}
    module.eval()
    expected = loss_of(module, batch, None)
    assert [float(n) for n in trainer._nll(None, state, batch)] == pytest.approx([float(n) for n in expected])


def test_processes_compare_what_they_do_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(RunProcesses, "agree", lambda self, text, otherwise: compared.append(text))
    train("train.steps=1")
    (of_config,) = [text for text in compared if "train.seed" in text]
    assert "'train.steps': 1" in of_config
    assert shared_keys(load("tiny.toml", ["train.seed=1"])) != shared_keys(load("tiny.toml", ["train.seed=2"]))
    assert shared_keys(load("tiny.toml", ["log.every=9"])) == shared_keys(load("tiny.toml", ["log.every=3"]))
