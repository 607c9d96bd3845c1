"""A model moves between transformers, the torch engine and JAX through the same files, and computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")
transformers = pytest.importorskip("transformers")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import torch  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

import shardwise as sw  # noqa: E402
import shardwise.jax as swj  # noqa: E402
from shardwise.errors import CheckpointError  # noqa: E402
from shardwise.jax import models  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": BASE | {"rope_parameters": LLAMA3},
    "mistral": BASE | {"sliding_window": None},
    "qwen2": BASE | {"tie_word_embeddings": True},
    "qwen3": BASE | {"head_dim": 32},
    "gpt2": {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
}
TOKENS = np.random.default_rng(0).integers(0, 96, (8, 40))


def torch_model(kind: str) -> Any:
    """With numbers large enough that each counts."""
    config = transformers.AutoConfig.for_model(kind, **KINDS[kind], bos_token_id=None, eos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
            parameter.normal_(mean, 0.1, generator=generator)
    return model


def logits_of(model: Any, tokens: Any = TOKENS) -> Any:
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def abstract(config: dict[str, Any], devices: int = 8) -> Any:
    """A model without memory, its parameters sharded by their largest dims."""
    mesh = jax.make_mesh((1, devices, 1), ("dp_replicate", "dp_shard", "tp"), (AxisType.Auto,) * 3)

    def spread(leaf: Any) -> Any:
        largest = max(range(leaf.ndim), key=lambda dim: leaf.shape[dim])
        names = ["dp_shard" if dim == largest and leaf.shape[dim] % devices == 0 else None for dim in range(leaf.ndim)]
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*names)))

    return jax.tree.map(spread, nnx.eval_shape(lambda: models.from_config(config, jax.random.key(0))))


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind: str, tmp_path: Path) -> None:
    theirs = torch_model(kind)
    expected = logits_of(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    config = models.read_config(tmp_path / "theirs")
    ours = swj.checkpoint.load_pretrained(tmp_path / "theirs", like=abstract(config))
    np.testing.assert_allclose(jax.jit(lambda model, ids: model(ids))(ours, jnp.asarray(TOKENS)), expected, atol=1e-5)

    if kind in {"qwen3", "gpt2"}:
        prompts = torch.tensor(TOKENS[:2, :7])
        greedy = theirs.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=9, do_sample=False, pad_token_id=0
        )
        np.testing.assert_array_equal(models.generate(ours, TOKENS[:2, :7], 9), greedy.numpy())

    swj.checkpoint.save(tmp_path / "ours", ours)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert one.keys() == other.keys()
    assert all((one[name] == other[name]).all() for name in one)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(again) is type(theirs)
    np.testing.assert_array_equal(logits_of(again), expected)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_with_the_torch_engine(kind: str, tmp_path: Path) -> None:
    theirs = torch_model(kind)
    expected = logits_of(theirs)
    sharded = sw.shard(theirs)
    optimizer = torch.optim.AdamW(sharded.parameters())
    sw.checkpoint.save(tmp_path / "torch", sharded, optimizer, step=3, max_file_bytes=50_000)
    assert len(list((tmp_path / "torch").glob("model-*.safetensors"))) > 1
    like = abstract(models.read_config(tmp_path / "torch"))
    ours = swj.checkpoint.load_pretrained(tmp_path / "torch", like=like)
    np.testing.assert_allclose(jax.jit(lambda model, ids: model(ids))(ours, jnp.asarray(TOKENS)), expected, atol=1e-5)
    again, extra = swj.checkpoint.load(tmp_path / "torch", like=like)
    assert extra.step == 3
    for one, other in zip(jax.tree.leaves(nnx.state(ours)), jax.tree.leaves(nnx.state(again)), strict=True):
        np.testing.assert_array_equal(one, other)

    swj.checkpoint.save(tmp_path / "jax", {"params": ours, "count": jnp.zeros(())}, step=5)
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    assert sw.checkpoint.load(tmp_path / "jax", sharded).step == 5
    np.testing.assert_array_equal(logits_of(sharded), expected)
    with pytest.raises(CheckpointError, match=r"was saved with optax, but this is AdamW"):
        sw.checkpoint.load(tmp_path / "jax", sharded, optimizer)
    assert sw.checkpoint.inspect(tmp_path / "jax").damage == ()


def test_adams_state_goes_from_either_of_torchs_to_either(tmp_path: Path) -> None:
    """optax does not say whether weights decay, so its state is no more one's than the other's."""
    sharded = sw.shard(torch_model("gpt2"))
    optimizer = torch.optim.Adam(sharded.parameters())
    sharded(torch.tensor(TOKENS[:2])).logits.square().sum().backward()
    optimizer.step()
    sw.checkpoint.save(tmp_path / "torch", sharded, optimizer, step=1)
    mesh = swj.mesh(2, devices=jax.devices()[:2])
    config = models.read_config(tmp_path / "torch")
    step = swj.train_step(lambda *_: (0.0, 1), optax.adam(1e-3), mesh)
    like = step.init(swj.init(lambda key: models.from_config(config, key), mesh).abstract())
    state, _ = swj.checkpoint.load(tmp_path / "torch", like)
    assert int(state.opt_state[0].count) == 1
    swj.checkpoint.save(tmp_path / "jax", state, step=1)
    for kind in (torch.optim.AdamW, torch.optim.Adam):
        other = kind(sharded.parameters(), lr=0.5)
        sw.checkpoint.load(tmp_path / "jax", sharded, other)
        assert other.param_groups[0]["lr"] == 0.5
        for one, another in zip(optimizer.state.values(), other.state.values(), strict=True):
            assert torch.equal(one["exp_avg_sq"].local, another["exp_avg_sq"].local)
            assert one["step"] == another["step"]
    with pytest.raises(CheckpointError, match=r"was saved with AdamW, but this is SGD"):
        sw.checkpoint.load(tmp_path / "jax", sharded, torch.optim.SGD(sharded.parameters(), lr=1.0))


def test_a_base_model_without_its_prefix(tmp_path: Path) -> None:
    theirs = torch_model("gpt2")
    theirs.transformer.save_pretrained(tmp_path / "base")
    like = abstract(models.read_config(tmp_path / "base"))
    ours = swj.checkpoint.load_pretrained(tmp_path / "base", like=like)
    np.testing.assert_array_equal(ours.wte.embedding[...], theirs.transformer.wte.weight.detach().numpy())


def test_sampled_tokens_follow_their_key() -> None:
    model = models.from_config({"model_type": "llama", **BASE}, jax.random.key(1))
    settings: dict[str, Any] = {"temperature": 1.0, "top_k": 20}
    drawn = [models.generate(model, TOKENS[:2, :4], 6, **settings, key=jax.random.key(seed)) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).any()
    likeliest = models.generate(model, TOKENS[:2, :4], 6)
    first = int(likeliest[0, 4])
    ended = models.generate(model, TOKENS[:2, :4], 6, end_id=first)
    assert (ended[0, 4:] == first).all()
    np.testing.assert_array_equal(models.generate(model, TOKENS[:2, :4], 6, temperature=1.0, top_k=1), likeliest)
