from typing import Any

import pytest
from torch import nn

from shardwise.errors import ConfigError
from shardwise.train.build.sharding import needs_loss_scaling, shard_model
from shardwise.train.config.schema import ParallelConfig
from shardwise.train.ranks import started


def test_units_by_class_name_that_the_model_has_not() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 1, 4), nn.Linear(4, 4))
    with started() as ranks:
        with pytest.raises(ConfigError, match="no module of class 'Linaer'; did you mean Linear"):
            shard_model(model, ParallelConfig(units=["Linaer"]), ranks)
        with pytest.raises(ConfigError, match=r"no module of class 'Xyz'; it has .*LayerNorm.*TransformerEncoderLayer"):
            shard_model(model, ParallelConfig(units=["Xyz"]), ranks)


@pytest.mark.parametrize(("dtype", "scaled"), [(None, False), ("bf16", False), ("fp16", True)])
def test_only_fp16_needs_loss_scaling(dtype: Any, scaled: bool) -> None:
    assert needs_loss_scaling(ParallelConfig(param_dtype=dtype)) is scaled
