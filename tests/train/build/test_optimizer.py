import torch
from torch import nn

from shardwise.train.build.optimizer import build_optimizer, set_lr
from shardwise.train.config.schema import TrainConfig


def test_only_matrices_decay_and_only_what_trains_is_optimized() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 5))
    model[0].requires_grad_(False)
    optimizer = build_optimizer(model, TrainConfig(steps=1, weight_decay=0.3, lr=0.5, betas=(0.8, 0.7), eps=1e-6))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    names = {name: decay.get(id(parameter)) for name, parameter in model.named_parameters()}
    assert names == {"0.weight": None, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 0.3, "2.bias": 0.0}
    assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.8, 0.7), 1e-6)
    set_lr(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def test_a_model_without_matrices() -> None:
    assert len(build_optimizer(nn.LayerNorm(4), TrainConfig(steps=1)).param_groups) == 1


def test_it_is_fused() -> None:
    assert build_optimizer(nn.Linear(2, 2), TrainConfig(steps=1)).defaults["fused"] is True
    assert isinstance(build_optimizer(nn.Linear(2, 2), TrainConfig(steps=1)), torch.optim.AdamW)
