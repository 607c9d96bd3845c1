"""Models that are cut over a tensor or context axis, beside whole ones: right ones pass, planted mistakes are named."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from shardwise.cli.process import diagnosing
from shardwise.diagnosis import environment, links
from shardwise.diagnosis.result import Diagnosis
from shardwise.train.config.files import dump_toml, load
from shardwise.train.loss import DeviceBatch, LossFunction, MicroBatchLoss
from tests.engine.tensor.rig import forget_meshes
from tests.ranks import RankPools
from tests.train.rig import furnish

WIDTH, HIDDEN = 8, 12
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Gained(nn.Module):
    """A model with a plan whose hidden activations are multiplied by a parameter that is not cut as they are: each
    rank of a tensor group has a gradient for its part of it, which nobody adds up."""

    def __init__(self, gains: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(320, WIDTH), nn.Linear(WIDTH, 320)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN)) if gains else None
        self.tp_plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        y = self.up(x).relu()
        if self.gain is not None:
            own = y.shape[-1]
            y = y * self.gain[dist.get_rank() % (HIDDEN // own) * own :][:own]
        logits: Tensor = self.head(x + self.down(y))
        return logits


def gained() -> Gained:
    return Gained(True)


def not_gained() -> Gained:
    return Gained(False)


def mean_of_slices(self: LossFunction, model: nn.Module, batch: DeviceBatch) -> MicroBatchLoss:
    """The loss, as the mean over ranks of a slice's mean, though slices have different numbers of targets."""
    found = right_loss(self, model, batch)
    if not getattr(self.objective, "shifted", False):
        return found
    rows, each = batch.labels.shape
    return found._replace(nll_sum=found.nll_sum * (rows * (2 * each - 1)) / (2 * batch.targets))


def larger_of_slices(self: LossFunction, model: nn.Module, batch: DeviceBatch) -> MicroBatchLoss:
    """The loss, but of slices a tenth larger: less than a gradient is off in 16 bits."""
    found = right_loss(self, model, batch)
    return found._replace(nll_sum=found.nll_sum * (1.1 if getattr(self.objective, "shifted", False) else 1))


right_loss: Any = LossFunction.__call__


def diagnose(folder: Path, overrides: list[str], loss: Any) -> dict[str, Any]:
    """Return the diagnosis of a configuration, as `shardwise doctor` makes it. Runs on ranks."""
    forget_meshes()
    machines = mock.patch.multiple(environment, _TRIED_BYTES=2**16, _SLOW_DISK=0)
    pairs = mock.patch.multiple(links, _SLOW=1e9, _PRODUCTS=1, _REPEATS=1, _BYTES=2**12)
    with contextlib.chdir(folder), machines, pairs, mock.patch.object(LossFunction, "__call__", loss):
        config = load("tiny.toml", ["train.global_batch=none", "parallel.units=none", *overrides])
        file = folder / f"settled-{dist.get_rank()}.toml"
        file.write_text(dump_toml(config.for_ranks(dist.get_world_size())))
        return diagnosing.run(diagnosing.Request(str(file), ["full_shard"], 2, [])).to_dict()


def diagnosed(ranks: RankPools, folder: Path, *overrides: str, loss: Any = right_loss) -> Diagnosis:
    furnish(folder)
    first, second = ranks(2).run(diagnose, folder, list(overrides), loss, timeout_s=200)
    assert first == second
    return Diagnosis.from_dict(first)


MIXTRAL = ("model_type=mixtral", "num_local_experts=4", "output_router_logits=true", "router_aux_loss_coef=0.5")
EXPERTS = (*(f"model.config.{key}" for key in (*MIXTRAL, "num_key_value_heads=2")), "parallel.cp=2")
OWN = ("model.config=none", "parallel.tp=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [("parallel.tp=2",), ("parallel.cp=2",), EXPERTS, (*OWN, f"model.factory={__name__}:not_gained")]
)
def test_nothing_is_found_in_what_is_cut_rightly(ranks: RankPools, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    found = diagnosed(ranks, tmp_path, *overrides)
    assert found.ok, str(found)
    made = {check.name for check in found.checks if check.strategy and check.status == "passed"}
    assert made >= {"loss", "gradients", "gradient norm", "every fragment changes", "checkpoint"}
    assert "each shared by 2 ranks" in str(found)
    assert ("auxiliary loss: parallel.cp=2" in str(found)) == (overrides is EXPERTS)


def test_a_gradient_that_is_not_summed_over_the_tensor_axis_is_named(ranks: RankPools, tmp_path: Path) -> None:
    found = diagnosed(ranks, tmp_path, *OWN, f"model.factory={__name__}:gained")
    [check] = [one for one in found.failed if one.name == "gradients"]
    assert "gain" in {one.fqn for one in check.findings}, str(found)
    assert "beside the unsharded gradient" in check.reason


def test_a_mean_of_slices_with_different_numbers_of_targets_is_found(ranks: RankPools, tmp_path: Path) -> None:
    found = diagnosed(ranks, tmp_path, "parallel.cp=2", loss=mean_of_slices)
    assert {one.name for one in found.failed} & {"loss", "gradients"}, str(found)
    assert "unsharded" in found.failed[0].reason


def test_a_loss_of_slices_that_is_a_tenth_off_is_found_in_16_bits(ranks: RankPools, tmp_path: Path) -> None:
    found = diagnosed(ranks, tmp_path, "parallel.cp=2", "parallel.param_dtype=bf16", loss=larger_of_slices)
    assert found.failed[0].name == "loss", str(found)
