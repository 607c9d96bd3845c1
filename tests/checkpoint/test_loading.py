"""Checkpoints that do not fit say what does not, and change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardwise as sw
from shardwise.errors import CheckpointError, UsageError
from tests.checkpoint.states import everything, same, step
from tests.engine.rig import Net, adamw, on_ranks


class Wider(Net):
    """One parameter has another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(6, 5)


def saved(path: Path) -> None:
    torch.manual_seed(3)
    model = sw.shard(Net(depth=4))
    optimizer = adamw(model.parameters())
    step(model, optimizer, 0)
    sw.checkpoint.save(path, model, optimizer)


@on_ranks(2)
def test_what_is_missing_or_unexpected_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    for depth, message in (
        (5, r"missing from the checkpoint: blocks\.4"),
        (3, r"unexpected in the checkpoint: blocks\.3"),
    ):
        model = sw.shard(Net(depth=depth))
        optimizer = adamw(model.parameters())
        before = everything(model, optimizer)
        with pytest.raises(CheckpointError, match=message):
            sw.checkpoint.load(tmp_path / "c", model)
        with pytest.raises(CheckpointError, match=message):
            sw.checkpoint.load(tmp_path / "c", model, optimizer)
        same(everything(model, optimizer), before)
        loaded = sw.checkpoint.load(tmp_path / "c", model, optimizer, strict=False)
        names = {name for name, _ in Net(depth=5).named_parameters() if name.startswith(f"blocks.{min(depth, 4)}.")}
        if depth == 5:
            assert set(loaded.missing) == names | {f"optimizer state of {name}" for name in names}
            assert loaded.unexpected == ()
        else:
            assert loaded.missing == ()
            assert {"blocks.3.up.weight", "optimizer state of blocks.3.up.weight"} <= set(loaded.unexpected)
        after = everything(model, optimizer)
        assert not torch.equal(after["enter.weight"], before["enter.weight"])
        assert "enter.weight.exp_avg" in after


@on_ranks(2)
def test_another_shape_is_named_with_both(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    model = sw.shard(Wider())
    with pytest.raises(CheckpointError, match=r"leave\.weight \(here \(5, 6\), stored \(3, 6\)\)"):
        sw.checkpoint.load(tmp_path / "c", model)
    before = everything(model, adamw(model.parameters()))
    loaded = sw.checkpoint.load(tmp_path / "c", model, adamw(model.parameters()), strict=False)
    assert [text.split(" ")[0] for text in loaded.wrong_shape][:2] == ["leave.weight", "leave.bias"]
    after = everything(model, adamw(model.parameters()))
    assert torch.equal(after["leave.weight"], before["leave.weight"])
    assert not torch.equal(after["enter.weight"], before["enter.weight"])


@on_ranks(1)
def test_without_an_optimizer(tmp_path: Path) -> None:
    model = sw.shard(Net())
    sw.checkpoint.save(tmp_path / "c", model)
    sw.checkpoint.load(tmp_path / "c", model)
    with pytest.raises(CheckpointError, match="without an optimizer"):
        sw.checkpoint.load(tmp_path / "c", model, adamw(model.parameters()))
    loaded = sw.checkpoint.load(tmp_path / "c", model, adamw(model.parameters()), strict=False)
    assert loaded.missing == tuple(f"optimizer state of {name}" for name, _ in Net().named_parameters())


@on_ranks(2)
def test_state_of_another_kind_of_optimizer(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    model = sw.shard(Net(depth=4))
    other = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    before = everything(model, other)
    with pytest.raises(CheckpointError, match="was saved with AdamW, but this is SGD"):
        sw.checkpoint.load(tmp_path / "c", model, other)
    same(everything(model, other), before)
    assert set(other.param_groups[0]) == set(torch.optim.SGD([torch.zeros(1)]).param_groups[0])


@on_ranks(2)
def test_no_checkpoint_and_a_truncated_one(tmp_path: Path) -> None:
    model = sw.shard(Net())
    with pytest.raises(CheckpointError, match="does not exist"):
        sw.checkpoint.load(tmp_path / "c", model)
    sw.checkpoint.save(tmp_path / "c", model)
    file = tmp_path / "c" / "model.safetensors"
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        file.write_bytes(file.read_bytes()[:-1])
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        sw.checkpoint.load(tmp_path / "c", model)


@on_ranks(2)
def test_an_optimizer_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    model = sw.shard(Net(depth=4))
    other = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    step(model, other, 0)
    before = everything(model, other)
    options = {key: value for key, value in other.param_groups[0].items() if key != "params"}
    loaded = sw.checkpoint.load(tmp_path / "c", model, other, strict=False)
    states = tuple(f"optimizer state of {name}" for name, _ in Net(depth=4).named_parameters())
    assert (loaded.missing, loaded.unexpected) == (states, states)
    after = everything(model, other)
    assert not torch.equal(after["enter.weight"], before["enter.weight"])
    same(after, before, [name for name in before if name.endswith("momentum_buffer")])
    assert {key: value for key, value in other.param_groups[0].items() if key != "params"} == options


@on_ranks(2)
def test_parameters_that_were_grouped_otherwise(tmp_path: Path) -> None:
    def grouped(model: nn.Module, *rates: float) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        size = -(-len(named) // len(rates))
        parts = [named[i * size : (i + 1) * size] for i in range(len(rates))]
        return torch.optim.AdamW([{"params": part, "lr": rate} for part, rate in zip(parts, rates, strict=True)])

    def resumed(path: Path, strict: bool) -> tuple[sw.checkpoint.Loaded, torch.optim.Optimizer]:
        model = sw.shard(Net())
        optimizer = grouped(model, 9.0)
        loaded = sw.checkpoint.load(path, model, optimizer, strict=strict)
        names = [parameter.fqn for parameter in optimizer.param_groups[0]["params"]]
        assert optimizer.param_groups[0]["param_names"] == names
        assert len(optimizer.state) == len(names)
        return loaded, optimizer

    for name, rates in (("alike", (0.1, 0.1)), ("apart", (0.1, 0.2))):
        model = sw.shard(Net())
        optimizer = grouped(model, *rates)
        step(model, optimizer, 0)
        sw.checkpoint.save(tmp_path / name, model, optimizer)
    for strict in (True, False):
        loaded, optimizer = resumed(tmp_path / "alike", strict)
        assert (loaded.missing, optimizer.param_groups[0]["lr"]) == ((), 0.1)
    with pytest.raises(
        CheckpointError, match=r"parameters of 2 groups of .* with different options, such as 'enter\.weight'"
    ):
        resumed(tmp_path / "apart", strict=True)
    loaded, optimizer = resumed(tmp_path / "apart", strict=False)
    assert (loaded.missing, optimizer.param_groups[0]["lr"]) == (("options of the optimizer's group 0",), 9.0)


class Beside(Net):
    """With one buffer."""

    def __init__(self, beside: Tensor) -> None:
        super().__init__()
        self.register_buffer("beside", beside)


@pytest.mark.parametrize(
    ("stored", "here"),
    [
        (torch.tensor([2.7, 1e10]), torch.zeros(2, dtype=torch.int32)),
        (torch.tensor([3, 4]), torch.zeros(2)),
        (torch.tensor([1 + 2j, 3]), torch.zeros(2)),
        (torch.tensor([1.0, 2.0]), torch.zeros(2, dtype=torch.complex64)),
        (torch.tensor([200, 4]), torch.zeros(2, dtype=torch.int8)),
        (torch.tensor([200, 4]), torch.zeros(2, dtype=torch.bool)),
        (torch.tensor([-1, 4], dtype=torch.int8), torch.zeros(2, dtype=torch.uint8)),
    ],
    ids=[
        "float to int",
        "int to float",
        "complex to real",
        "real to complex",
        "int to fewer bits",
        "int to bool",
        "signed to unsigned",
    ],
)
@on_ranks(2)
def test_another_kind_of_numbers_is_refused(stored: Tensor, here: Tensor, tmp_path: Path) -> None:
    sw.checkpoint.save(tmp_path / "c", sw.shard(Beside(stored)))
    model = sw.shard(Beside(here))
    before = everything(model, adamw(model.parameters()))
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"'beside' is stored as torch\.\w+, but 'beside' is torch\.\w+ here"):
            sw.checkpoint.load(tmp_path / "c", model, strict=strict)
    same(everything(model, adamw(model.parameters())), before)


@pytest.mark.parametrize(
    ("stored", "here"), [(torch.uint8, torch.bool), (torch.bool, torch.uint8), (torch.int32, torch.int64)]
)
@on_ranks(2)
def test_whole_numbers_that_have_room_are_given_back(stored: torch.dtype, here: torch.dtype, tmp_path: Path) -> None:
    sw.checkpoint.save(tmp_path / "c", sw.shard(Beside(torch.tensor([1, 0], dtype=stored))))
    model = sw.shard(Beside(torch.zeros(2, dtype=here)))
    sw.checkpoint.load(tmp_path / "c", model)
    assert torch.equal(model.get_buffer("beside"), torch.tensor([1, 0], dtype=here))


def _in_parts(how: str) -> nn.Module:
    """A model that torch has put modules of its own into."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if how == "compiled":
        return torch.compile(sw.shard(model), backend="eager")  # type: ignore[return-value]
    if how == "a part is compiled":
        model[1] = torch.compile(model[1], backend="eager")
    if how == "a part is recomputed":
        model[1] = checkpoint_wrapper(model[1])
    return sw.shard(model)


@pytest.mark.parametrize("how", ["compiled", "a part is compiled", "a part is recomputed"])
@on_ranks(2)
def test_models_are_saved_and_loaded_by_the_names_of_plain_ones(how: str, tmp_path: Path) -> None:
    model = _in_parts(how)
    optimizer = adamw(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    sw.checkpoint.save(tmp_path / "c", model, optimizer)
    plain = sw.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    again = _in_parts(how)
    expected = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    for other in (plain, again):
        sw.checkpoint.load(tmp_path / "c", other, adamw(other.parameters()))
        assert all(map(torch.equal, (p.full_tensor() for p in other.parameters()), expected))  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["whole", "a part"])
def test_files_with_the_names_of_compiled_modules_are_read(how: str, tmp_path: Path) -> None:
    state = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).state_dict()
    prefixed = {f"_orig_mod.{n}" if how == "whole" else n.replace("1.", "1._orig_mod."): t for n, t in state.items()}
    save_file(prefixed, tmp_path / "model.safetensors")
    model = sw.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    sw.checkpoint.load_pretrained(tmp_path, model)
    assert all(torch.equal(value, state[name]) for name, value in sw.full_state_dict(model).items())


@on_ranks(2)
def test_complex_numbers_are_given_back(tmp_path: Path) -> None:
    stored = torch.tensor([1 + 2j, 3])
    sw.checkpoint.save(tmp_path / "c", sw.shard(Beside(stored)))
    for load in (sw.checkpoint.load, sw.checkpoint.load_pretrained):
        model = sw.shard(Beside(torch.zeros(2, dtype=torch.complex64)))
        load(tmp_path / "c", model)
        assert torch.equal(model.get_buffer("beside"), stored)


@on_ranks(2)
def test_an_expanded_buffer_is_refused_by_name(tmp_path: Path) -> None:
    sw.checkpoint.save(tmp_path / "c", sw.shard(Beside(torch.ones(4))))
    model = sw.shard(Beside(torch.zeros(1).expand(4)))
    before = everything(model, adamw(model.parameters()))
    for load in (sw.checkpoint.load, sw.checkpoint.load_pretrained):
        with pytest.raises(UsageError, match=r"'beside' of shape \(4,\) is expanded"):
            load(tmp_path / "c", model)
    same(everything(model, adamw(model.parameters())), before)


class TwoEnds(nn.Module):
    """An embedding and a head, of one tensor or two."""

    def __init__(self, tied: bool, rows: int = 10) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, rows, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@on_ranks(2)
def test_two_tensors_are_not_loaded_into_one(tmp_path: Path) -> None:
    for rows, message in (
        (10, r"different numbers for 'embed\.weight' and 'head\.weight', which the model ties"),
        (20, r"with another shape: head\.weight \(here \(10, 8\), stored \(20, 8\)\)"),
    ):
        sw.checkpoint.save(tmp_path / str(rows), sw.shard(TwoEnds(False, rows)))
        model = sw.shard(TwoEnds(True))
        before = sw.full_state_dict(model, rank0_only=False)
        with pytest.raises(CheckpointError, match=message):
            sw.checkpoint.load(tmp_path / str(rows), model)
        same(sw.full_state_dict(model, rank0_only=False), before)
    assert sw.checkpoint.load(tmp_path / "20", model, strict=False).wrong_shape == (
        "head.weight (here (10, 8), stored (20, 8))",
    )
    plain = TwoEnds(False)
    plain.head.weight = nn.Parameter(plain.embed.weight.detach().clone())
    twice = sw.shard(plain)
    sw.checkpoint.save(tmp_path / "equal", twice)
    sw.checkpoint.load(tmp_path / "equal", model)
    same(sw.full_state_dict(model, rank0_only=False), sw.full_state_dict(twice, rank0_only=False))


class Scaled(nn.Module):
    """With a parameter that is a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out * self.scale


@pytest.mark.parametrize("after", ["sharded", "left alone"])
@pytest.mark.parametrize("before", ["sharded", "left alone"])
def test_state_of_a_number_goes_on_sharded_or_not(before: str, after: str, tmp_path: Path) -> None:
    def made(how: str) -> tuple[Scaled, torch.optim.Optimizer]:
        model = Scaled()
        sw.shard(model, ignored=[model.scale] if how == "left alone" else [])
        return model, adamw(model.parameters())

    def trained(model: Scaled, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        return sw.full_state_dict(model)

    first, second = made(before), made(after)
    trained(*first)
    sw.checkpoint.save(tmp_path / "c", *first)
    sw.checkpoint.load(tmp_path / "c", *second)
    expected = trained(*first)
    assert all(torch.equal(value, expected[name]) for name, value in trained(*second).items())
