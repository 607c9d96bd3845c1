"""Weights on their way to inference servers: as vLLM's `WeightSource`, and through directories."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load, load_file, save_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import CheckpointError, ConfigError, PeerError
from shardwise.integrations.vllm import reload_from_disk, weight_source
from tests.integrations import vllm_double
from tests.ranks import RankPools

IDS = torch.arange(12).reshape(2, 6)


def mixtral() -> Any:
    """Its experts are stacked in the model and apart in the files."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))


@pytest.fixture
def receiver() -> Iterator[vllm_double.Receiver]:
    receiver = vllm_double.Receiver()
    yield receiver
    receiver.close()


def _train_and_send(version: str, dtype: torch.dtype | None, url: str, port: int) -> list[Tensor]:
    """Send twice, a step apart. Returns the logits before each of the two."""
    model = sw.shard(mixtral().eval())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with vllm_double.installed(version):
        source = weight_source(model, dtype)
    engine = vllm_double.Trainer(source, dist.get_rank(), url, port)
    found = []
    for _ in range(2):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(model(input_ids=IDS).logits)
        engine.send_weights()
    return found


@pytest.mark.parametrize("version", vllm_double.SOURCES)
def test_a_receiver_has_the_weights_of_the_last_update(
    version: str, ranks: RankPools, receiver: vllm_double.Receiver, tmp_path: Path
) -> None:
    first, last = ranks(2).run(_train_and_send, version, None, receiver.url, receiver.port)[0]
    update = ["start_weight_update", "update_weights", "finish_weight_update"]
    assert receiver.calls == ["init_weight_transfer_engine", *update, *update]
    save_file(receiver.weights, tmp_path / "model.safetensors", {"format": "pt"})
    mixtral().config.save_pretrained(tmp_path)
    served, report = transformers.MixtralForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        logits = served.eval()(input_ids=IDS).logits
    torch.testing.assert_close(logits, last, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(first, last, rtol=1e-3)


def test_the_wire_has_the_dtype_that_was_asked_for(ranks: RankPools, receiver: vllm_double.Receiver) -> None:
    ranks(2).run(_train_and_send, "0.33", torch.bfloat16, receiver.url, receiver.port)
    assert {tensor.dtype for tensor in receiver.weights.values()} == {torch.bfloat16}


def test_without_vllm() -> None:
    with pytest.raises(
        ConfigError, match=r"weight_source needs vllm of at least version 0\.29: No module named 'vllm'"
    ):
        weight_source(sw.shard(nn.Linear(2, 2)))


def _reload(folder: Path, steps: int) -> list[tuple[str, dict[str, Tensor]]]:
    """Update through `folder`, with weights that are all equal to the step. Returns what the server read each time."""
    model = sw.shard(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))))
    read: list[tuple[str, dict[str, Tensor]]] = []

    def tell(path: str) -> None:
        read.append((path, load_file(Path(path) / "model.safetensors")))

    for step in range(1, steps + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        reload_from_disk(model, folder, step, tell)
    return read


def test_a_reader_sees_whole_steps_only(ranks: RankPools, tmp_path: Path) -> None:
    """The server that is told, and one that nobody tells and that looks all the time."""
    seen: list[set[float]] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            for path in tmp_path.glob("weights-??????/model.safetensors"):
                try:
                    tensors = load(path.read_bytes())
                except FileNotFoundError:  # it has been removed meanwhile
                    continue
                seen.append({value for tensor in tensors.values() for value in tensor.unique().tolist()})

    looking = threading.Thread(target=look)
    looking.start()
    try:
        told, untold = ranks(2).run(_reload, tmp_path, 30)
    finally:
        stop.set()
        looking.join()
    assert untold == []
    assert [path for path, _ in told] == [str(tmp_path / f"weights-{step:06d}") for step in range(1, 31)]
    for step, (_, tensors) in enumerate(told, 1):
        assert len(tensors) == 8
        assert all((tensor == step).all() for tensor in tensors.values())
    assert len(seen) > 10
    assert all(len(values) == 1 for values in seen)
    assert [path.name for path in tmp_path.iterdir()] == ["weights-000030"]


def _fail_once(folder: Path) -> list[str]:
    model = sw.shard(nn.Linear(4, 4))
    reload_from_disk(model, folder, 1, lambda path: None)
    said = []

    def refuse(path: str) -> None:
        raise ConnectionError("no server")

    try:
        reload_from_disk(model, folder, 2, refuse)
    except (CheckpointError, PeerError) as error:
        said.append(str(error))
    said.append(json.dumps(sorted(path.name for path in folder.iterdir())))
    dist.barrier()
    reload_from_disk(model, folder, 2, lambda path: None)
    return said


def test_what_servers_may_still_read_stays_when_they_were_not_reached(ranks: RankPools, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    for said, names in ranks(2).run(_fail_once, tmp_path):
        assert "no server" in said
        assert json.loads(names) == ["mine.txt", "weights-000001", "weights-000002"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "weights-000002"]
