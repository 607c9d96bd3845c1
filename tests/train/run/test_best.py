import json
import math

import pytest

from shardwise.errors import ConfigError
from shardwise.train.run.best import Best


def fed(by: str, values: list[float], min_delta: float = 0.0) -> Best:
    best = Best(by)
    for step, value in enumerate(values, 1):
        best.add(10 * step, {by: value}, min_delta)
    return best


def test_the_lowest_loss_is_the_best_and_the_highest_metric() -> None:
    assert (fed("loss", [3.0, 1.0, 2.0]).step, fed("loss", [3.0, 1.0, 2.0]).value) == (20, 1.0)
    assert fed("accuracy", [0.3, 0.1, 0.5, 0.5]).step == 30
    assert fed("loss", [math.nan, 2.0, math.nan]).step == 20
    assert fed("loss", []).step is None


@pytest.mark.parametrize(
    ("values", "min_delta", "waited"),
    [([3.0, 2.0, 1.0], 0.0, 0), ([3.0, 3.0, 3.0], 0.0, 2), ([3.0, 2.9, 2.8], 0.5, 2), ([3.0, 2.9, 2.4, 2.5], 0.5, 1)],
)
def test_evaluations_that_are_not_better_are_counted(values: list[float], min_delta: float, waited: int) -> None:
    best = fed("loss", values, min_delta)
    assert best.waited == waited
    assert best.ends(waited) == (waited > 0)
    assert not best.ends(waited + 1)
    assert not best.ends(0)


def test_the_state_survives_a_checkpoint() -> None:
    for best in (fed("loss", [3.0, 2.9, math.nan]), fed("loss", [])):
        stored = json.loads(json.dumps(best.to_json(), allow_nan=False))
        assert repr(Best.of("loss", stored)) == repr(best)
        assert repr(Best.of("accuracy", stored)) == repr(Best("accuracy"))
    assert repr(Best.of("loss", None)) == repr(Best())


def test_a_metric_that_the_task_does_not_have() -> None:
    with pytest.raises(ConfigError, match=r"train.best_by='f1': evaluations of this task find loss, accuracy"):
        Best("f1").add(1, {"loss": 1.0, "perplexity": 2.7, "accuracy": 0.5}, 0.0)
