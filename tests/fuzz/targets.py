"""What reads files that others wrote, each with a good file and a way to read a damaged one as a user would."""

from __future__ import annotations

import json
import pickle
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st

import shardwise as sw
from shardwise.checkpoint.format import manifest, names_json, training_json
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.format.safetensors_layout import LENGTH_BYTES
from shardwise.checkpoint.interchange.checkpoint_contents import CheckpointContents, LazyTensor
from shardwise.checkpoint.interchange.convert import convert
from shardwise.checkpoint.interchange.inspection import inspect
from shardwise.checkpoint.io.storage import LocalDirectory
from shardwise.checkpoint.names.index_map import IndexMap, Place
from shardwise.foreign.files import read as read_foreign
from shardwise.generation.rows import read_rows
from shardwise.plan.hardware.devices import find_device, find_interconnect
from shardwise.toml_text import toml_text
from shardwise.train.config.files import load
from shardwise.train.data.rows import document_of_row
from shardwise.train.data.sources import read_documents
from tests.fuzz.mutations import VALUES, cut, damaged, edited


@dataclass(frozen=True)
class Target:
    """A kind of file."""

    inputs: st.SearchStrategy[Any]
    """Damaged copies of a good one."""
    read: Callable[[Any], object]
    """Reads one."""
    share: float = 1
    """Inputs that it gets, beside others'."""


def targets(room: Path) -> dict[str, Target]:
    """Return all targets by name. They write below `room`, an empty directory."""
    makers = (_checkpoints, _loading, _hugging_face, _torch_files, _configurations, _hardware, _rows)
    found: dict[str, Target] = {}
    for make in makers:
        place = room / make.__name__.strip("_")
        place.mkdir()
        found |= make(place)
    return found


def _as_json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def _as_toml(tree: Any) -> bytes:
    return toml_text(tree).encode()


def _as_lines(rows: Any) -> bytes:
    return b"\n".join(map(_as_json, rows))


# Checkpoints ----------------------------------------------------------------------------------------------------------


def _contents() -> CheckpointContents:
    """A model of three tensors, one of which is stored in two places, with its optimizer."""
    tensors = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(8.0), "c": torch.ones(2, 2, dtype=torch.bfloat16)}
    lazy = {name: _lazy(tensor) for name, tensor in tensors.items()}
    state = {"a.exp_avg": _lazy(torch.zeros(3, 4))}
    optimizer = {
        "class": "AdamW",
        "groups": [{"lr": 0.1, "betas": [0.9, 0.95], "fqns": ["a", "b"]}],
        "dtypes": {"a": "F32"},
        "state": {"a": {"exp_avg": {"tensor": "a.exp_avg"}, "step": {"scalar": 3.0, "dtype": "F32", "shape": []}}},
    }
    halves = (Place("b", (8,), IndexMap.one(8)),)
    names = [names_json.NamedTensor(("b", "tied"), (8,), halves)]
    return CheckpointContents(lazy, state, optimizer, 7, {"loader": {"epoch": 1}}, names=names)


def _lazy(tensor: torch.Tensor) -> LazyTensor:
    return LazyTensor(tensor.dtype, tuple(tensor.shape), lambda: tensor)


def _all_of(path: Path, out: Path) -> None:
    """Look at a checkpoint, and convert it to other kinds."""
    inspect(path)
    for kind, target in (("pt", out.with_suffix(".pt")), ("dcp", out)):
        try:
            convert(path, target, kind)
        finally:
            shutil.rmtree(target, ignore_errors=True)
            target.unlink(missing_ok=True)


def _checkpoints(room: Path) -> dict[str, Target]:
    from shardwise.checkpoint.interchange.safetensors_files import write_checkpoint

    good, out = room / "good", room / "out"
    write_checkpoint(_contents(), good, 2**30)

    def target(name: str, inputs: st.SearchStrategy[bytes], share: int) -> Target:
        def read(data: bytes) -> None:
            with _replaced(good, name, data):
                _all_of(good, out)
                manifest.verify(good)

        return Target(inputs, read, share)

    def encode_header(tree: Any) -> bytes:
        text = json.dumps(tree).encode()
        return len(text).to_bytes(LENGTH_BYTES, "little") + text + weights[header_end:]

    weights = (good / "model.safetensors").read_bytes()
    header_end = LENGTH_BYTES + int.from_bytes(weights[:LENGTH_BYTES], "little")
    header = json.loads(weights[LENGTH_BYTES:header_end])
    found = {name: target(name, _json(good / name), 3) for name in (manifest.NAME, training_json.NAME, names_json.NAME)}
    return found | {"safetensors of a checkpoint": target("model.safetensors", damaged(header, encode_header), 1)}


def _loading(room: Path) -> dict[str, Target]:
    """`sw.checkpoint.load` by a group of one rank, which this process becomes."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    good = room / "good"
    torch.manual_seed(0)
    model = sw.shard(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), "full_shard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    sw.checkpoint.save(good, model, optimizer, step=3, extra={"epoch": 1})

    def target(name: str) -> Target:
        def read(data: bytes) -> None:
            with _replaced(good, name, data):
                sw.checkpoint.load(good, model, optimizer)

        return Target(_json(good / name), read, 2)

    return {f"{name}, loaded": target(name) for name in (manifest.NAME, training_json.NAME)}


@contextmanager
def _replaced(checkpoint: Path, name: str, data: bytes) -> Iterator[None]:
    """Give a file of a checkpoint another content in the block; the manifest has its checksum, unless it is that."""
    before = {each: (checkpoint / each).read_bytes() for each in {name, manifest.NAME}}
    try:
        (checkpoint / name).write_bytes(data)
        if name != manifest.NAME:
            records = manifest.read(LocalDirectory(checkpoint)).files
            manifest.write(LocalDirectory(checkpoint), Manifest({**records, name: manifest.record_of(data)}))
        yield
    finally:
        for each, its in before.items():
            (checkpoint / each).write_bytes(its)


def _json(path: Path) -> st.SearchStrategy[bytes]:
    return damaged(json.loads(path.read_bytes()), _as_json)


def _hugging_face(room: Path) -> dict[str, Target]:
    from safetensors.torch import save

    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.int64), "c": torch.zeros(0)}
    weights = save(tensors, {"format": "pt"})
    end = LENGTH_BYTES + int.from_bytes(weights[:LENGTH_BYTES], "little")
    single, several, out = room / "single", room / "several", room / "out"
    for place in (single, several):
        place.mkdir()
    (several / "1.safetensors").write_bytes(save({"a": tensors["a"]}))
    (several / "2.safetensors").write_bytes(save({"b": tensors["b"]}))
    index = {"metadata": {"total_size": 56}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}

    def encode(tree: Any) -> bytes:
        text = json.dumps(tree).encode()
        return len(text).to_bytes(LENGTH_BYTES, "little") + text + weights[end:]

    def read(place: Path, name: str, data: bytes) -> None:
        (place / name).write_bytes(data)
        _all_of(place, out)

    return {
        "safetensors": Target(
            damaged(json.loads(weights[LENGTH_BYTES:end]), encode), partial(read, single, "model.safetensors"), 3
        ),
        "index": Target(
            damaged(index, _as_json),
            partial(read, several, "model.safetensors.index.json"),
            3,
        ),
    }


def _torch_files(room: Path) -> dict[str, Target]:
    good, dcp, out = room / "good.pt", room / "dcp", room / "out"
    from shardwise.checkpoint.interchange.dcp_files import write_dcp
    from shardwise.checkpoint.interchange.torch_files import write_pt

    write_pt(_contents(), good)
    write_dcp(_contents(), dcp, False)
    metadata = dcp / ".metadata"

    def read(path: Path, data: bytes) -> None:
        path.write_bytes(data)
        source = path if path.suffix else path.parent
        try:
            convert(source, out)
        finally:
            shutil.rmtree(out, ignore_errors=True)

    hostile = st.sampled_from([pickle.dumps(each) for each in (_Hostile(), [1] * 9, {"model": 1}, None, 1j)])
    return {
        "torch.save": Target(cut(good.read_bytes()), partial(read, room / "bad.pt")),
        "DCP metadata": Target(st.one_of(cut(metadata.read_bytes()), hostile), partial(read, metadata), 2),
    }


class _Hostile:
    """A pickle that would run a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise_ = "raise AssertionError('a pickle was executed')"
        return exec, (raise_,)


# Settings -------------------------------------------------------------------------------------------------------------


def _configurations(room: Path) -> dict[str, Target]:
    recipes = files("shardwise") / "recipes"
    trees = [tomllib.loads(each.read_text()) for each in recipes.iterdir() if each.name.endswith(".toml")]
    path = room / "config.toml"
    keys = sorted(f"{section}.{key}" for tree in trees for section, table in tree.items() for key in table)
    overrides = st.lists(
        st.tuples(
            st.one_of(st.sampled_from(keys), st.text(max_size=12)), st.one_of(VALUES.map(str), st.text(max_size=9))
        ),
        min_size=1,
        max_size=3,
    ).map(lambda pairs: ["=".join(pair) for pair in pairs])

    def read(data: bytes) -> None:
        path.write_bytes(data)
        load(path)

    def foreign(suffix: str, data: bytes) -> None:
        place = room / f"foreign{suffix}"
        place.write_bytes(data)
        read_foreign(place)

    deepspeed = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "overlap_comm": True},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
    }
    accelerate = {
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_offload_params": False,
        },
        "num_processes": 2,
    }
    return {
        "configuration": Target(st.one_of([damaged(tree, _as_toml) for tree in trees]), read, 6),
        "overrides": Target(overrides, lambda given: load("quickstart", given), 2),
        "DeepSpeed's settings": Target(damaged(deepspeed, _as_json), partial(foreign, ".json")),
        "Accelerate's settings": Target(damaged(accelerate, _as_json), partial(foreign, ".yaml")),
    }


def _hardware(room: Path) -> dict[str, Target]:
    data = files("shardwise.plan.hardware") / "data"

    def target(kind: str, find: Callable[[Path], object]) -> Target:
        names = sorted((each.name for each in (data / kind).iterdir() if each.name.endswith(".toml")), key=len)[:3]
        trees = [tomllib.loads((data / kind / name).read_text()) for name in names]

        def read(given: bytes) -> None:
            path = room / f"{kind}.toml"
            path.write_bytes(given)
            find(path)

        return Target(st.one_of([damaged(tree, _as_toml) for tree in trees]), read, 2)

    return {"device": target("devices", find_device), "interconnect": target("interconnects", find_interconnect)}


# Rows -----------------------------------------------------------------------------------------------------------------


_ROWS = [
    {"text": "once"},
    {"messages": [{"role": "user", "content": "two and two"}, {"role": "assistant", "content": "four"}]},
    {"conversations": [{"from": "human", "value": "hm"}, {"from": "gpt", "value": "yes"}], "system": "be kind"},
    {"instruction": "add", "input": "1 1", "output": "2"},
    {"prompt": "q", "completion": "a"},
]


def _rows(room: Path) -> dict[str, Target]:
    path = room / "prompts.jsonl"

    def prompts(data: bytes) -> None:
        path.write_bytes(data)
        read_rows(path, as_messages=True, system="be kind")

    def data(given: bytes) -> None:
        table = room / "data.jsonl"
        table.write_bytes(given)
        read_documents(str(table))

    data(_as_lines(_ROWS[:1]))  # its libraries start threads, which need memory of their own
    return {
        "files of data": Target(damaged(_ROWS, _as_lines), data, 0.05),  # `datasets` takes its time
        "rows of data": Target(st.one_of([edited(row) for row in _ROWS]), _document, 4),
        "prompts": Target(damaged(_ROWS, _as_lines), prompts, 2),
    }


def _document(row: Any) -> object:
    """As `datasets` gives rows: tables, whose fields have names."""
    return document_of_row("rows:1", row) if isinstance(row, dict) else None
