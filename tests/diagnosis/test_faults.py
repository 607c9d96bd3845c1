"""Mistakes of users, planted in a job that is right: `sw.doctor` names each, and finds nothing where there is none."""

from __future__ import annotations

import re
from typing import Any

import pytest

import shardwise as sw
from shardwise.diagnosis.result import Check, Diagnosis
from shardwise.errors import UserError
from tests.diagnosis.faults import diagnose, right

FAULTS = {
    "outside_the_optimizer": ("optimizer", "blocks.1.norm.bias", "no group of the optimizer holds it"),
    "frozen": ("trainable parameters", "blocks.0.up.weight", "is frozen"),
    "not_deterministic": ("repeatability", "blocks.1", "another output for the same input and seeds"),
    "seed_by_rank": ("initial weights", "embed.weight", "rank 1 built other values than rank 0"),
    "same_data": ("data", "step 0", "ranks 0, 1 have the same batch"),
    "order_differs": ("data", "step 0", r"batch_fn\(1, 0\) gives another batch on rank 0 than on rank 1"),
    "order_wanders": ("data", "step 0", r"batch_fn\(0, 0\) gave another batch when called again"),
    "unsynchronised_buffer": ("buffers", "magnitude", "differs between rank 0 and rank 1"),
    "stale_buffer": ("hidden references", "scale", "shares memory with blocks.0.norm.weight, .* stale"),
    "changed_buffer": ("buffers", "scale", "beside the unsharded one"),
    "local_norm": ("gradient norm", "clipping", "on rank 0, .* on rank 1: the norm is of one rank's pieces"),
    "local_norm_in_bf16": ("gradient norm", "clipping", "on rank 0, .* on rank 1: the norm is of one rank's pieces"),
    "returned_norm": ("gradient norm", "norm", "the step returns .* on rank 0, the global norm is"),
    "mean_of_means": ("token weights", "loss", "10 of 14 targets but weighs 0.500 instead of 0.714"),
    "hidden_use": ("hidden references", "seen", "holds blocks.0.up.weight"),
    "closed_over_use": ("loss", "blocks.1", "the first output that differs"),
    "dropped_tie": ("tied weights", "head.weight", "equals embed.weight to the bit but is another parameter"),
    "lr_by_rank": ("optimizer", "lr", "0.001 on rank 0, 0.002 on rank 1"),
    "lost_steps": ("every fragment changes", "embed.weight", "0 of .* steps of about 1.0e-05 are lost .* in bf16"),
    "casts": ("casts", "blocks.1", "casts fp32 to bf16"),
    "rescaling_hook": ("gradient hooks", "blocks.1.up.weight", "a factor of 3"),
    "hook_of_the_optimizer": ("gradient hooks", "blocks.1.up.weight", "a factor of 3"),
    "unused": ("every fragment changes", "spare.weight", "no gradient reached it"),
    "hidden_module": ("hidden references", "spares", "is no submodule"),
    "raises_on_one_rank": ("model", "rank 1", "OSError: no such weights"),
    "raises_for_another_rank": ("data", "rank 0", "KeyError: 'rows of rank 1'"),
    "raises_for_rank_1": ("data", "rank 1", "KeyError: 'rows of rank 1'"),
    "raises_whole": ("unsharded", "rank 1", "ValueError: a value that rank 1 cannot use"),
    "raises_sharded": ("trains", "rank 1", "ValueError: a value that rank 1 cannot use"),
}
"""By fault: the check that fails first, what it is about, and its words."""

RIGHT = ("right", "on_meta", "with_dropout", "in_bf16", "every_strategy", "expected", "accumulating", "adapted")


def _diagnosed(ranks: Any, name: str) -> Diagnosis:
    first, second = ranks(2).run(diagnose, name)
    assert first == second  # every rank gets the same
    return Diagnosis.from_dict(first)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(ranks: Any, fault: str) -> None:
    found = _diagnosed(ranks, fault)
    name, fqn, words = FAULTS[fault]
    first = found.failed[0]
    assert (first.name, first.fqn) == (name, fqn), str(found)
    assert re.search(words, first.reason)
    assert not found.ok


@pytest.mark.parametrize("job", RIGHT)
def test_nothing_is_found_where_nothing_is_wrong(ranks: Any, job: str) -> None:
    found = _diagnosed(ranks, job)
    assert found.ok, str(found)
    strategies = {check.strategy for check in found.checks}
    assert len(strategies) == (6 if job == "every_strategy" else 2)
    assert {check.name for check in found.checks if check.status == "skipped"} <= {
        "initial weights",
        *(["token weights"] if job == "adapted" else []),
    }


def test_a_rank_alone_is_diagnosed() -> None:
    found = Diagnosis.from_dict(diagnose("alone"))
    assert found.ok, str(found)
    skipped = [check.name for check in found.checks if check.status == "skipped"]
    assert skipped == ["collectives", "token weights"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_fn": None}, "give both build_model and batch_fn"),
        ({"loss_fn": lambda model, batch: model(**batch)}, "give loss_fn or step, not both"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"directory": "absent"}, "directory='absent' is no directory here"),
        ({"strategies": ["zero4"]}, "did you mean 'zero3'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sw.doctor(**{**right(), **arguments})


def test_machines_are_diagnosed_without_a_model() -> None:
    names = [check.name for check in sw.doctor().checks]
    assert names[0] == "versions"
    assert names[-1] == "collectives"


def test_what_is_found_is_printed_with_a_way_out(ranks: Any) -> None:
    text = str(_diagnosed(ranks, "frozen"))
    assert "failed   trainable parameters: blocks.0.up.weight: is frozen (requires_grad=False)" in text
    assert text.endswith('--expect "trainable parameters:blocks.0.up.weight"; * stands for any name')


def test_a_check_counts_what_it_found(ranks: Any) -> None:
    [check] = [one for one in _diagnosed(ranks, "local_norm").failed if one.name == "gradient norm"]
    assert isinstance(check, Check)
    assert check.numbers["norm"] > 0
