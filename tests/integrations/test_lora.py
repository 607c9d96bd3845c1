"""PEFT's adapters: from the meta device, in the trainer (`[lora]`), in checkpoints, merged."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.testing import assert_close

import shardwise as sw
from shardwise.cli.app import run as command
from shardwise.errors import CheckpointError, ConfigError, LayoutError, UsageError
from shardwise.model_tools.merging import merge_adapter
from shardwise.modules.linear_weights import linear_weights
from shardwise.sharded.extensions.blocks import BLOCK_NUMEL, Coder, block_bytes
from shardwise.train import trainer
from shardwise.train.config.files import load
from shardwise.train.config.schema import Config, LoraConfig, ModelConfig
from shardwise.train.data.batches import Batches, EvaluationBatches, Share, load_datasets
from shardwise.train.tasks.objectives import next_token_nll
from tests.engine.rig import on_ranks
from tests.integrations.models import llama

CONFIG = """
[data]
tokenizer = "bytes"
source = "{0}/*.txt"
seq_len = 32
eval_fraction = 0.2

[train]
steps = 6
micro_batch = 2
global_batch = 8
lr = 1e-2
schedule = "constant"

[checkpoint]
every = 3
keep = 9

[log]
directory = "{0}/runs"
"""
INLINE = """
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
"""


def adapted(device: str, wrap: bool = True, **options: Any) -> Any:
    config = peft.LoraConfig(r=4, target_modules="all-linear", **options)
    with torch.device(device):
        model = llama()
        return peft.get_peft_model(model, config) if wrap else peft.inject_adapter_in_model(config, model)


def configured(folder: Path, *overrides: str, model: str = INLINE) -> Config:
    file = folder / "run.toml"

    def write() -> None:
        file.write_text(model + CONFIG.format(folder))
        for i in range(20):
            (folder / f"{i}.txt").write_text(f"the {i} quick brown foxes jump over {i} lazy dogs. " * (1 + i % 5))

    once(write)
    return load(file, ["lora.r=4", *overrides])


def once(write: Callable[[], None]) -> None:
    """On the first rank, if there are several."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        write()
    if dist.is_initialized():
        dist.barrier()


def base_in(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    once(lambda: base.save_pretrained(folder / "base"))
    return folder / "base"


def on_base(base: Path, dtype: str = "bf16") -> str:
    return f'[model]\npath = "{base}"\ndtype = "{dtype}"\n'


def tensors_in(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(file)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("init", [True, "gaussian"])
def test_numbers_from_the_meta_device_are_those_of_the_plain_build(wrap: bool, init: Any) -> None:
    expected = adapted("cpu", wrap, init_lora_weights=init).state_dict()
    model = adapted("meta", wrap, init_lora_weights=init)
    torch.manual_seed(0)
    sw.shard(model)
    same(sw.full_state_dict(model), expected)


def test_adapters_of_the_base_s_numbers_are_refused_on_the_meta_device() -> None:
    model = adapted("meta")
    model.peft_config["default"].init_lora_weights = "pissa"
    with pytest.raises(LayoutError, match=r"init_lora_weights='pissa'.*real device"):
        sw.shard(model)


@on_ranks(2, timeout_s=120)
def test_a_peft_model_reads_its_base_and_saves_its_adapter(tmp_path: Path) -> None:
    plain = llama(seed=3)
    once(lambda: plain.save_pretrained(tmp_path / "base"))
    model = adapted("meta")
    sw.shard(model)
    report = sw.checkpoint.load_pretrained(tmp_path / "base", model)
    assert not report.missing
    assert not report.unexpected
    found = sw.full_state_dict(model, rank0_only=False)
    same({k: found[f"base_model.model.{_inside(k)}"] for k in plain.state_dict()}, plain.state_dict())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.5)
    sw.checkpoint.save(tmp_path / "adapter", model, adapter=True)
    other = adapted("meta")
    sw.shard(other)
    sw.checkpoint.load(tmp_path / "adapter", other)
    ours, theirs = (sw.full_state_dict(m, rank0_only=False) for m in (model, other))
    assert all(torch.equal(ours[k], theirs[k]) == ("lora_" in k or "norm" in k) for k in ours)
    loaded = peft.PeftModel.from_pretrained(llama(seed=3), tmp_path / "adapter")
    same(dict(loaded.state_dict()), ours)
    with pytest.raises(UsageError, match="0 PEFT adapters"):
        sw.checkpoint.save(tmp_path / "none", sw.shard(llama()), adapter=True)


@pytest.mark.parametrize(("key", "value"), [("lora_alpha", 99), ("use_rslora", True)])
def test_an_adapter_that_is_scaled_otherwise_is_not_loaded(tmp_path: Path, key: str, value: Any) -> None:
    """No shape shows it, and the same numbers would add something else."""

    def built(**more: Any) -> Any:
        targets = ["q_proj"]
        return sw.shard(peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=targets, **more)))

    sw.checkpoint.save(tmp_path / "adapter", built(), adapter=True)
    sw.checkpoint.load(tmp_path / "adapter", built())
    other = built(**{key: value})
    with pytest.raises(CheckpointError, match=rf"is an adapter with {key}=.*, but the model's has {key}={value}"):
        sw.checkpoint.load(tmp_path / "adapter", other)
    sw.checkpoint.load(tmp_path / "adapter", other, strict=False)


PROMPTED = {
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
}


def prompted(kind: str, seed: int = 0) -> Any:
    model = llama()
    torch.manual_seed(seed)
    return peft.get_peft_model(model, PROMPTED[kind])


@pytest.mark.parametrize("kind", ["lora", *PROMPTED])
@on_ranks(2, timeout_s=120)
def test_generate(kind: str) -> None:
    """Each rank with a prompt of its own, through the PeftModel and through what is in it."""
    rank = dist.get_rank()

    def build() -> Any:
        torch.manual_seed(1)
        model = adapted("cpu", init_lora_weights=False) if kind == "lora" else prompted(kind, seed=1)
        return model.eval()

    plain, model = build(), build()
    sw.shard(model)
    ids = torch.randint(1, 64, (2, 3 + 2 * rank), generator=torch.Generator().manual_seed(rank))
    for part in ["", "base_model", ""] if kind == "lora" else ["", ""]:
        options: dict[str, Any] = {"max_new_tokens": 3 + 3 * rank, "do_sample": False, "input_ids": ids}
        own, expected = (m.get_submodule(part).generate(**options) for m in (model, plain))
        assert torch.equal(own, expected)
    losses = [m(input_ids=ids, labels=ids).loss for m in (model, plain)]
    assert torch.equal(*losses)


def _inside(name: str) -> str:
    """The name of a base's tensor in an adapted model."""
    return name.replace("_proj.", "_proj.base_layer.")


def reference(config: Config, base: Path) -> list[float]:
    """Losses of PEFT's own model in a plain loop on the whole batches."""
    torch.manual_seed(config.train.seed)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if config.lora.base is not None:
        through_blocks(plain, config.lora.base)
    model = peft.get_peft_model(plain, peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.copy_(_constant(parameter.shape))
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1
    )
    data = load_datasets(config.data)
    batches = Batches(data.train, Share(0, 1, 8), 8, config.data.seed)
    losses = []
    for step in range(config.train.steps):
        [batch] = batches.batch(step)
        logits = model(input_ids=torch.from_numpy(batch.inputs["input_ids"])).logits
        loss = next_token_nll(logits, torch.from_numpy(batch.labels)) / batch.targets
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def through_blocks(model: Any, kind: str) -> int:
    """Give linear layers the weights that blocks of few bits have for theirs. Returns how many layers."""
    coder, found = Coder.on(torch.device("cpu"), kind), linear_weights(model)
    for parameter in model.parameters():
        if id(parameter) in found:
            blocks = torch.empty(-(-parameter.numel() // BLOCK_NUMEL), block_bytes(kind), dtype=torch.uint8)
            coder.encode(parameter.detach().flatten(), blocks)
            numbers = torch.empty(len(blocks) * BLOCK_NUMEL, dtype=parameter.dtype)
            coder.decode(blocks, numbers)
            parameter.data = numbers[: parameter.numel()].view(parameter.shape)
    return len(found)


def _constant(shape: torch.Size) -> Tensor:
    return torch.linspace(-0.1, 0.1, shape.numel()).view(shape)


@pytest.mark.parametrize("kept", ["none", "nf4"])
@on_ranks(2, timeout_s=200)
def test_the_trainer_trains_as_a_plain_loop_of_peft_s(
    tmp_path: Path, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_in(tmp_path, torch.float32)
    config = configured(tmp_path, f'lora.base="{kept}"', model=on_base(base, "fp32"))
    made = trainer.Trainer._shard

    def with_known_adapters(self: Any, model: Any) -> Any:
        sharded = made(self, model)
        with torch.no_grad():
            for name, parameter in sharded.named_parameters():
                if "lora_A" in name:
                    flat = _constant(parameter.shape).flatten()
                    parameter.local.copy_(flat[parameter.fragment.start : parameter.fragment.stop])
        return sharded

    monkeypatch.setattr(trainer.Trainer, "_shard", with_known_adapters)
    seen: list[float] = []
    measured = trainer.Trainer._metrics
    monkeypatch.setattr(trainer.Trainer, "_metrics", lambda self, *taken: _kept(seen, measured(self, *taken)))
    trainer.run(config)
    assert seen == pytest.approx(reference(config, base), rel=1e-5)


def _kept(seen: list[float], metrics: Any) -> Any:
    seen.append(metrics.loss)
    return metrics


@on_ranks(2, timeout_s=200)
def test_a_run_that_goes_on_ends_bit_for_bit_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    base = base_in(tmp_path)
    for overrides in (["log.name=whole"], ["log.name=half", "train.steps=3"], ["log.name=half"]):
        trainer.run(configured(tmp_path, 'lora.base="nf4"', *overrides, model=on_base(base)))
    runs = tmp_path / "runs"
    for place in ("final", "checkpoints/step-000006"):
        file = f"{place}/adapter_model.safetensors"
        found = tensors_in(runs / "half" / file)
        same(found, tensors_in(runs / "whole" / file))
        assert {value.dtype for value in found.values()} == {torch.float32}
    assert not list((runs / "half").rglob("model.safetensors"))  # never the base
    for place in ("final", "checkpoints/step-000006"):
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        loaded = peft.PeftModel.from_pretrained(model, runs / "half" / place)
        kept = peft.get_peft_model_state_dict(loaded)
        same(kept, tensors_in(runs / "half" / place / "adapter_model.safetensors"))
    assert peft.PeftConfig.from_pretrained(runs / "half" / "final").base_model_name_or_path == str(base)


def test_a_run_does_not_go_on_beside_another_base(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    base = base_in(tmp_path)
    trainer.run(configured(tmp_path, "train.steps=3", model=on_base(base)))
    moved = tmp_path / "moved"
    base.rename(moved)
    trainer.run(configured(tmp_path, "train.steps=4", model=on_base(moved)))
    file = moved / "model.safetensors"
    changed = {name: value + 1 for name, value in tensors_in(file).items()}
    safetensors.torch.save_file(changed, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"trained for the base weights .*, but this run's base is weights .*: set "):
        trainer.run(configured(tmp_path, model=on_base(moved)))


def test_a_run_does_not_go_on_beside_other_random_numbers(tmp_path: Path) -> None:
    trainer.run(configured(tmp_path, "train.steps=3"))
    with pytest.raises(ConfigError, match=r"random numbers of train.seed=0 .*this run's base is .*train.seed=7"):
        trainer.run(configured(tmp_path, "train.seed=7"))


def held_out_loss(config: Config, model: Any) -> float:
    batches = EvaluationBatches(load_datasets(config.data).held_out, Share(0, 1, 1))
    with torch.no_grad():
        nll = [
            next_token_nll(
                model(input_ids=torch.from_numpy(batch.inputs["input_ids"])).logits, torch.from_numpy(batch.labels)
            )
            for batch in batches
        ]
    return float(sum(nll)) / sum(batch.targets for batch in batches)


def last_evaluation(config: Config) -> float:
    return float(json.loads((config.run_directory / "evaluations.jsonl").read_text().splitlines()[-1])["loss"])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_convert_merges_as_peft_does(tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = base_in(tmp_path, getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[dtype]))
    config = configured(tmp_path, 'parallel.param_dtype="fp32"', model=on_base(base, dtype))
    trainer.run(config)
    final = config.run_directory / "final"
    assert command(["convert", str(final), str(tmp_path / "merged")]) == 0
    assert "merged into its base" in capsys.readouterr().out
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(plain, final).merge_and_unload()
    same(dict(merged.state_dict()), dict(theirs.state_dict()))
    if dtype == "fp32":
        assert held_out_loss(config, merged) == pytest.approx(last_evaluation(config), rel=1e-5)
    before = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert held_out_loss(config, merged) < held_out_loss(config, before) - 0.1


@pytest.mark.parametrize("kept", ["none", "nf4"])
@on_ranks(2, timeout_s=120)
def test_without_weights_final_is_whole(tmp_path: Path, kept: str) -> None:
    """With a base in few bits too, merged in full precision: the numbers that were evaluated."""
    config = configured(tmp_path, 'model.dtype="fp32"', f'lora.base="{kept}"')
    trainer.run(config)
    dist.barrier()
    merged = transformers.AutoModelForCausalLM.from_pretrained(config.run_directory / "final")
    assert held_out_loss(config, merged) == pytest.approx(last_evaluation(config), rel=1e-5)
    dist.barrier()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"base_model_name_or_path": "/nowhere/at/all"},
            r"names the base '/nowhere/at/all', which does not exist here.*--base",
        ),
        ({"base_model_name_or_path": None}, r"names no base: give the directory of its base with --base"),
        ({"use_dora": True}, r"use_dora=True.*merge_and_unload"),
    ],
)
def test_what_convert_cannot_merge(
    tmp_path: Path, change: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = adapted("cpu")
    model.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert command(["convert", str(tmp_path / "adapter"), str(tmp_path / "out")]) == 2
    assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_convert_refuses_another_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapted("cpu").save_pretrained(tmp_path / "adapter")
    assert command(["inspect", str(tmp_path / "adapter")]) == 0
    assert "adapter: a PEFT adapter\n" in capsys.readouterr().out
    arguments = ["convert", str(tmp_path / "adapter"), str(tmp_path / "out"), "--base", str(base_in(tmp_path))]
    assert command(arguments) == 2
    assert "which the base does not have" in capsys.readouterr().err


def test_mistakes(tmp_path: Path) -> None:
    from shardwise.train.build.models import TextShape, build_model

    inline = ModelConfig(config={"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32})
    with pytest.raises(ConfigError, match="no module 'q_prj'; did you mean q_proj"):
        build_model(inline, TextShape(320, 256, 32), LoraConfig(r=2, targets=["q_prj"]))
    with pytest.raises(ConfigError, match="PEFT cannot add adapters"):
        build_model(inline, TextShape(320, 256, 32), LoraConfig(r=2, targets=["norm"]))


def test_a_plan_of_adapters_becomes_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=320, max_position_embeddings=64, **sizes)
    config.save_pretrained(tmp_path / "model")
    written = tmp_path / "planned.toml"
    options = ["--gpu", "rtx-4090", "--gpus", "2", "--lora", "4", "--base", "nf4", "--quick", "--config", str(written)]
    assert command(["plan", str(tmp_path / "model"), *options, "--micro-batch", "1", "--seq-len", "32", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    linear = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    adapters = 4 * 2 * (4 * (64 + 64) + 3 * (64 + 128))
    others = 2 * 320 * 64 + 5 * 64
    expected = (linear * 34 / 64 + 2 * others + 4 * adapters) / 2
    assert memory["param_shards"] == pytest.approx(expected, rel=0.03)  # slices of so small a model are padded
    planned = load(written, ["data.source=x"])
    assert (planned.lora.r, planned.lora.base, planned.model.dtype) == (4, "nf4", "bf16")


@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_the_recipe(tmp_path: Path, name: str) -> None:
    source = f'data.source="{Path(__file__).parents[2] / "README.md"}"'
    config = load(
        name, [source, "data.seq_len=64", "data.eval_fraction=0", "train.steps=3", f"log.directory={tmp_path}"]
    )
    trainer.run(config)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name / "final")


def _merged(seed: int) -> Any:
    torch.manual_seed(seed)
    model = adapted("cpu", init_lora_weights=False)
    model.merge_adapter()
    return model


@on_ranks(2)
def test_adapters_are_not_unmerged_inside_a_forward() -> None:
    """PEFT writes through `.data`, unseen by autograd: the copy would change and the shards would not."""
    plain, model = _merged(3), _merged(3)
    sw.shard(model)
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        with plain.disable_adapter():
            base = plain(tokens).logits
        plain.merge_adapter()
        merged = plain(tokens).logits
        assert_close(model(tokens).logits, merged)
        refusal = r"would unmerge its adapter inside a forward.*model\.unmerge_adapter"
        with pytest.raises(UsageError, match=refusal), model.disable_adapter():
            model(tokens)
        assert_close(model(tokens).logits, merged)  # nothing was written
        with sw.unsharded(model, writeback=True):
            model.unmerge_adapter()
        with model.disable_adapter():
            assert_close(model(tokens).logits, base)
        assert_close(model(tokens).logits, merged)
        with sw.unsharded(model, writeback=True):
            model.merge_adapter()
        assert_close(copy.deepcopy(model)(tokens).logits, merged)


@on_ranks(2)
def test_what_is_trained_beside_an_adapter_is_not_left_out(tmp_path: Path) -> None:
    sw.checkpoint.save(tmp_path / "saved", sw.shard(adapted("cpu", bias="all")), adapter=True)
    model = adapted("cpu")
    model.base_model.model.model.norm.requires_grad_(True)
    sw.shard(model)
    with pytest.raises(UsageError, match=r"'base_model\.model\.model\.norm\.weight' is trained too"):
        sw.checkpoint.save(tmp_path / "refused", model, adapter=True)
    assert not (tmp_path / "refused").exists()


def experts(device: str = "cpu", **options: Any) -> Any:
    """A mixture whose experts are 3-D parameters, two of them adapted: one of PEFT's layers in another."""
    torch.manual_seed(0)
    kept = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names, **options)
    with torch.device(device):
        return peft.get_peft_model(transformers.AutoModelForCausalLM.from_config(kept), config)


def trained(model: Any, rows: Tensor, steps: int = 3) -> list[Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("by", ["blocks", "size", "class"])
@on_ranks(2)
def test_adapted_parameters_train_as_unsharded(recompute: bool, by: str) -> None:
    rows = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(0))
    plain, model = experts(init_lora_weights=False), experts(init_lora_weights=False)
    if recompute:
        for each in (plain, model):
            each.base_model.model.gradient_checkpointing_enable()
            each.enable_input_require_grads()
    expected = trained(plain, rows)
    module = model.get_submodule("base_model.model.model.layers.0.mlp.experts").get_base_layer()
    sw.shard(model, units={"blocks": None, "size": 2000, "class": type(module)}[by], slots=4)
    mine = trained(model, rows.view(2, 2, 8)[dist.get_rank()])
    dist.all_reduce(total := torch.stack(mine))
    assert_close(total / 2, torch.stack(expected))
    full = sw.full_state_dict(model)
    if dist.get_rank() == 0:
        assert_close(full, dict(plain.state_dict()), rtol=1e-4, atol=1e-5)
    with pytest.raises(UsageError, match="other than plain LoRA"):
        merge_adapter(model)


@on_ranks(2)
def test_adapted_parameters_in_a_unit_of_their_own() -> None:
    model = experts()
    sw.shard(model.get_submodule("base_model.model.model.layers.0.mlp.experts.base_layer.base_layer"))
    sw.shard(model)
    with pytest.raises(UsageError, match=r"0\.mlp\.experts' adapts parameter .*make the layer the unit instead"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64))


@on_ranks(2)
def test_adapted_parameters_are_read_and_saved(tmp_path: Path) -> None:
    plain = experts()
    once(lambda: plain.unload().save_pretrained(tmp_path / "base"))
    model = experts("meta")
    sw.shard(model)
    report = sw.checkpoint.load_pretrained(tmp_path / "base", model)
    assert not report.missing
    assert not report.unexpected
    rows = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
    trained(model, rows)
    sw.checkpoint.save(tmp_path / "adapter", model, adapter=True)
    again = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    with torch.no_grad():
        assert_close(model(input_ids=rows).logits, again(input_ids=rows).logits)
        with sw.unsharded(model, writeback=True):
            model.merge_adapter()
        assert_close(model(input_ids=rows).logits, again(input_ids=rows).logits)
