"""Muon and Adafactor over sharded parameters: bit-equal to torch's own on the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.compat.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from shardwise.errors import UsageError
from shardwise.optim.whole_matrix import WholeMatrixOptimizer, whole_matrix
from tests.engine.cases import Case
from tests.engine.rig import Block, Twins, on_ranks, seeded, squares
from tests.ranks import RankPools

KINDS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "muon": (torch.optim.Muon, {"lr": 0.02, "weight_decay": 0.1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.05, "weight_decay": 0.01}),
}
ADAMW = {"lr": 0.01, "weight_decay": 0.01}


class Words(nn.Module):
    """An embedding, a tied head, blocks, a matrix that is frozen and one that is not always used."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(requires_grad=False)
        self.spare = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight
        self.uses_spare = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.words((x[:, 0].abs() * 5).long().clamp(max=10)) + x.mean()
        for block in self.blocks:
            x = block(x)
        x = self.frozen(x)
        return self.head(self.spare(x) if self.uses_spare else x)  # type: ignore[no-any-return]


def is_hidden(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and name != "words.weight"


class Apart:
    """What torch would have one do: two optimizers over an unsharded model."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        make, options = KINDS[kind]
        named = list(model.named_parameters())
        self.each = [
            make([p for n, p in named if is_hidden(n, p)], **options),
            torch.optim.AdamW([p for n, p in named if not is_hidden(n, p)], **ADAMW),
        ]

    def step(self) -> None:
        for optimizer in self.each:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.each:
            optimizer.zero_grad(set_to_none=set_to_none)

    def set_lr(self, factor: float) -> None:
        for optimizer in self.each:
            for group in optimizer.param_groups:
                group["lr"] *= factor


def ours(model: nn.Module, kind: str) -> WholeMatrixOptimizer:
    make, options = KINDS[kind]
    return whole_matrix(make, model, adamw=ADAMW, **options)


def twins(case: Case, kind: str, **options: Any) -> Twins:
    """A plain model with torch's optimizers beside a sharded one with ours."""
    if case.replicas > 1 and case.shards > 1:
        options["mesh"] = torch.distributed.device_mesh.init_device_mesh(
            "cpu", (case.replicas, case.shards), mesh_dim_names=("replicate", "shard")
        )
    pair = Twins(Words, strategy=case.strategy, **options)
    pair.optimizers = [Apart(pair.plain, kind), ours(pair.sharded, kind)]  # type: ignore[list-item]
    return pair


CASES = [
    ("full_shard", 2),
    ("shard_grad_op", 2),
    ("shard_optimizer", 2),
    ("no_shard", 2),
    ("full_shard", 4),
    ("no_shard", 4),
    ("hybrid_shard", 4),
    ("hybrid_shard_zero2", 4),
]


def _train(case: Case, kind: str) -> dict[str, int]:
    """Steps with a schedule, with clipping, and without a gradient for some matrix. Returns what this rank owns."""
    pair = twins(case, kind)
    reference, optimizer = pair.optimizers
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for step, uses_spare in enumerate((True, False, True)):
        for model in (pair.plain, pair.sharded):
            model.uses_spare = uses_spare  # type: ignore[assignment]
        pair.backward()
        is_hybrid = case.replicas > 1 and case.shards > 1
        if not is_hybrid:
            pair.same_gradients()
        if step == 2:
            norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3) for m in (pair.plain, pair.sharded)]
            torch.testing.assert_close(*norms)
        if step == 2 or is_hybrid:  # sums in another order have other last bits
            for plain, sharded in zip(pair.plain.parameters(), pair.sharded.parameters(), strict=True):
                if plain.grad is not None:
                    torch.testing.assert_close(plain.grad, sharded.grad.full_tensor())  # type: ignore[union-attr]
                    plain.grad.copy_(sharded.grad.full_tensor())  # type: ignore[union-attr]
        pair.step()
        scheduler.step()
        reference.set_lr(0.5)  # type: ignore[attr-defined]
        pair.same_parameters()
    return {p.fqn: p.numel() for p, state in optimizer.state.items() if _owned_bytes(p, state)}


def _owned_bytes(parameter: Any, state: dict[str, Any]) -> int:
    if parameter.ndim != 2 or parameter.shape[0] == 11:
        return 0
    return sum(v.local.nbytes for v in state.values() if isinstance(v, sw.ShardedParameter))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("strategy", "world_size"), CASES)
def test_the_bits_of_the_unsharded_optimizers(ranks: RankPools, strategy: str, world_size: int, kind: str) -> None:
    owned = ranks(world_size).run(_train, Case(strategy, world_size), kind)
    names = [name for each in owned for name in each]
    assert sorted(names) == sorted(set(names)), "some matrix has two owners"
    assert len(names) == 7  # frozen ones have no state
    assert all(owned), "some rank owns nothing"


def _over_gloo() -> dict[str, int]:
    return _train(Case("full_shard", 2), "muon")


def test_over_messages_as_through_shared_memory(ranks: RankPools) -> None:
    through_memory = ranks(2).run(_over_gloo)
    assert ranks(2, SHARDWISE_COLLECTIVES="gloo").run(_over_gloo) == through_memory


# Checkpoints and state dicts ------------------------------------------------------------------------------------------


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything, whole, by name."""
    found: dict[str, Any] = {n: _whole(p) for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = _whole(value)
    return found


def _whole(value: Any) -> Any:
    if isinstance(value, sw.ShardedParameter):
        return value.detach().full_tensor().clone()
    return value.detach().clone() if isinstance(value, Tensor) else value


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    torch.manual_seed(index)
    squares(model, torch.randn(5, 4)).backward()  # of the same numbers on every rank
    optimizer.step()
    optimizer.zero_grad()


def _build(case: Case, kind: str, seed: int = 0) -> tuple[nn.Module, WholeMatrixOptimizer]:
    torch.manual_seed(seed)
    model = case.shard(Words())
    return model, ours(model, kind)


def _save(case: Case, kind: str, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two steps, a checkpoint, one step more. The states at the checkpoint and at the end."""
    model, optimizer = _build(case, kind)
    _step(model, optimizer, 0)
    _step(model, optimizer, 1)
    sw.checkpoint.save(path, model, optimizer, step=2)
    saved = _state_of(model, optimizer)
    _step(model, optimizer, 2)
    return saved, _state_of(model, optimizer)


def _resume(case: Case, kind: str, path: Path, again: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    model, optimizer = _build(case, kind, seed=5)
    if again is not None:
        _step(model, optimizer, 3)  # there is state to read into, and to forget
    sw.checkpoint.load(path, model, optimizer)
    loaded = _state_of(model, optimizer)
    if again is not None:
        sw.checkpoint.save(again, model, optimizer, step=2)
    _step(model, optimizer, 2)
    return loaded, _state_of(model, optimizer)


def _same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        if isinstance(value, Tensor):
            assert value.dtype == other[name].dtype, name
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_goes_on_at_any_number_of_ranks(ranks: RankPools, kind: str, tmp_path: Path) -> None:
    ((saved, after),) = ranks(1).run(_save, Case("full_shard", 1), kind, tmp_path / "1")
    targets = [Case("full_shard", 2), Case("no_shard", 2), Case("hybrid_shard", 4), Case("full_shard", 1)]
    source = tmp_path / "1"
    for number, case in enumerate(targets):
        path = tmp_path / f"again-{number}"
        for loaded, end in ranks(case.world_size).run(_resume, case, kind, source, path):
            _same(loaded, saved)
            _same(end, after)
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert (path / name).read_bytes() == (tmp_path / "1" / name).read_bytes()
        source = path
    sw.checkpoint.verify(source)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_state_that_was_lost_or_set_back_comes_again_on_every_rank(kind: str, tmp_path: Path) -> None:
    case = Case("full_shard", 2)
    reference = _build(case, kind)
    expected = []
    for index in range(2):
        sw.checkpoint.save(tmp_path / f"{index}", *reference)
        _step(*reference, index)
        expected.append(_state_of(*reference))

    def goes_on(model: nn.Module, optimizer: WholeMatrixOptimizer, index: int) -> None:
        _step(model, optimizer, index)
        sw.checkpoint.save(tmp_path / "again", model, optimizer, overwrite=True)  # ranks compare their state
        _same(_state_of(model, optimizer), expected[index])

    asked = _build(case, kind)
    get_optimizer_state_dict(*asked)
    goes_on(*asked, 0)
    sw.checkpoint.load(tmp_path / "0", *asked)
    goes_on(*asked, 0)
    asked[1].state.clear()
    sw.checkpoint.load(tmp_path / "0", asked[0])
    goes_on(*asked, 0)
    goes_on(*asked, 1)
    sw.checkpoint.load(tmp_path / "1", *asked)
    goes_on(*asked, 1)  # to the numbers that ranks have told one another before


def _full_state(case: Case, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    model, optimizer = _build(case, kind)
    _step(model, optimizer, 0)
    options = StateDictOptions(full_state_dict=True)
    return get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)


def _from_unsharded(case: Case, kind: str) -> None:
    """An unsharded optimizer's state_dict goes on in a sharded one, and a sharded one's in an unsharded one."""
    torch.manual_seed(0)
    plain = Words()
    optimizer = ours(plain, kind)
    _step(plain, optimizer, 0)
    model, sharded = _build(case, kind)
    with torch.no_grad():
        for theirs, face in zip(plain.parameters(), model.parameters(), strict=True):
            face.copy_(theirs)
    sharded.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares step counters
    _same(_state_of(model, sharded), _state_of(plain, optimizer))
    for index in (1, 2):
        _step(plain, optimizer, index)
        _step(model, sharded, index)
        sharded.load_state_dict(sharded.state_dict())  # its own handles
    _same(_state_of(model, sharded), _state_of(plain, optimizer))
    full = get_optimizer_state_dict(model, sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    fresh = ours(model, kind)
    from_rank0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, fresh, full, options=from_rank0)
    _same(_state_of(model, fresh), _state_of(plain, optimizer))
    _step(plain, optimizer, 3)
    _step(model, fresh, 3)
    _same(_state_of(model, fresh), _state_of(plain, optimizer))


@on_ranks(2)
def test_pieces_cut_as_the_parameter_is_are_refused() -> None:
    model = sw.shard(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))  # the owner is at 0, and the matrix begins there
    optimizer = whole_matrix(torch.optim.Muon, model, lr=0.1)
    matrix = model.get_parameter("0.weight")
    state = optimizer.state_dict()
    state["state"] = {0: {"momentum_buffer": torch.zeros_like(matrix)}}
    assert optimizer.param_groups[0]["params"] == [matrix]
    with pytest.raises(UsageError, match=r"'0\.weight' has another owner, or was cut into pieces"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_to_and_from_the_unsharded_optimizer(ranks: RankPools, kind: str) -> None:
    ranks(2).run(_from_unsharded, Case("full_shard", 2), kind)
    weights, state = ranks(2).run(_full_state, Case("full_shard", 2), kind)[0]
    torch.manual_seed(0)
    plain = Words()
    expected = ours(plain, kind)
    _step(plain, expected, 0)
    names = [name for name, _ in plain.named_parameters()]
    for name, parameter in plain.named_parameters():
        assert torch.equal(weights[name], parameter)
        values = expected.state.get(parameter, {})
        _same(dict(sorted(values.items())), dict(sorted(state["state"].get(name, {}).items())))
    assert {name for group in state["param_groups"] for name in group["params"]} == set(names)


def test_the_unsharded_optimizer_is_torchs_two() -> None:
    for kind in KINDS:
        model, other = seeded(Words), seeded(Words)
        apart, together = Apart(model, kind), ours(other, kind)
        for index in range(3):
            _step(model, apart, index)  # type: ignore[arg-type]
            _step(other, together, index)
        _same(dict(model.named_parameters()), dict(other.named_parameters()))


# Who holds what -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_state_is_with_its_owner_and_is_counted_once() -> None:
    model, optimizer = _build(Case("full_shard", 2), "muon")
    squares(model, torch.ones(5, 4)).backward()
    before = sw.memory(model).now["temporaries"]
    optimizer.step()
    assert sw.memory(model).now["temporaries"] - before == optimizer.exchange_bytes > 0
    held = sum(
        value.local.nbytes if isinstance(value, sw.ShardedParameter) else value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
    assert sw.memory(model).now["optimizer"] == held
    whole = [p for p in optimizer.state if p.ndim == 2 and p.shape[0] != 11]
    pieces = [optimizer.state[p]["momentum_buffer"] for p in whole]
    assert {piece.local.numel() for piece in pieces} <= {0, *(p.numel() for p in whole)}
    assert not any(matrix.full.data.untyped_storage().nbytes() > 4 for matrix in optimizer._matrices.values())


@on_ranks(2)
def test_an_error_of_one_owner_ends_the_step_of_all() -> None:
    model, optimizer = _build(Case("full_shard", 2), "muon")
    _step(model, optimizer, 0)
    if torch.distributed.get_rank() == 1:
        optimizer._inner.step = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises((ZeroDivisionError, sw.errors.CollectiveTimeout)):  # type: ignore[attr-defined]
        _step(model, optimizer, 1)


def test_mistakes_are_told() -> None:
    model = Words()
    with pytest.raises(UsageError, match="has no name"):
        whole_matrix(torch.optim.Muon, model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="no hidden matrix"):
        whole_matrix(torch.optim.Muon, [("b", nn.Parameter(torch.zeros(3)))], lr=0.1)
    with pytest.raises(UsageError, match="not a matrix"):
        whole_matrix(torch.optim.Muon, model, hidden=lambda fqn, _: fqn.endswith("bias"), lr=0.1)
    optimizer = whole_matrix(torch.optim.Muon, model, lr=0.1)
    with pytest.raises(UsageError, match="build a new optimizer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 3))]})


def test_options_of_groups_and_closures() -> None:
    model = Words()
    named = list(model.named_parameters())
    groups = [
        {"params": [m for m in named if m[1].ndim == 2], "weight_decay": 0.3},
        {"params": [m for m in named if m[1].ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = whole_matrix(torch.optim.Muon, groups, lr=0.1, adamw={"lr": 0.2}, hidden=is_hidden)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.1, 0.3), (0.2, 0.3), (0.2, 0.0)]

    def closure() -> Tensor:
        loss = squares(model, torch.ones(5, 4))
        loss.backward()
        return loss

    before = model.blocks[0].up.weight.clone()  # type: ignore[union-attr]
    assert optimizer.step(closure) > 0
    assert not torch.equal(before, model.blocks[0].up.weight)  # type: ignore[union-attr]
