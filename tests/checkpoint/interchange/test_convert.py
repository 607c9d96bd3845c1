"""From what others write to shardwise and back: bit for bit, in bounded memory; what cannot be is one line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import convert, verify
from shardwise.checkpoint.interchange.convert import read
from shardwise.checkpoint.interchange.dcp_files import write_dcp
from shardwise.checkpoint.interchange.kinds import kind_of
from shardwise.checkpoint.interchange.safetensors_files import write_checkpoint
from shardwise.checkpoint.interchange.torch_files import write_pt
from shardwise.cli.app import run
from shardwise.errors import CheckpointError
from tests.checkpoint.interchange.sources import load_fsdp2, save_fsdp2, save_fsdp2_with_tp, stored, whole
from tests.checkpoint.states import Buffered, State, everything, load_into, same, step, train_and_save
from tests.engine.cases import Case
from tests.engine.rig import Net, adamw
from tests.engine.tensor.rig import Case as TensorCase
from tests.engine.tensor.rig import sequence, vocabulary
from tests.ranks import RankPools

FORMS = ("nested", "app", "torchtitan")


def alike(a: State, b: State) -> None:
    same(dict(sorted(a.items())), dict(sorted(b.items())))


# torch DCP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_what_fsdp2_wrote_becomes_a_checkpoint(form: str, ranks: RankPools, tmp_path: Path) -> None:
    state = ranks(2).run(save_fsdp2, form, tmp_path / "dcp")[0]
    converted = convert(tmp_path / "dcp", tmp_path / "own")
    verify(tmp_path / "own")
    alike(stored(tmp_path / "own"), state)
    assert converted.left_out == ()
    assert converted.step == (2 if form == "torchtitan" else 0)
    assert converted.optimizer_parameters == len(list(Net().parameters()))
    training = json.loads((tmp_path / "own" / "training.json").read_text())
    assert [group["weight_decay"] for group in training["optimizer"]["groups"]] == [0.1, 0.0]
    extra = {"app": {"epoch": 3}, "torchtitan": {"train_state": {"step": 2, "ntokens_seen": 640}}}.get(form)
    if form == "torchtitan":
        assert extra is not None
        extra["lr_scheduler"] = {"last_epoch": 2}
    assert training["extra"] == extra
    for loaded in ranks(3).run(load_net, tmp_path / "own"):
        alike(loaded, state)


def load_net(path: Path) -> State:
    torch.manual_seed(8)
    model = sw.shard(Net())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1]},
            {"params": [p for p in model.parameters() if p.ndim < 2]},
        ]
    )
    sw.checkpoint.load(path, model, optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.param_groups[0]["lr"] == 0.05
    return everything(model, optimizer)


UNEVEN: list[dict[str, Any]] = [{"hidden": 24}, {"hidden": 22}, {"hidden": 2}]
"""For 2 x 2 ranks: even, uneven, and with no row for some. The vocabulary of 31 tokens is never even."""


@pytest.mark.parametrize("form", ["nested", "torchtitan"])
@pytest.mark.parametrize("model", UNEVEN, ids=str)
@pytest.mark.parametrize("plan", [vocabulary, sequence], ids=lambda plan: plan.__name__)
def test_what_fsdp2_wrote_beside_tensor_parallelism(
    plan: Any, model: dict[str, Any], form: str, ranks: RankPools, tmp_path: Path
) -> None:
    _convert_with_tp(TensorCase(plan, model=model), form, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["nested", "torchtitan"])
@pytest.mark.parametrize("model", UNEVEN, ids=str)
def test_what_fsdp2_wrote_beside_tensor_parallelism_and_replicas(
    model: dict[str, Any], form: str, ranks: RankPools, tmp_path: Path
) -> None:
    _convert_with_tp(TensorCase(vocabulary, (2, 2, 2), "hybrid_shard", model=model), form, ranks, tmp_path)


def _convert_with_tp(case: TensorCase, form: str, ranks: RankPools, path: Path) -> None:
    """What FSDP2 wrote is the same in the checkpoint, and in the engine's model over the same mesh that loads it."""
    state = ranks(case.world_size).run(save_fsdp2_with_tp, form, case, path / "dcp")[0]
    assert convert(path / "dcp", path / "own").left_out == ()
    verify(path / "own")
    alike(stored(path / "own"), state)
    for loaded in ranks(case.world_size).run(load_with_tp, case, path / "own"):
        alike(loaded, state)


def load_with_tp(case: TensorCase, path: Path) -> State:
    _, model = case.build()
    optimizer = torch.optim.AdamW(model.parameters())
    sw.checkpoint.load(path, model, optimizer)
    return everything(model, optimizer)


def test_state_of_another_class_is_not_taken_for_this_one_s(tmp_path: Path) -> None:
    """DCP does not say which optimizer wrote it; its state does."""
    model = sw.shard(nn.Linear(4, 4))
    adam = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(2, 4)).sum().backward()
    adam.step()
    dcp.save({"model": model.state_dict(), "optimizer": adam.state_dict()}, checkpoint_id=tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "own")
    for fitting in (torch.optim.AdamW, torch.optim.Adam):
        sw.checkpoint.load(tmp_path / "own", model, fitting(model.named_parameters()))
    for other in (torch.optim.SGD(model.parameters(), momentum=0.9), torch.optim.RMSprop(model.parameters())):
        with pytest.raises(CheckpointError, match=r"has the state exp_avg, exp_avg_sq, which (SGD|RMSprop)"):
            sw.checkpoint.load(tmp_path / "own", model, other)
        loaded = sw.checkpoint.load(tmp_path / "own", model, other, strict=False)
        assert not other.state
        assert "optimizer state of weight" in loaded.missing


@pytest.mark.parametrize("form", ["nested", "torchtitan"])
def test_fsdp2_loads_what_a_checkpoint_became(form: str, ranks: RankPools, tmp_path: Path) -> None:
    state = ranks(2).run(save_net, tmp_path / "own")[0]
    convert(tmp_path / "own", tmp_path / "dcp", "dcp", flat=form == "torchtitan")
    for loaded in ranks(2).run(load_fsdp2, form, tmp_path / "dcp"):
        alike(loaded, state)


def save_net(path: Path) -> State:
    torch.manual_seed(9)
    model = sw.shard(Net())
    optimizer = adamw(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
    )
    for index in range(2):
        step(model, optimizer, index)
    sw.checkpoint.save(path, model, optimizer, step=2)
    return everything(model, optimizer)


@pytest.mark.parametrize("way", ["dcp", "pt"])
def test_there_and_back_gives_the_very_same_files(way: str, ranks: RankPools, tmp_path: Path) -> None:
    """Of a model with buffers, several dtypes, 0-d, empty, frozen and tied parameters."""
    state = ranks(2).run(train_and_save, Case("full_shard", 2), tmp_path / "own")[0]
    between = tmp_path / ("between.pt" if way == "pt" else "between")
    convert(tmp_path / "own", between, way)
    back = convert(between, tmp_path / "back")
    assert (back.step, back.left_out) == (2, ())
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "own" / name).read_bytes()
    for loaded in ranks(3).run(load_into, Case("shard_grad_op", 3), tmp_path / "back"):
        same(loaded, state)


def save_with_extra(path: Path, extra: dict[str, Any]) -> None:
    sw.checkpoint.save(path, sw.shard(nn.Linear(2, 2)), step=3, extra=extra)


@pytest.mark.parametrize("empty", [{}, {"empty": {}, "none": [], "deep": {"a": [[], {}]}}], ids=["full", "empty"])
@pytest.mark.parametrize("way", ["dcp", "pt"])
def test_extra_comes_back_as_it_was(way: str, empty: dict[str, Any], ranks: RankPools, tmp_path: Path) -> None:
    """A SequentialLR's state is a list of dicts."""
    schedulers = {"_schedulers": [{"last_epoch": 1, "_last_lr": [0.1]}, {"last_epoch": 2}]}
    extra = {"schedulers": schedulers, "nested": [[1, 2], [3]], "0": {"1": None}, "t": True, **empty}
    ranks(1).run(save_with_extra, tmp_path / "own", extra)
    between = tmp_path / ("between.pt" if way == "pt" else "between")
    convert(tmp_path / "own", between, way)
    back = convert(between, tmp_path / "back")
    assert back.left_out == ()
    assert json.loads((tmp_path / "back" / "training.json").read_text())["extra"] == extra


def test_a_tensor_cut_along_any_dim_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tensor parallelism and 2-D meshes write it; and in chunks of two rows."""
    monkeypatch.setattr("shardwise.checkpoint.interchange.dcp_files._CHUNK_BYTES", 140)
    tensor = torch.arange(7 * 5 * 3, dtype=torch.float32).view(7, 5, 3)
    pieces = {
        (0, 0, 0): tensor[:4, :2],
        (4, 0, 0): tensor[4:, :2],
        (0, 2, 0): tensor[:4, 2:],
        (4, 2, 0): tensor[4:, 2:],
    }
    dcp.save({"model": {"w": Cut(tensor, pieces)}}, checkpoint_id=tmp_path / "dcp", planner=Planner(), no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "own")
    assert torch.equal(load_file(tmp_path / "own" / "model.safetensors")["w"], tensor)
    convert(tmp_path / "own", tmp_path / "again", "dcp")
    into = {"model": {"w": torch.zeros(7, 5, 3)}}
    dcp.load(into, checkpoint_id=tmp_path / "again", no_dist=True)
    assert torch.equal(into["model"]["w"], tensor)
    convert(tmp_path / "again", tmp_path / "full.pt")
    assert torch.equal(torch.load(tmp_path / "full.pt", weights_only=True)["model"]["w"], tensor)


class Cut:
    """A tensor in several boxes on one rank."""

    def __init__(self, tensor: Tensor, pieces: dict[tuple[int, ...], Tensor]) -> None:
        self.tensor, self.pieces = tensor, pieces

    def __create_write_items__(self, fqn: str, object: object) -> list[Any]:  # noqa: A002
        from torch.distributed.checkpoint import metadata as m
        from torch.distributed.checkpoint import planner as p

        return [
            p.WriteItem(
                m.MetadataIndex(fqn, offsets),
                p.WriteItemType.SHARD,
                tensor_data=p.TensorWriteData(
                    m.ChunkStorageMetadata(torch.Size(offsets), piece.shape), m.TensorProperties(), self.tensor.shape
                ),
            )
            for offsets, piece in self.pieces.items()
        ]


class Planner(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        return self.state_dict[write_item.index.fqn].pieces[tuple(write_item.index.offset)]


# Full files -----------------------------------------------------------------------------------------------------------


def plain(named: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = Buffered()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = adamw(trained if named else [p for _, p in trained])
    for index in range(2):
        (model(torch.randn(5, 4, generator=torch.Generator().manual_seed(index))).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_a_training_scripts_file(ranks: RankPools, tmp_path: Path) -> None:
    model, optimizer = plain()
    document = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 2,
        "extra": {"position": [0, 7]},
    }
    torch.save(document, tmp_path / "full.pt")
    convert(tmp_path / "full.pt", tmp_path / "own")
    verify(tmp_path / "own")
    for loaded in ranks(2).run(load_into, Case("full_shard", 2), tmp_path / "own"):
        alike(loaded, whole(model, optimizer))


@pytest.mark.parametrize("key", [None, "state_dict", "model_state_dict"])
def test_files_of_weights_alone(key: str | None, tmp_path: Path) -> None:
    """Also such that share memory, lie transposed in it, or begin in its middle."""
    base = torch.arange(24.0).view(4, 6)
    weights = {
        "a": base,
        "model.transposed": base.t(),
        "rows": base[1:3],
        "column": base[:, 2],
        "half": base.to(torch.bfloat16),
        "wide": torch.tensor(1.5).expand(2, 3),
        "none": torch.zeros(0, 3),
        "count": torch.tensor(3),
    }
    torch.save({key: weights, "epoch": 3} if key else weights, tmp_path / "weights.pt")
    convert(tmp_path / "weights.pt", tmp_path / "own")
    found = load_file(tmp_path / "own" / "model.safetensors")
    alike(found, {name: tensor.contiguous() for name, tensor in weights.items()})
    training = json.loads((tmp_path / "own" / "training.json").read_text())
    assert training["optimizer"] is None
    assert training["extra"] == ({"epoch": 3} if key else None)


@pytest.mark.parametrize("way", ["dcp", "pt"])
def test_views_that_are_conjugated_or_negated_when_they_are_read(way: str, tmp_path: Path) -> None:
    """torch saves what they are views of, and a mark."""
    numbers = torch.arange(12.0).view(torch.complex64).view(2, 3)
    weights = {
        "conjugated": numbers.conj(),
        "turned": numbers.conj().t(),
        "negated": numbers.clone().conj().imag,
        "negated_whole": torch._neg_view(torch.arange(4.0)),
        "both": torch._neg_view(numbers.conj()),
        "plain": numbers,
    }
    assert weights["negated"].is_neg()
    source = tmp_path / ("weights.pt" if way == "pt" else "weights")
    if way == "pt":
        torch.save(weights, source)
    else:
        dcp.save(weights, checkpoint_id=source, no_dist=True)
    convert(source, tmp_path / "own")
    alike(
        load_file(tmp_path / "own" / "model.safetensors"),
        {n: t.resolve_conj().resolve_neg() for n, t in weights.items()},
    )


@pytest.mark.parametrize("way", ["dcp", "pt"])
@pytest.mark.parametrize("value", [torch.tensor(7), torch.tensor(0.5), torch.arange(3.0)], ids=["int", "float", "1-D"])
def test_a_tensor_called_step_in_a_state_dict_is_the_models(value: Tensor, way: str, tmp_path: Path) -> None:
    weights = {"step": value, "w": torch.ones(3)}
    source = tmp_path / ("weights.pt" if way == "pt" else "weights")
    if way == "pt":
        torch.save(weights, source)
    else:
        dcp.save(weights, checkpoint_id=source, no_dist=True)
    assert convert(source, tmp_path / "own").step == 0
    alike(load_file(tmp_path / "own" / "model.safetensors"), weights)


def test_a_step_beside_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {"step": torch.tensor(3), "w": torch.ones(3)}
    for name, value, left_out in (
        ("number", 7, ()),
        ("tensor", torch.tensor(7), ()),
        ("vector", torch.ones(3), ("step",)),
    ):
        torch.save({"model": weights, "step": value}, tmp_path / f"{name}.pt")
        found = convert(tmp_path / f"{name}.pt", tmp_path / name)
        assert (found.step, found.left_out) == (0 if left_out else 7, left_out)
        alike(load_file(tmp_path / name / "model.safetensors"), weights)
    assert "tensor named 'step'" in refused(capsys, tmp_path / "number", tmp_path / "dcp", "--to", "dcp", "--flat")
    torch.save({"w": torch.ones(3), "step": 7}, tmp_path / "bare.pt")
    assert convert(tmp_path / "bare.pt", tmp_path / "bare").step == 7


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_state_that_is_one_number_stays_one_for_parameters_that_are_numbers(
    kind: Callable[..., torch.optim.Optimizer], alone: bool, tmp_path: Path
) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    build = Scale if alone else Buffered
    torch.manual_seed(5)
    plain = build()
    optimizer = kind([(name, p) for name, p in plain.named_parameters() if p.requires_grad and p.numel()])
    train(plain, optimizer)
    torch.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "full.pt")
    convert(tmp_path / "full.pt", tmp_path / "own")
    model = sw.shard(build())
    resumed = kind([p for p in model.parameters() if p.requires_grad and p.numel()])
    sw.checkpoint.load(tmp_path / "own", model, resumed)
    alike(everything(model, resumed), whole(plain, optimizer))
    train(plain, optimizer)
    train(model, resumed)
    alike(everything(model, resumed), whole(plain, optimizer))


class Scale(nn.Module):
    """Of one 0-d parameter: nothing beside it says which of its state are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_the_default_device_does_not_matter(tmp_path: Path) -> None:
    model, optimizer = plain()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "full.pt")
    with torch.device("meta"):
        for number, to in enumerate(("shardwise", "dcp", "shardwise", "pt", "shardwise")):
            source = tmp_path / ("full.pt" if not number else f"{number - 1}")
            convert(source, tmp_path / f"{number}", to)
    alike(stored(tmp_path / "4"), whole(model, optimizer))


def test_a_file_from_gpus_is_read_without_one(tmp_path: Path) -> None:
    with torch._subclasses.FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({"w": torch.empty(4, device="cuda:0")}, tmp_path / "gpu.pt")
    convert(tmp_path / "gpu.pt", tmp_path / "own")
    assert load_file(tmp_path / "own" / "model.safetensors")["w"].shape == (4,)


def test_torch_loads_the_file(ranks: RankPools, tmp_path: Path) -> None:
    state = ranks(2).run(train_and_save, Case("full_shard", 2), tmp_path / "own")[0]
    convert(tmp_path / "own", tmp_path / "full.pt")
    for mmap in (False, True):
        loaded = torch.load(tmp_path / "full.pt", weights_only=True, mmap=mmap)
        found = dict(loaded["model"])
        for fqn, values in loaded["optimizer"]["state"].items():
            found.update({f"{fqn}.{name}": value for name, value in values.items()})
        found["again.weight"] = found["leave.weight"]  # tied
        alike(found, state)
        assert (loaded["step"], loaded["extra"]) == (2, {"position": [0, 7]})
        assert loaded["optimizer"]["param_groups"][0]["lr"] == 0.05
    assert not (tmp_path / "full.pt.partial").exists()


# Hugging Face ---------------------------------------------------------------------------------------------------------


def test_hugging_face_directories_both_ways(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "hf", max_shard_size="8KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    convert(tmp_path / "hf", tmp_path / "dcp", "dcp", flat=True)
    into = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    dcp.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    alike(into, model.state_dict())
    convert(tmp_path / "dcp", tmp_path / "again", "hf", files_from=tmp_path / "hf", max_file_bytes=8000)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "again")
    alike(again.state_dict(), model.state_dict())


def test_names_that_transformers_rewrites(ranks: RankPools, tmp_path: Path) -> None:
    """FSDP2 saves what the model calls its tensors, both names of tied ones; the files of a ViT have others."""
    pytest.importorskip("transformers")
    for kind in (vit, tied_llama):
        model = kind(seed=1)
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / kind.__name__ / "dcp", no_dist=True)
        convert(tmp_path / kind.__name__ / "dcp", tmp_path / kind.__name__ / "own")
        for loaded in ranks(2).run(load_weights, kind, tmp_path / kind.__name__ / "own"):
            alike(loaded, model.state_dict())


def load_weights(kind: Callable[[int], nn.Module], path: Path) -> State:
    model = sw.shard(kind(2))
    sw.checkpoint.load(path, model)
    return sw.full_state_dict(model, rank0_only=False)


def vit(seed: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(seed)
    config = ViTConfig(
        hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    return ViTForImageClassification(config)


def tied_llama(seed: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


# Files of each rank ---------------------------------------------------------------------------------------------------


def test_what_was_saved_to_a_url_is_joined(ranks: RankPools, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    case, url = Case("full_shard", 2), f"file://{tmp_path}/remote"
    state = ranks(2).run(train_and_save, case, url)[0]
    ranks(2).run(train_and_save, case, tmp_path / "direct")
    assert convert(url, tmp_path / "own").source.value == "parts"
    verify(tmp_path / "own")
    for name in ("model.safetensors", "optimizer.safetensors", "training.json"):
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "direct" / name).read_bytes()
    convert(tmp_path / "remote", tmp_path / "full.pt")
    convert(tmp_path / "full.pt", tmp_path / "again")
    for loaded in ranks(2).run(load_into, case, tmp_path / "again"):
        same(loaded, state)
    assert convert(url, tmp_path / "weights", model_only=True).optimizer_parameters is None


# Memory ---------------------------------------------------------------------------------------------------------------

PEAK = """
import sys, torch
from pathlib import Path
from shardwise.checkpoint import convert
def status(key):
    return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) * 1024
root = Path(sys.argv[1])
for number, pair in enumerate(sys.argv[2:]):
    source, target, to = pair.split(",")
    convert(root / "small" / source, root / "small" / target, to)
for pair in sys.argv[2:]:
    source, target, to = pair.split(",")
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    convert(root / "large" / source, root / "large" / target, to)
    print(to, status("VmHWM") - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """256 MiB in tensors of 64 MiB: each way holds a few parts of 32 MiB, whatever the size."""
    for size, numel in (("small", 8), ("large", 4096)):
        weights = {f"w{i}": torch.zeros(numel, numel) for i in range(2)}
        moments = {name: {"step": torch.tensor(1.0), "exp_avg": weight} for name, weight in weights.items()}
        groups = [{"lr": 0.1, "params": list(weights)}]
        document = {"model": weights, "optimizer": {"state": moments, "param_groups": groups}}
        dcp.save(document, checkpoint_id=tmp_path / size / "dcp", no_dist=True)
    pairs = ("dcp,own,shardwise", "own,full.pt,pt", "full.pt,own2,shardwise", "own2,dcp2,dcp", "own2,hf,hf")
    result = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path), *pairs], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    peaks = [int(line.split()[1]) for line in result.stdout.splitlines()]
    print({to: f"{peak / 2**20:.0f} MiB" for to, peak in zip(pairs, peaks, strict=True)})
    assert len(peaks) == len(pairs)
    assert max(peaks) < 96 * 2**20


# What cannot be -------------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a command that ends with status 2."""
    assert run(["convert", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert len(lines) == 1, printed.err
    return lines[0]


def test_each_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, own = tmp_path / "weights.pt", tmp_path / "own"
    torch.save({"w": torch.ones(3)}, weights)
    convert(weights, own)
    (tmp_path / "c.partial").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "__0_0.distcp").touch()
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    torch.save({"__metadata__": torch.ones(3)}, tmp_path / "reserved.pt")
    torch.save({"a": {"b": {"c": torch.ones(3)}}}, tmp_path / "deep.pt")
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"w": torch.ones(3), "args": argparse.Namespace(lr=1)}, tmp_path / "args.pt")
    cases: list[tuple[tuple[object, ...], str]] = [
        ((tmp_path / "nothing", own), "no such checkpoint"),
        ((tmp_path / "empty", own), "is not a checkpoint"),
        ((tmp_path / "c.partial", own), "was left by an unfinished save"),
        ((tmp_path / "unfinished", own), "left by an unfinished DCP save"),
        ((tmp_path / "text.pt", tmp_path / "x"), "is not a file of torch.save"),
        ((tmp_path / "old.pt", tmp_path / "x"), "before torch 1.6"),
        ((tmp_path / "tensor.pt", tmp_path / "x"), "tensor.pt holds a tensor, not a dict of tensors"),
        ((tmp_path / "deep.pt", tmp_path / "x"), "deep.pt: it has no model"),
        ((tmp_path / "args.pt", tmp_path / "x"), "argparse.Namespace"),
        ((weights, own), "exists already"),
        ((own, weights), "exists already: convert to another path, or remove it first"),
        ((own, tmp_path / "x"), "add --to dcp or --to hf"),
        ((own, tmp_path / "x", "--to", "shardwise"), "the source already has that kind"),
        ((own, tmp_path / "x", "--to", "zip"), "one of shardwise, dcp, pt, hf"),
        ((own, tmp_path / "x.pt", "--to", "dcp"), "names a file"),
        ((own / "model.safetensors", tmp_path / "x"), "give its directory"),
        ((own, "s3://bucket/x", "--to", "dcp"), "s3://bucket/x is a URL, but a conversion writes only to a path"),
        (
            (weights, tmp_path / "x", "--files-from", tmp_path / "nodir"),
            "nodir, whose files are to be copied, is not a dir",
        ),
        ((weights, tmp_path / "x", "--files-from", weights), "weights.pt, whose files are to be copied, is not a dir"),
        ((tmp_path / ("x" * 256), own), "xxx cannot be read: File name too long"),
        ((weights, tmp_path / ("x" * 256)), "xxx cannot be written: [Errno 36] File name too long"),
        ((tmp_path / "reserved.pt", tmp_path / "x"), "a tensor is named '__metadata__', which is reserved"),
    ]
    for arguments, message in cases:
        assert message in refused(capsys, *arguments), arguments
    assert not (tmp_path / "x").exists()
    assert not list(tmp_path.glob("x*"))
    assert not Path("s3:").exists()


def test_nothing_in_a_file_is_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.mkdir, (tmp_path / "ran",)

    torch.save({"w": torch.ones(3), "x": Evil()}, tmp_path / "evil.pt")
    assert "holds more than tensors and plain values" in refused(capsys, tmp_path / "evil.pt", tmp_path / "own")
    dcp.save({"model": {"w": torch.ones(3)}, "x": Evil()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert not (tmp_path / "ran").exists()
    assert convert(tmp_path / "dcp", tmp_path / "own").left_out == ("x",)
    dcp.save({"model": {"w": torch.ones(3)}, "optimizer": {"x": Evil()}}, checkpoint_id=tmp_path / "d2", no_dist=True)
    assert "optimizer.x of its optimizer" in refused(capsys, tmp_path / "d2", tmp_path / "own2")
    assert not (tmp_path / "ran").exists()


def test_optimizer_state_by_position_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = plain(named=False)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "full.pt")
    assert "by position" in refused(capsys, tmp_path / "full.pt", tmp_path / "own")
    assert run(["convert", str(tmp_path / "full.pt"), str(tmp_path / "own"), "--model-only"]) == 0
    assert "no optimizer" in capsys.readouterr().out
    verify(tmp_path / "own")


@pytest.mark.parametrize("damage", ["missing", "truncated", "other"])
def test_damaged_data_is_named(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp.save({"model": {"a": torch.ones(300), "b": torch.ones(2, 3)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    file = tmp_path / "dcp" / "__0_0.distcp"
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(data[: len(data) // 2])
    else:
        dcp.save({"model": {"a": torch.ones(300), "b": torch.ones(3, 2)}}, checkpoint_id=tmp_path / "o", no_dist=True)
        file.write_bytes((tmp_path / "o" / "__0_0.distcp").read_bytes())
    assert "__0_0.distcp" in refused(capsys, tmp_path / "dcp", tmp_path / "own")
    assert not (tmp_path / "own").exists()
    assert not (tmp_path / "own.partial").exists()


@pytest.mark.parametrize("file", ["weights.pt", "dcp/__0_0.distcp", "hf/model.safetensors"])
def test_a_file_that_is_cut_while_it_is_converted_is_named(file: str, tmp_path: Path) -> None:
    """No tensor is read through a memory map, where that would end the process."""
    weights = {"w": torch.ones(30_000)}
    torch.save(weights, tmp_path / "weights.pt")
    dcp.save(weights, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    source = tmp_path / file.split("/")[0]
    contents = read(source, kind_of(source))
    size = (tmp_path / file).stat().st_size
    for cut, message in ((size // 2, "ends at byte|is damaged"), (None, "is missing")):
        (tmp_path / file).unlink() if cut is None else os.truncate(tmp_path / file, cut)
        for write in (write_pt, partial(write_dcp, flat=False), partial(write_checkpoint, max_file_bytes=size)):
            with pytest.raises(CheckpointError, match=f"{file} ({message})"):
                write(contents, tmp_path / "target")
            assert not list(tmp_path.glob("target*"))


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.ones(300)}, tmp_path / "model.safetensors")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("safetensors_files", "torch_files"):
        monkeypatch.setattr(f"shardwise.checkpoint.interchange.{name}.os.pwrite", full)
    for target in ("own", "full.pt"):
        with pytest.raises(CheckpointError, match=f"{target} cannot be written.*No space"):
            convert(tmp_path, tmp_path / "out" / target)
        assert list((tmp_path / "out").iterdir()) == []
