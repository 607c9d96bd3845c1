"""What users do with parameters and inputs outside a unit, which would be silently wrong if it were not handled."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils import prune

import shardwise as sw
from shardwise.errors import UsageError
from tests.engine.rig import Net, Twins, batch, on_ranks, seeded, squares

if TYPE_CHECKING:
    pass


class _Attention(nn.Module):
    """A module that behaves differently if its arguments are the same tensor, like attention modules."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor], *, context: Tensor) -> Tensor:
        assert (x is context) == (pair[0] is x) == (pair[1] is x)
        return self.own(x) if x is context else self.cross(x) * context  # type: ignore[no-any-return]


class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 6)
        self.attention = _Attention()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        other = x * 2
        same = self.attention(x, (x, x), context=x)
        return same + self.attention(x, (other, other), context=other)  # type: ignore[no-any-return]


@on_ranks(2)
def test_one_tensor_given_twice_stays_one() -> None:
    Twins(_Attending, units={_Attention}).train(2)


PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": torch.norm,
    "squares": lambda p: p.square().sum(),
    "power": lambda p: (0.5 * p**2).mean(),
    "abs": lambda p: p.abs().sum(),
    "sum": torch.sum,
    "scaled": lambda p: (p * torch.tensor(3.0)).sum(),
}


@pytest.mark.parametrize("kind", PENALTIES)
@on_ranks(2)
def test_a_penalty_on_parameters_is_refused_in_backward(kind: str) -> None:
    """On every rank, however the loss computes it; the number itself is right, and training goes on."""
    twins = Twins()
    expected = sum(PENALTIES[kind](p) for p in twins.plain.parameters())
    found = sum(PENALTIES[kind](p) for p in twins.sharded.parameters())
    torch.testing.assert_close(found, expected)
    refused = pytest.raises(UsageError, match=r"computes with the sharded parameter '.*use the optimizer's weight_dec")
    with refused:
        PENALTIES[kind](next(twins.sharded.parameters())).backward()
    with refused:
        (squares(twins.sharded, twins.batch()) + 0.1 * sum(map(PENALTIES[kind], twins.sharded.parameters()))).backward()
    assert all(p.grad is None for p in twins.sharded.parameters())
    twins.train(2)


class Penalised(Net):
    """Computes a penalty on all parameters in its forward, weighted by each rank's input."""

    kind = ""

    def forward(self, x: Tensor) -> Tensor:
        penalty = sum(PENALTIES[self.kind](p) for p in self.parameters())
        return super().forward(x) + 0.1 * x[0, 0] * penalty


@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_a_penalty_in_the_forward_is_the_mean_over_ranks(strategy: str, kind: str) -> None:
    Penalised.kind = kind
    close(Twins(Penalised, strategy=strategy))


@pytest.mark.parametrize("kind", PENALTIES)
@on_ranks(2)
def test_a_penalty_on_unsharded_parameters_is_the_mean_over_ranks(kind: str) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if sharded := model is twins.sharded:
            sw.unshard(model)
        penalty = sum(PENALTIES[kind](p) for p in model.parameters())
        assert not sharded or not isinstance(next(model.parameters()), sw.ShardedParameter)
        return squares(model, x) + 0.1 * x[0, 0] * penalty

    twins = Twins(Net, loss)
    close(twins)


def close(twins: Twins) -> None:
    """Compare gradients with a tolerance: read parameters' parts are summed in another order."""
    for _ in range(2):
        twins.plain_backward([lambda model, r=rank: twins.loss(model, twins.batch(r)) for rank in twins.every_rank])
        twins.loss(twins.sharded, twins.batch()).backward()
        for (name, p), q in zip(twins.plain.named_parameters(), twins.sharded.parameters(), strict=True):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=1e-5, atol=1e-6, msg=name)
        twins.steps += 1


@on_ranks(2)
def test_what_is_no_reduction_of_a_parameter_keeps_its_error() -> None:
    model = sw.shard(seeded(Net))
    with pytest.raises(UsageError, match="neither elementwise nor a whole-tensor reduction"):
        (squares(model, batch(0)) + next(model.parameters()).T.sum()).backward()


@on_ranks(2)
def test_parameters_that_come_after_shard() -> None:
    additions: list[Callable[[Any], object]] = [
        lambda model: setattr(model, "leave", nn.Linear(6, 3)),
        lambda model: setattr(model.blocks[1], "scale", nn.Parameter(torch.ones(6))),
        lambda model: model.blocks.append(nn.Linear(6, 6)),
    ]
    for add in additions:
        model = sw.shard(seeded(Net))
        squares(model, batch(0)).backward()
        add(model)
        for _ in range(2):  # until it is mended
            with pytest.raises(UsageError, match=r"was added to the model after sw.shard"):
                squares(model, batch(0))
        with torch.no_grad():
            squares(model, batch(0))


@on_ranks(2)
def test_frozen_parameters_may_come() -> None:
    """A teacher, for example; but they may not be thawed."""
    twins = Twins()
    twins.sharded.teacher = seeded(Net).requires_grad_(False)
    x = batch(0)
    squares(twins.sharded, x).backward()
    twins.sharded.teacher.enter.bias.requires_grad_(True)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=r"'teacher\.enter\.bias' was added to the model"):
        squares(twins.sharded, x)
    del twins.sharded.teacher
    twins.sharded.zero_grad()
    twins.train(1)


@on_ranks(2)
def test_ignored_parameters_are_no_newcomers() -> None:
    model = seeded(Net)
    model.scale = nn.Parameter(torch.ones(3))
    sw.shard(model, ignored=[model.scale])
    model.other = nn.Identity()  # looked through again
    squares(model, batch(0)).backward()


@pytest.mark.parametrize("kind", [list, iter])
@on_ranks(2)
def test_backward_to_given_inputs(kind: Any) -> None:
    twins = Twins()
    for _ in range(2):
        loss = squares(twins.sharded, twins.batch())
        loss.backward(inputs=kind(twins.sharded.parameters()))
        twins.plain_backward([lambda m, r=r: squares(m, twins.batch(r)) for r in twins.every_rank])
        twins.same_gradients()
        twins.step()
        twins.steps += 1
    squares(twins.sharded, twins.batch()).backward(inputs=twins.sharded.leave.bias)  # type: ignore[union-attr]
    assert [n for n, p in twins.sharded.named_parameters() if p.grad is not None] == ["leave.bias"]


ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"allow_unused": True},
    "zeros": {"materialize_grads": True},
    "graph": {"create_graph": True, "allow_unused": True},
    "batched": {"is_grads_batched": True, "grad_outputs": torch.ones(2), "allow_unused": True},
}


@pytest.mark.parametrize("how", ASKED)
@on_ranks(2)
def test_autograd_grad_over_sharded_parameters_is_never_silent(how: str) -> None:
    twins = Twins()
    model: Any = twins.sharded
    x = twins.batch().requires_grad_()
    parameters = list(model.parameters())
    for inputs in (
        parameters,
        parameters[0],
        (x, parameters[-1]),
        dict(model.named_parameters()),
        [parameters[0].unsharded],
    ):
        with pytest.raises(UsageError, match=r"torch.autograd.grad over .*loss.backward\(inputs="):
            torch.autograd.grad(squares(model, x), inputs, **ASKED[how])
    (ours,), (theirs,) = (torch.autograd.grad(squares(m, x), x) for m in (model, twins.plain))
    assert torch.equal(ours, theirs)
    twins.train(1)
    with sw.unsharded(model):
        full = torch.autograd.grad(squares(model, x), list(model.parameters()))
    expected = torch.autograd.grad(squares(twins.plain, x), list(twins.plain.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(full, expected, strict=True))


def test_nor_is_it_where_torchs_functions_were_imported_before_shardwise() -> None:
    script = """
        from torch.autograd import backward, grad
        import torch
        import shardwise as sw
        model = sw.shard(torch.nn.Linear(3, 2))
        backward(model(torch.ones(1, 3)).sum(), inputs=[model.bias])
        assert torch.equal(model.bias.grad.full_tensor(), torch.ones(2)) and model.weight.grad is None
        grad(model(torch.ones(1, 3)).sum(), list(model.parameters()), allow_unused=True)
    """
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, env=clean
    )
    assert "UsageError: torch.autograd.grad over the sharded parameter 'weight'" in ended.stderr, ended.stderr


LATE: dict[str, tuple[Callable[[Any], object], str]] = {
    "multi_grad_hook": (
        lambda m: register_multi_grad_hook(list(m.parameters()), print),
        r"'enter.weight'.*its gradient goes to the leaf.*register_post_accumulate_grad_hook",
    ),
    "to_vector": (
        lambda m: nn.utils.parameters_to_vector(m.parameters()),
        r"aten.view .*'enter.weight'.*parameters_to_vector and the like in sw.unsharded",
    ),
    "weight_norm": (
        lambda m: nn.utils.parametrizations.weight_norm(m.leave),
        r"'leave.weight'.*weight_norm.*before sw",
    ),
    "spectral_norm": (
        lambda m: nn.utils.parametrizations.spectral_norm(m.leave),
        r"'leave.weight'.*before sw.shard",
    ),
    "prune": (lambda m: prune.l1_unstructured(m.leave, "weight", 0.3), r"'leave.weight'.*pruning.*before sw.shard"),
}


@pytest.mark.parametrize("late", LATE)
@on_ranks(2)
def test_what_comes_too_late_or_wants_full_parameters_is_told_where_it_goes(late: str) -> None:
    model = sw.shard(seeded(Net))
    use, message = LATE[late]
    with pytest.raises(UsageError, match=message) as raised:
        use(model)
    assert ("DistributedData" in str(raised.value)) == ("aten.view" in str(raised.value) and late != "multi_grad_hook")
    squares(model, batch(0)).backward()


@on_ranks(2)
def test_functional_call_works_on_full_parameters_and_says_so() -> None:
    twins = Twins()
    model, x = twins.sharded, twins.batch()
    with pytest.raises(UsageError, match=r"another sharded tensor, as torch.func.functional_call.*sw.unsharded\(model"):
        torch.func.functional_call(model, {name: p * 0.5 for name, p in model.named_parameters()}, (x,))
    halves = [{name: p.detach() * 0.5 for name, p in twins.plain.named_parameters()}]
    with pytest.raises(UsageError, match=r"replaced by a Tensor after sw.shard"):
        torch.func.functional_call(model, halves[0], (x,))
    with sw.unsharded(model):
        halves.append({name: p.detach() * 0.5 for name, p in model.named_parameters()})
        ours = torch.func.functional_call(model, halves[1], (x,))
    assert torch.equal(ours, torch.func.functional_call(twins.plain, halves[0], (x,)))
    twins.train(1)


@on_ranks(2)
def test_a_parameter_that_was_renamed_is_told_so() -> None:
    model: Any = sw.shard(seeded(Net))
    prune.identity(model.enter, "weight")
    with pytest.raises(UsageError, match=r"'enter.weight' was removed from its module after sw.shard"):
        model(batch(0))


@on_ranks(2)
def test_under_a_compiled_optimizer_step_our_own_code_is_not_compiled() -> None:
    """Dynamo would compile what takes each operation apart: a minute for nothing."""
    twins = Twins(lambda: Net(depth=1))
    traces: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        traces.extend(node.meta.get("stack_trace", "") for node in graph.graph.nodes)
        return graph.forward

    twins.backward()
    torch.compile(twins.optimizers[1].step, backend=backend)()
    twins.optimizers[0].step()
    for name, parameter in twins.sharded.named_parameters():
        assert torch.allclose(parameter.full_tensor(), twins.plain.get_parameter(name), atol=1e-5)  # type: ignore[operator]
    assert not [trace for trace in traces if "/src/shardwise/" in trace]


class _Mixed(nn.Module):
    """A module that runs its units under autocast in bf16 inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(depth=1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.net(x).float()  # type: ignore[no-any-return]


@on_ranks(2)
def test_autocast_inside_a_forward_raises() -> None:
    model = sw.shard(seeded(_Mixed), units={Net})
    with pytest.raises(UsageError, match=r"torch.autocast\('cpu'\)"):
        model(batch(0))
