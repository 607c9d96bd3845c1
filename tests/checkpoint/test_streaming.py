"""Full weights a unit at a time: what transformers would have written to files, within the memory of one unit."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import UsageError
from tests.checkpoint.states import Buffered
from tests.engine.cases import Case, collectives
from tests.engine.rig import Net, on_ranks
from tests.offload.rig import shared_folder
from tests.ranks import RankPools

CASES = (Case("full_shard", 2), Case("no_shard", 2), Case("hybrid_shard", 4))


class Odd(Net):
    """With tied and frozen parameters, one in another dtype, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(4, 6)
        self.again.weight = self.enter.weight
        self.blocks[0].requires_grad_(False)
        self.blocks[1].double()
        self.register_buffer("table", torch.arange(5, dtype=torch.float32))
        self.register_buffer("count", torch.tensor(3))


def streamed(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in sw.stream_weights(model, **options):
        assert name not in found, "each once"
        found[name] = tensor
    return found


def _against_the_plain_model(case: Case, dtype: torch.dtype | None, rank0_only: bool) -> None:
    torch.manual_seed(1)
    plain = Odd()
    torch.manual_seed(1)
    model = case.shard(Odd())
    found = streamed(model, dtype=dtype, names="model", rank0_only=rank0_only)
    if rank0_only and torch.distributed.get_rank():
        assert not found
        return
    expected = {name: value for name, value in plain.state_dict().items() if name != "again.weight"}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        wanted = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        assert found[name].dtype == wanted.dtype
        assert torch.equal(found[name], wanted), name


@pytest.mark.parametrize("way", ["gloo", "shm"])
@pytest.mark.parametrize(("dtype", "rank0_only"), [(None, False), (torch.bfloat16, True)], ids=["stored", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_plain_models_state(
    ranks: RankPools, case: Case, dtype: torch.dtype | None, rank0_only: bool, way: str
) -> None:
    pool = ranks(case.world_size, SHARDWISE_COLLECTIVES=way)
    pool.run(_against_the_plain_model, case, dtype, rank0_only)


def _against_files(name: str, case: Case) -> dict[str, Tensor]:
    from tests.checkpoint.architectures import ARCHITECTURES

    return streamed(case.shard(ARCHITECTURES[name].build()))


def test_names_and_tensors_are_those_of_transformers_files(ranks: RankPools, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from safetensors.torch import load_file

    from tests.checkpoint.architectures import ARCHITECTURES

    for name, architecture in ARCHITECTURES.items():
        path = tmp_path / name.replace(",", "").replace(" ", "-")
        architecture.build().save_pretrained(path)  # type: ignore[operator]
        expected = load_file(path / "model.safetensors")
        for found in ranks(2).run(_against_files, name, Case("full_shard", 2)):
            assert found.keys() == expected.keys(), name
            assert all(torch.equal(found[key], value) for key, value in expected.items()), name


@on_ranks(2)
def test_training_goes_on_with_the_same_numbers() -> None:
    torch.manual_seed(1)
    model = sw.shard(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        before = streamed(model)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after = streamed(model)
        assert any(not torch.equal(before[name], value) for name, value in after.items())
    full = sw.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(full[name], value) for name, value in after.items())


@on_ranks(2)
def test_a_tensor_is_the_callers() -> None:
    model = sw.shard(Net())
    expected = sw.full_state_dict(model, rank0_only=False)
    for _, tensor in sw.stream_weights(model):
        tensor.zero_()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in streamed(model).items())


def bytes_of(tensors: Iterator[tuple[str, Tensor]]) -> int:
    """The most bytes of new storages that are alive while each tensor is looked at and dropped."""
    gc.collect()
    before = {t.untyped_storage()._cdata for t in gc.get_objects() if type(t) is Tensor}
    most = 0
    for _ in tensors:
        alive = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) is Tensor
        }
        most = max(most, sum(nbytes for key, nbytes in alive.items() if key not in before))
    return most


@on_ranks(2)
def test_no_more_than_one_unit_is_whole() -> None:
    with collectives("gloo"):
        model = sw.shard(nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)]), units={nn.Linear})
    unit = 64 * 64 * 4
    assert bytes_of(sw.stream_weights(model)) <= unit + 4096
    assert bytes_of(sw.stream_weights(model, dtype=torch.bfloat16)) <= unit // 2 + 4096


@on_ranks(2)
def test_offloaded_units_come_too() -> None:
    torch.manual_seed(1)
    expected = Net().state_dict()
    torch.manual_seed(1)
    model = sw.shard(Net(), offload=sw.Offload(params="nvme", path=shared_folder()))
    found = streamed(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].cpu(), value) for name, value in expected.items())


@on_ranks(1)
def test_what_is_refused() -> None:
    model = sw.shard(Buffered())
    with pytest.raises(UsageError, match="names='vllm' must be one of hugging_face, model"):
        sw.stream_weights(model, names="vllm")
    with sw.unsharded(model), pytest.raises(UsageError, match="call it outside"):
        sw.stream_weights(model)
