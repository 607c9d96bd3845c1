"""How long sequences are."""

import inspect
from dataclasses import fields

import pytest

from shardwise.errors import PlanError
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.sequence import with_sequences
from shardwise.plan.models.source import resolve
from shardwise.plan.simulate.forecast import forecast


@pytest.mark.parametrize(("model", "seq_len"), [("gpt2", 1024), ("llama-3-8b", 2048), ("vit-l-16", 2048)])
def test_left_out_it_is_what_the_model_takes(model: str, seq_len: int) -> None:
    assert with_sequences(resolve(model), {"nodes": 2}) == {"nodes": 2, "seq_len": seq_len}
    assert with_sequences(resolve(model), {"seq_len": None})["seq_len"] == seq_len
    assert with_sequences(resolve(model), {"seq_len": [256, 512]})["seq_len"] == [256, 512]


def test_longer_than_the_model_takes_is_refused() -> None:
    line = "seq_len=2048 is more than the model's max_position_embeddings=1024; lower seq_len"
    for asked in (2048, [512, 2048]):
        with pytest.raises(PlanError, match=line):
            with_sequences(resolve("gpt2"), {"seq_len": asked})
    with pytest.raises(PlanError, match=line):
        forecast("gpt2", seq_len=2048)


def test_the_signature_names_every_argument() -> None:
    parameters = inspect.signature(forecast).parameters
    assert list(parameters) == ["model", *(choice.name for choice in fields(Job))]
    assert (parameters["seq_len"].default, parameters["gpu"].default) == (2048, "h100-sxm-80gb")
