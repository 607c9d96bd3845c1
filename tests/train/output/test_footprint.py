import torch
from torch import nn

import shardwise as sw
from shardwise.model_tools.memory import replicated
from shardwise.policy.kinds import STATE_KINDS
from shardwise.train.output.footprint import compare


def test_ddp_is_computed_from_the_tensors_and_ranks_by_their_largest() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False).bfloat16())
    model[1].requires_grad_(False)
    sw.shard(model)
    optimizer = torch.optim.AdamW(model[0].parameters())
    model[0](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    ranks = [dict.fromkeys(STATE_KINDS, 10), {**dict.fromkeys(STATE_KINDS, 10), "optimizer": 30}]
    footprint = compare(ranks, replicated(model))
    assert footprint.replicated["param_shards"] == 64 + 32
    assert footprint.replicated["grad_shards"] == 64
    assert footprint.replicated["optimizer"] == 2 * 64 + 4  # two moments and the step count
    assert footprint.largest["optimizer"] == 30
    assert footprint.largest_bytes == 70
    assert footprint.replicated_bytes == 96 + 64 + 132
