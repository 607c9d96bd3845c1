"""Runs on meshes of more axes: replicas, shards and tensor parallelism, compared with runs of one process.

Numbers agree within rounding: products are summed over the tensor axis in another order than in one matrix product.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from shardwise.errors import ConfigError, MeshError
from shardwise.train import trainer
from shardwise.train.config.files import load
from shardwise.train.config.schema import ParallelConfig
from shardwise.train.data.micro_batch import MicroBatch
from shardwise.train.data.tokenizer import byte_tokenizer
from shardwise.train.run import preflight
from tests.engine.tensor.rig import WIDTH, Model, forget_meshes
from tests.ranks import RankPools
from tests.train.rig import furnish, losses, read, run_alone, run_here

DATA = ["loss", "tokens", "grad_norm"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)


def _on_mesh(folder: str, overrides: tuple[str, ...]) -> str:
    forget_meshes()
    return run_here(folder, overrides)


def _train(ranks: RankPools, world_size: int, *overrides: str) -> list[str]:
    return ranks(world_size).run(_on_mesh, str(Path.cwd()), overrides, timeout_s=120)


def _assert_as_alone(name: str, tokens: list[int] | None = None) -> None:
    rows = read("runs/alone/metrics.jsonl")
    for step, (row, expected) in enumerate(zip(read(f"runs/{name}/metrics.jsonl"), rows, strict=True)):
        if tokens is not None:
            expected["tokens"] = tokens[step]
        assert [row[key] for key in DATA] == pytest.approx([expected[key] for key in DATA], rel=2e-4)
    found, expected = (read(f"runs/{run}/evaluations.jsonl") for run in (name, "alone"))
    assert [row["tokens"] for row in found] == [row["tokens"] for row in expected]
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=2e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tensor_parallel_run_trains_as_one_process(ranks: RankPools) -> None:
    short = ("train.steps=3", "train.eval_every=0", "model.config.intermediate_size=45")  # uneven
    run_alone("log.name=alone", *short)
    printed, *others = _train(ranks, 4, "log.name=two", "parallel.tp=2", *short)
    _assert_as_alone("two")
    assert others == ["", "", ""], "rank 0 speaks for all"
    assert "a sample" in printed
    assert Path("runs/two/final/config.json").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_pretrained_weights_are_tuned_as_by_one_process(ranks: RankPools, kind: str) -> None:
    """Of a directory of transformers, which each rank reads its part of. Phi-3 packs its weights."""
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(kind, **sizes, **special, num_attention_heads=2)
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("pretrained")
    byte_tokenizer().save_pretrained("pretrained")
    given = ("model.path=pretrained", "model.config=none", "parallel.units=none", "train.steps=3", "train.lr=1e-3")
    run_alone("log.name=alone", *given)
    printed, *_ = _train(ranks, 4, "log.name=mesh", "parallel.tp=2", *given)
    assert "pretrained: each rank read its own" in printed
    _assert_as_alone("mesh")
    found, expected = (load_file(f"runs/{name}/final/model.safetensors") for name in ("mesh", "alone"))
    before = load_file("pretrained/model.safetensors")
    assert found.keys() == expected.keys() == before.keys()
    for name, value in expected.items():
        assert not torch.equal(value, before[name])
        torch.testing.assert_close(found[name], value, atol=2e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tensor_parallel_run_goes_on_at_other_meshes(ranks: RankPools) -> None:
    saving = ("checkpoint.every=3", "checkpoint.keep_best=true")
    _train(ranks, 4, "log.name=two", "parallel.tp=2", *saving)
    before = losses("two")
    for name, world_size, overrides in (
        ("one", 1, ()),
        ("four", 4, ()),
        ("again", 4, ("parallel.tp=2",)),
        ("narrow", 2, ("parallel.tp=2",)),
    ):
        shutil.copytree("runs/two", f"runs/{name}", symlinks=True)
        shutil.rmtree(f"runs/{name}/final")
        shutil.rmtree(f"runs/{name}/checkpoints/step-000006")
        printed, *_ = _train(ranks, world_size, f"log.name={name}", *overrides, *saving)
        assert "step 4 is next" in printed
        assert losses(name) == (before if name == "again" else pytest.approx(before, rel=2e-4))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.strategy=hybrid_shard", "parallel.dp_replicate=2"),
        ("parallel.strategy=no_shard", "model.init=device"),
        ("parallel.dp_shard=2", "train.activation_checkpointing=full", "data.document_mask=true"),
    ],
    ids=lambda overrides: overrides[0].split("=")[1],
)
def test_replicas_and_shards_beside_tensor_parallelism(ranks: RankPools, overrides: tuple[str, ...]) -> None:
    common = tuple(one for one in overrides if one.startswith(("model.", "data.")))
    run_alone("log.name=alone", "train.steps=3", *common)
    _train(ranks, 4, "log.name=mesh", "train.steps=3", "parallel.tp=2", *overrides)
    _assert_as_alone("mesh")


MIXTURE = (
    "model.config.model_type=mixtral",
    "model.config.num_key_value_heads=2",
    "model.config.num_local_experts=4",
    "model.config.num_experts_per_tok=2",
    'parallel.units=["MixtralDecoderLayer"]',
    "train.steps=3",
)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "overrides",
    [
        ("train.activation_checkpointing=full",),
        pytest.param(("parallel.cp=2", "checkpoint.every=2"), marks=pytest.mark.slow),
        pytest.param(("parallel.strategy=hybrid_shard", "parallel.dp_replicate=2"), marks=pytest.mark.slow),
    ],
    ids=lambda overrides: overrides[0],
)
def test_experts_over_ranks_train_as_one_process(ranks: RankPools, overrides: tuple[str, ...]) -> None:
    run_alone("log.name=alone", *MIXTURE)
    _train(ranks, 4, "log.name=mesh", "parallel.ep=2", *MIXTURE, *overrides)
    _assert_as_alone("mesh")
    assert Path("runs/mesh/final/config.json").exists()


def test_a_model_without_experts_is_refused(ranks: RankPools) -> None:
    with pytest.raises(ConfigError, match=r"sw.mesh\(ep=2\): LlamaForCausalLM has no plan that sends tokens"):
        _train(ranks, 2, "parallel.ep=2")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("what", ["lora.r=4", "train.optimizer=muon"])
def test_adapters_and_muon_beside_tensor_parallelism(ranks: RankPools, what: str) -> None:
    """Trained as by one process, and adapters merged into the base."""
    if "lora" in what:
        pytest.importorskip("peft")
    common = (what, "train.steps=3", "train.eval_every=0", "model.config.intermediate_size=45")
    run_alone("log.name=alone", *common)
    _train(ranks, 4, "log.name=mesh", "parallel.tp=2", *common)
    _assert_as_alone("mesh")
    found, expected = (load_file(f"runs/{name}/final/model.safetensors") for name in ("mesh", "alone"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=2e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def _compiled_on_mesh(folder: str, overrides: tuple[str, ...]) -> str:
    """As `_on_mesh`, with graphs that are traced and differentiated, but not made into kernels, which takes minutes."""
    torch._dynamo.reset()
    compiles = nn.Module.compile
    with mock.patch.object(nn.Module, "compile", lambda block: compiles(block, backend="aot_eager")):
        return _on_mesh(folder, overrides)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_a_compiled_run_beside_another_axis(ranks: RankPools, axis: str) -> None:
    short = ("train.steps=3", "train.eval_every=0", "model.config.intermediate_size=45", "data.document_mask=true")
    run_alone("log.name=alone", *short)
    overrides = ("log.name=mesh", f"parallel.{axis}=2", "train.compile=true", *short)
    ranks(4).run(_compiled_on_mesh, str(Path.cwd()), overrides, timeout_s=240)
    _assert_as_alone("mesh")


OWN = ("model.config=none", f"model.factory={__name__}:own_model", "parallel.units=none", "train.steps=3")


class Own(Model):
    """A model that is not transformers'."""

    def __init__(self) -> None:
        super().__init__(hidden=24)
        self.embed, self.head = nn.Embedding(320, WIDTH), nn.Linear(WIDTH, 320)

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)


def own_model(plan: bool = True) -> Own:
    """Return it with its tensor-parallel plan, or without."""
    torch.manual_seed(0)
    model = Own()
    if plan:
        model.tp_plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return model


def without_plan() -> Own:
    return own_model(plan=False)


def test_a_model_of_ones_own_states_its_plan(ranks: RankPools) -> None:
    run_alone("log.name=alone", *OWN)
    _train(ranks, 2, "log.name=mesh", "parallel.tp=2", *OWN)
    _assert_as_alone("mesh")


def test_a_model_without_a_plan_is_refused(ranks: RankPools) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.tp=2: Own has no tensor-parallel plan"):
        _train(ranks, 2, "parallel.tp=2", *OWN, f"model.factory={__name__}:without_plan")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_questions_are_answered_as_by_one_process(ranks: RankPools) -> None:
    asked = [json.dumps({"prompt": "the 1 quick" + " brown" * n, "completion": " foxes"}) + "\n" for n in range(5)]
    Path("asked.jsonl").write_text("".join(asked))
    asks = (
        "eval.generate=asked.jsonl",
        "eval.max_new_tokens=6",
        "eval.micro_batch=2",
        "model.config.rms_norm_eps=1e-3",
    )
    run_alone("log.name=alone", *asks)
    _train(ranks, 4, "log.name=mesh", "parallel.tp=2", *asks)
    _assert_as_alone("mesh")
    found, expected = (read(f"runs/{name}/answers/step-000006.jsonl") for name in ("mesh", "alone"))
    assert len(found) == 5
    assert found == expected


NEOX = (
    'model.config={model_type="gpt_neox",hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=2,'
    "attention_dropout=0.2,hidden_dropout=0.2}",
    "parallel.units=none",
    "train.eval_every=0",
    "checkpoint.every=2",
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_ranks_of_a_tensor_group_agree_after_steps_with_dropout(ranks: RankPools) -> None:
    ranks(4).run(run_here, str(Path.cwd()), (*NEOX, "train.steps=2"), timeout_s=120)
    resumed = ranks(4).run(_compare_replicas, str(Path.cwd()), (*NEOX, "parallel.tp=2"), timeout_s=120)
    anew = ranks(4).run(_compare_replicas, str(Path.cwd()), (*NEOX, "parallel.tp=2", "log.name=anew"), timeout_s=120)
    assert "step 3 is next" in resumed[0]
    assert anew[0]


def _compare_replicas(folder: str, overrides: tuple[str, ...]) -> str:
    """Train, and compare the random states and the replicated parameters of each tensor group at the end."""
    with mock.patch.object(trainer.Trainer, "_sum_up", _assert_group_agrees):
        return _on_mesh(folder, overrides)


def _assert_group_agrees(self: trainer.Trainer, *_: object) -> None:
    kept = {
        name: parameter.local.clone()
        for name, parameter in self.model.named_parameters()
        if "norm" in name or "dense.bias" in name or "dense_4h_to_h.bias" in name
    }
    assert kept
    kept["random state"] = torch.get_rng_state()
    every = self.ranks.all_gather_object(kept)
    mine, other = every[self.ranks.rank], every[self.ranks.rank ^ 1]
    assert all(torch.equal(value, other[name]) for name, value in mine.items())
    assert not torch.equal(kept["random state"], every[self.ranks.rank ^ 2]["random state"])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (2, ("data.document_mask=true", "model.config.num_key_value_heads=1")),
        (4, ("parallel.tp=2", "train.activation_checkpointing=full", "model.config.num_attention_heads=4")),
        (4, ("parallel.strategy=hybrid_shard", "parallel.dp_replicate=2", "data.seq_len=31")),
    ],
    ids=["documents", "tensor", "replicas"],
)
def test_ranks_that_share_sequences_train_as_one_process(
    ranks: RankPools, world_size: int, overrides: tuple[str, ...]
) -> None:
    common = tuple(one for one in overrides if one.startswith(("model.", "data.")))
    run_alone("log.name=alone", "train.steps=3", *common)
    _train(ranks, world_size, "log.name=mesh", "train.steps=3", "parallel.cp=2", *overrides)
    tokens = [row["tokens"] for row in read("runs/alone/metrics.jsonl")]
    if "data.seq_len=31" in overrides:  # a row is padded to two equal slices
        tokens = [count // 31 * 32 for count in tokens]
    _assert_as_alone("mesh", tokens)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_slices_of_a_sequence_have_dropout_of_their_own(ranks: RankPools) -> None:
    """Ranks of a tensor group, which have the same slice, drop the same of it."""
    sizes = ("model.config.num_attention_heads=4", "train.steps=2", "parallel.cp=2", "parallel.tp=2")
    masks = ranks(4).run(_masks, str(Path.cwd()), (*NEOX, *sizes), timeout_s=120)
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[2], masks[3])
    for one, other in zip(masks[0], masks[2], strict=True):
        assert 0.6 < (one == other).float().mean() < 0.76, "independent ones, which keep 0.8, agree in 0.68"


def _masks(folder: str, overrides: tuple[str, ...]) -> Tensor:
    """Train, and return what each dropout module kept in each forward."""
    kept: list[Tensor] = []
    drop = nn.Dropout.forward

    def dropped(module: nn.Dropout, x: Tensor) -> Tensor:
        output = drop(module, x)
        if module.training:
            kept.append(output != 0)
        return output

    with mock.patch.object(nn.Dropout, "forward", dropped):
        _on_mesh(folder, overrides)
    return torch.stack(kept)


def test_slices_of_a_batch() -> None:
    ids = np.arange(14).reshape(2, 7)
    labels = np.where(ids % 5 == 0, -100, ids)
    whole = MicroBatch.of_next_tokens({"input_ids": ids, "attention_mask": np.ones_like(ids)}, labels)
    slices = [whole.sliced(own, 3) for own in range(3)]
    assert [one.inputs["input_ids"].shape for one in slices] == [(2, 3)] * 3
    assert sum(one.targets for one in slices) == whole.targets
    put_together = {
        name: np.concatenate([one.inputs[name] for one in slices], 1) for name in ("input_ids", "attention_mask")
    }
    assert (put_together["input_ids"][:, :7] == ids).all()
    assert put_together["attention_mask"].tolist() == [[1] * 7 + [0] * 2] * 2
    shifted = np.concatenate([one.labels for one in slices], 1)
    assert (shifted[:, :6] == labels[:, 1:]).all()
    assert (shifted[:, 6:] == -100).all()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cp=2", "backend=jax"], 'parallel.cp = 2 does not work with parallel.backend = "jax" yet'),
    ],
)
def test_what_sequences_are_not_divided_with(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load("tiny.toml", [f"parallel.{one}" for one in overrides])


class OneRank(ParallelConfig):  # type: ignore[misc]  # as `ParallelConfig` itself
    """Sizes that need not make up the ranks."""

    @property
    def ranks_per_batch(self) -> int:
        return 1


def test_a_task_that_the_model_tells_is_not_divided() -> None:
    """Under torchrun nothing but the ranks looks at the model."""
    sizes = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).save_pretrained("bert")
    byte_tokenizer().save_pretrained("bert")
    config = load("tiny.toml", ["model.path=bert", "model.config=none", "parallel.cp=2"])
    config = config.model_copy(update={"parallel": OneRank(**config.parallel.model_dump())})
    with pytest.raises(
        ConfigError, match=r"parallel.cp=2 divides the sequences of causal language models, not of .mas"
    ):
        trainer.run(config)


def test_heads_and_tasks_that_are_not_divided() -> None:
    for overrides, message in (
        (["parallel.cp=4", "parallel.ranks=4"], "parallel.cp=4 does not divide the model's num_attention_heads=2"),
        (
            ["parallel.cp=2", "parallel.tp=2", "parallel.ranks=4"],
            "parallel.tp=2 x cp=2 does not divide the model's num",
        ),
        (['model.task="masked-lm"', "parallel.cp=2"], 'parallel.cp = 2 does not work with model.task = "masked-lm"'),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            preflight.check(load("tiny.toml", overrides), gpus=0)


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        (["cp=2", "tp=2"], 6, "parallel.cp=2 x tp=2 does not divide the 6 ranks"),
        (["cp=2", "dp_shard=3"], 8, "shard_group=3 does not divide the 4 data ranks (8 / cp=2)"),
        (["tp=2"], 3, "parallel.tp=2 does not divide the 3 ranks; use one of 1, 3 or another number of ranks"),
        (["tp=2", "dp_replicate=3"], 4, "dp_replicate=3 x tp=2: the product must divide the number of ranks, 4"),
        (["dp_replicate=2", "dp_shard=4", "strategy=hsdp"], 4, "dp_replicate=2 x shard_group=4: the product must be"),
        (["tp=2", "dp_replicate=2"], 4, "parallel.dp_replicate=2 needs a hybrid strategy"),
        (["ep=3"], 4, "parallel.ep=3 does not divide the shard group of 4 ranks; use one of 1, 2, 4"),
        (["ep=2", "reshard_after_forward=2"], 4, "parallel.reshard_after_forward=2 beside parallel.ep=2"),
        (["tp=2", "dp_shard=4"], 4, "does not divide the 2 data ranks (4 / tp=2)"),
        (["tp=2", "dp_shard=1"], 4, "full_shard always uses 2 of 2 data ranks (4 / tp=2)"),
    ],
)
def test_sizes_that_do_not_make_up_the_ranks(overrides: list[str], ranks: int, message: str) -> None:
    with pytest.raises(MeshError, match=re.escape(message)):
        load("tiny.toml", [f"parallel.{one}" for one in overrides]).for_ranks(ranks)


def test_a_batch_is_divided_among_data_ranks() -> None:
    fitted = load("tiny.toml", ["parallel.tp=2", "train.global_batch=none"]).for_ranks(8)
    assert fitted.train.global_batch == 4 * 2
    with pytest.raises(ConfigError, match=re.escape("train.micro_batch x ranks / tp = 2 x 4 = 8")):
        load("tiny.toml", ["parallel.tp=2", "train.global_batch=12"]).for_ranks(8)


@pytest.mark.parametrize(
    ("overrides", "group"),
    [
        (["dp_shard=2"], 2),
        (["dp_replicate=4"], 2),
        (["dp_replicate=2", "tp=2"], 2),
        (["dp_replicate=4", "shard_group=2"], 2),
        (["dp_replicate=8", "strategy=no_shard"], 1),
    ],
)
def test_copies_and_shards_are_names_for_the_same(overrides: list[str], group: int) -> None:
    given = ["train.global_batch=none", *(f"parallel.{one}" for one in ["strategy=hybrid_shard", *overrides])]
    fitted = load("tiny.toml", given).for_ranks(8)
    assert fitted.parallel.shard_group == group
    assert fitted.for_ranks(8) == fitted


@pytest.mark.parametrize(
    "asked",
    [
        ("offload.params=cpu", "offload.params"),
        ("train.optimizer=adamw-8bit", 'train.optimizer = "adamw-8bit"'),
        ("lora.base=nf4", 'lora.base = "nf4"'),
        ("parallel.backend=jax", 'parallel.backend = "jax"'),
    ],
)
def test_what_is_not_tensor_parallel_is_refused_before_ranks_start(asked: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"parallel.tp = 2 does not work with {asked[1]} yet")):
        load("tiny.toml", ["parallel.tp=2", "lora.r=4", asked[0]])
    load("tiny.toml", ["lora.r=4", asked[0]])


def test_experts_are_not_divided_beside_a_tensor_axis() -> None:
    with pytest.raises(ConfigError, match=r"parallel.ep = 2 does not work with parallel.tp = 2 yet"):
        load("tiny.toml", ["parallel.ep=2", "parallel.tp=2"])
