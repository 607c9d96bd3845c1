"""Directories that transformers, or anybody, wrote: read into shards, each rank its own bytes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.pretrained import Pretrained, blank_for, load_pretrained
from shardwise.errors import CheckpointError, HubError, MismatchError, PeerError
from tests.checkpoint.states import Buffered
from tests.engine.cases import Case
from tests.engine.rig import on_ranks, unwarned
from tests.hub.cached import put
from tests.ranks import RankPools

transformers = pytest.importorskip("transformers")

from tests.checkpoint.architectures import ARCHITECTURES, Architecture  # noqa: E402

CASES = (Case("full_shard", 2), Case("shard_grad_op", 3))


def built(architecture: Architecture, meta: bool, **more: Any) -> nn.Module:
    """Other numbers than those on disk, or none."""
    with torch.device("meta" if meta else "cpu"):
        return architecture.build(seed=99, **more)


def load(name: str, case: Case, path: Path, meta: bool) -> tuple[dict[str, Tensor], Tensor | None, Pretrained]:
    architecture = ARCHITECTURES[name]
    model = built(architecture, meta)
    with unwarned(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.checkpoint.format.local_tensor._CHUNK_BYTES", 200)
        if meta:
            with blank_for(path, model):
                case.shard(model)
        else:
            case.shard(model)
        report = load_pretrained(path, model)
    with torch.no_grad():
        outputs = None if architecture.inputs is None else architecture.outputs(model)
    return sw.full_state_dict(model, rank0_only=False), outputs, report


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_save_pretrained_wrote(name: str, ranks: RankPools, tmp_path: Path) -> None:
    architecture = ARCHITECTURES[name]
    model: Any = architecture.build()
    state = model.state_dict()
    with torch.no_grad():
        outputs = None if architecture.inputs is None else architecture.outputs(model)
    for meta, size in ((True, "1GB"), (False, "6KB")):
        path = tmp_path / size
        model.save_pretrained(path, max_shard_size=size)
        assert (path / "model.safetensors").exists() == (size == "1GB")
        stored = [tensor for file in path.glob("*.safetensors") for tensor in load_file(file).values()]
        for case in CASES:
            reports = []
            for loaded, given, report in ranks(case.world_size).run(load, name, case, path, meta):
                assert loaded.keys() == state.keys()
                for key, value in state.items():
                    assert torch.equal(loaded[key], value), key
                assert outputs is None or torch.equal(given, outputs)
                assert report.missing == report.unexpected == report.wrong_shape == ()
                reports.append(report)
            # Buffers are whole on every rank, everything else is read once.
            whole = sum(tensor.nbytes for tensor in stored)
            assert whole <= sum(report.read_bytes for report in reports) < 1.1 * whole


@on_ranks(2)
def test_dtypes_are_cast_both_ways(tmp_path: Path) -> None:
    architecture = ARCHITECTURES["mixtral, stacked experts"]
    source: Any = architecture.build()
    for stored, kept in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        path = everywhere(tmp_path / str(stored), source.to(stored).save_pretrained)
        model = sw.shard(built(architecture, meta=False).to(kept))
        load_pretrained(path, model)
        for name, value in sw.full_state_dict(model, rank0_only=False).items():
            assert value.dtype == kept
            assert torch.equal(value, source.state_dict()[name].to(kept)), name


@on_ranks(2)
def test_any_module_with_buffers_and_our_own_checkpoints(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = sw.shard(Buffered())
    sw.checkpoint.save(tmp_path / "c", model)
    with torch.no_grad():
        model.get_buffer("seen").mul_(3)
    other = sw.shard(Buffered())
    other.get_buffer("count").zero_()
    load_pretrained(tmp_path / "c", other)
    loaded, saved = (sw.full_state_dict(m, rank0_only=False) for m in (other, model))
    assert torch.equal(loaded["seen"], torch.tensor([1.0, 2.0, 3.0]))
    assert loaded["count"] == 7
    for name in saved:
        assert name == "seen" or torch.equal(loaded[name], saved[name]), name


# Names ----------------------------------------------------------------------------------------------------------------


def everywhere(path: Path, write: Callable[[Path], object]) -> Path:
    """Rank 0 writes; all wait."""
    if dist.get_rank() == 0:
        write(path)
    dist.barrier()
    return path


@on_ranks(2)
def test_a_directory_of_the_model_inside(tmp_path: Path) -> None:
    """Heads are newly initialised, and said so; the other way round they are not used."""
    architecture = ARCHITECTURES["llama"]
    source: Any = architecture.build()
    inside = everywhere(tmp_path / "inside", source.model.save_pretrained)
    torch.manual_seed(99)
    reference = built(architecture, meta=False)
    model = built(architecture, meta=True)
    torch.manual_seed(99)
    with blank_for(inside, model):
        sw.shard(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = load_pretrained(inside, model)
    said = [str(warning.message) for warning in caught]
    assert any("newly initialised: lm_head.weight" in message for message in said) == (dist.get_rank() == 0), said
    assert (report.missing, report.unexpected) == (("lm_head.weight",), ())
    loaded = sw.full_state_dict(model, rank0_only=False)
    for name, value in source.state_dict().items():
        expected = reference.state_dict()[name] if name == "lm_head.weight" else value
        assert torch.equal(loaded[name], expected), name

    whole = everywhere(tmp_path / "whole", source.save_pretrained)
    base = sw.shard(transformers.LlamaModel(architecture.configuration()))
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        report = load_pretrained(whole, base)
    assert (report.missing, report.unexpected) == ((), ("lm_head.weight",))
    for name, value in sw.full_state_dict(base, rank0_only=False).items():
        assert torch.equal(value, source.model.state_dict()[name]), name


@on_ranks(2)
def test_names_of_old(tmp_path: Path) -> None:
    """Norms with gamma and beta, a buffer that models no longer store, and a prefix."""
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=33
    )
    source = transformers.BertModel(config)

    def write(path: Path) -> None:
        path.mkdir()
        old = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
        renamed = {}
        for name, value in source.state_dict().items():
            for new, before in old:
                name = name.replace(new, before)  # noqa: PLW2901
            renamed[f"bert.{name}"] = value
        renamed["bert.embeddings.position_ids"] = torch.arange(512)
        save_file(renamed, path / "model.safetensors")

    torch.manual_seed(99)
    model = sw.shard(transformers.BertModel(config))
    report = load_pretrained(everywhere(tmp_path / "old", write), model)
    assert report.missing == report.unexpected == ()
    for name, value in sw.full_state_dict(model, rank0_only=False).items():
        if dist.get_rank() == 0:  # which wrote its own numbers
            assert torch.equal(value, source.state_dict()[name]), name


@on_ranks(2)
def test_what_does_not_fit_is_named_and_nothing_is_overwritten(tmp_path: Path) -> None:
    architecture = ARCHITECTURES["llama"]
    source: Any = architecture.build()

    def without_head(path: Path) -> None:
        source.save_pretrained(path)
        state = load_file(path / "model.safetensors")
        del state["lm_head.weight"]
        save_file(state, path / "model.safetensors", {"format": "pt"})

    # Its own class wrote it, so that nothing may be missing.
    headless = everywhere(tmp_path / "headless", without_head)
    model = sw.shard(built(architecture, meta=False))
    before = sw.full_state_dict(model, rank0_only=False)
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: lm_head\.weight"):
        load_pretrained(headless, model)
    assert load_pretrained(headless, model, strict=False).missing == ("lm_head.weight",)

    inside = everywhere(tmp_path / "inside", source.model.save_pretrained)
    for layers, what in (
        (3, r"missing from the checkpoint: model\.layers\.2\."),
        (1, r"unexpected in the checkpoint: layers\.1\."),
    ):
        other = sw.shard(built(architecture, meta=False, num_hidden_layers=layers))
        with pytest.raises(CheckpointError, match=what):
            load_pretrained(inside, other)
    wider = sw.shard(built(architecture, meta=False, vocab_size=40))
    before = sw.full_state_dict(wider, rank0_only=False)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight \(here \(40, 16\), stored \(33, 16\)\)"):
        load_pretrained(inside, wider)
    after = sw.full_state_dict(wider, rank0_only=False)
    assert all(torch.equal(after[name], before[name]) for name in before)


@on_ranks(2)
def test_tied_weights_stored_under_either_name_or_both(tmp_path: Path) -> None:
    architecture = ARCHITECTURES["gpt2, tied"]
    source: Any = architecture.build()
    both = {name: tensor.clone() for name, tensor in source.state_dict().items()}

    def write(**changed: Tensor | None) -> Callable[[Path], None]:
        state = {name: tensor for name, tensor in {**both, **changed}.items() if tensor is not None}

        def to(path: Path) -> None:
            path.mkdir()
            save_file(state, path / "model.safetensors")

        return to

    head = "lm_head.weight"
    for number, changed in enumerate(({}, {head: None}, {"transformer.wte.weight": None})):
        path = everywhere(tmp_path / str(number), write(**changed))
        model = sw.shard(built(architecture, meta=False))
        report = load_pretrained(path, model)
        assert torch.equal(sw.full_state_dict(model, rank0_only=False)[head], both[head])
        assert (report.peak_staged_bytes > 0) == (not changed)  # to compare the two
    for name, change in ((head, 0.0), ("transformer.wte.weight", 1.0)):
        path = everywhere(tmp_path / f"other-{change}", write(**{name: both[head] * change + 1}))
        with pytest.raises(CheckpointError, match=r"different numbers for .*wte.* and .*lm_head.*tie_word_embeddings="):
            load_pretrained(path, sw.shard(built(architecture, meta=False)))


# Directories that cannot be read --------------------------------------------------------------------------------------


def _index(**names: Any) -> str:
    return json.dumps({"weight_map": names})


DIRECTORIES: dict[str, tuple[dict[str, str], str]] = {
    "nothing": ({"README.md": ""}, r"has neither model\.safetensors nor"),
    "pickles": ({"pytorch_model.bin": ""}, r"pickles .*convert it once with .*save_pretrained"),
    "escapes": ({"model.safetensors.index.json": _index(a="../x.safetensors")}, r"names '\.\./x\.safetensors', which"),
    "no name": ({"model.safetensors.index.json": _index(a="x.bin")}, r"names 'x\.bin', which"),
    "gone": ({"model.safetensors.index.json": _index(a="x.safetensors")}, r"x\.safetensors is missing; model\.safe"),
    "index": ({"model.safetensors.index.json": "{"}, r"index\.json is damaged"),
    "list": ({"model.safetensors.index.json": "[]"}, r"index\.json is damaged"),
    "header": ({"model.safetensors": "x" * 20}, r"model\.safetensors is damaged"),
    "quantized": (
        {"model.safetensors": "", "config.json": '{"quantization_config": {"quant_method": "fp8"}}'},
        r"holds quantized weights \(fp8\).*dequantize them once",
    ),
}


@on_ranks(2)
def test_directories_that_cannot_be_read(tmp_path: Path) -> None:
    model = sw.shard(built(ARCHITECTURES["llama"], meta=False))
    with pytest.raises(CheckpointError, match=r"nowhere is not a directory, or is empty"):
        load_pretrained(tmp_path / "nowhere", model)
    for name, (files, message) in DIRECTORIES.items():

        def write(path: Path, files: dict[str, str] = files) -> None:
            path.mkdir()
            for file, text in files.items():
                (path / file).write_text(text)

        with pytest.raises(CheckpointError, match=message) as raised:
            load_pretrained(everywhere(tmp_path / name, write), model)
        assert "\n" not in str(raised.value)


@on_ranks(2)
def test_integers_are_not_taken_for_weights_and_one_rank_s_failure_is_everyone_s(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.mkdir()
        state = {name: value.contiguous() for name, value in nn.Linear(3, 2).state_dict().items()}
        changed = {**state, "bias": torch.tensor([1, 2])} if path.name == "integers" else state
        save_file(changed, path / "model.safetensors")

    path = everywhere(tmp_path / "integers", write)
    with pytest.raises(CheckpointError, match=r"'bias' is stored as torch\.int64, but 'bias' is torch\.float32"):
        load_pretrained(path, sw.shard(nn.Linear(3, 2)))
    good = everywhere(tmp_path / "good", write)
    with pytest.raises(CheckpointError, match="is not a directory"):  # seen by one rank only
        load_pretrained(good if dist.get_rank() else tmp_path / "nowhere", sw.shard(nn.Linear(3, 2)))


# Memory ---------------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """48 MiB in 12 units of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024, bias=False)) for _ in range(12))


UNIT_BYTES = 1024 * 1024 * 4


def _peak_rss_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@on_ranks(2)
def test_no_rank_ever_holds_more_than_one_unit(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.mkdir()
        save_file({name: value.bfloat16() for name, value in Wide().state_dict().items()}, path / "model.safetensors")

    path = everywhere(tmp_path / "wide", write)
    model = sw.shard(Wide())
    load_pretrained(path, model)  # whatever is allocated once
    extra_bytes = 2**62
    for _ in range(3):  # the least counts: pages of code that the system dropped and reads again are only ever added
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        before = _peak_rss_bytes()
        report = load_pretrained(path, model)
        extra_bytes = min(extra_bytes, _peak_rss_bytes() - before)
    assert report.read_bytes == 12 * UNIT_BYTES // 4  # half of it, in half the bytes
    assert report.peak_staged_bytes == UNIT_BYTES // 4  # a rank's half of one tensor, as it is stored
    assert extra_bytes < UNIT_BYTES, f"{extra_bytes / 2**20:.1f} MiB more than the shards"
    with torch.no_grad():
        expected = load_file(path / "model.safetensors")["blocks.11.0.weight"].float()
        assert torch.equal(sw.full_state_dict(model, rank0_only=False)["blocks.11.0.weight"], expected)


@on_ranks(2)
def test_nothing_is_drawn_that_is_going_to_be_read(tmp_path: Path) -> None:
    architecture = ARCHITECTURES["mixtral, stacked experts"]
    source: Any = architecture.build()
    path = everywhere(tmp_path / "c", source.save_pretrained)
    model = built(architecture, meta=True)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    with blank_for(path, model):
        sw.shard(model)
    assert torch.equal(torch.get_rng_state(), before)
    load_pretrained(path, model)
    for name, value in sw.full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, source.state_dict()[name]), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, source.get_buffer(name)), name
    sw.shard(built(architecture, meta=True))
    assert not torch.equal(torch.get_rng_state(), before)


@on_ranks(2)
def test_ranks_that_read_other_files_are_told(tmp_path: Path) -> None:
    model = sw.shard(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)))
    mine = tmp_path / str(dist.get_rank())
    mine.mkdir()
    stored = {name: torch.ones(value.shape) for name, value in model.state_dict().items()}
    other = {**stored, "another": torch.ones(2)} if mine.name == "1" else stored
    save_file(other, mine / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    with pytest.raises(MismatchError, match=r"call sw\.checkpoint\.load_pretrained on every rank with the same path"):
        sw.checkpoint.load_pretrained(mine, model, strict=False)
    assert not torch.equal(sw.full_state_dict(model, rank0_only=False)["0.bias"], torch.ones(2))
    sw.checkpoint.load_pretrained(tmp_path / "0", model)
    assert torch.equal(sw.full_state_dict(model, rank0_only=False)["0.bias"], torch.ones(2))


@on_ranks(1, 2)
def test_a_name_of_a_hub(tmp_path: Path) -> None:
    """Each rank has a cache of its own, as on machines of their own."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    folder = tmp_path / f"rank{dist.get_rank()}"
    (folder / "made").mkdir(parents=True)
    save_file(dict(model.state_dict()), folder / "made" / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        pinned = put(folder / "made", "org/linear", folder / "cache", patch)
        for name in ("org/linear", pinned):
            other = sw.shard(nn.Linear(3, 2))
            load_pretrained(name, other)
            with sw.unsharded(other):
                assert torch.equal(other.weight, model.weight)
        with pytest.raises((HubError, PeerError), match=r"'org/none': no such file or directory here, and org/none is"):
            load_pretrained("org/none", other)
