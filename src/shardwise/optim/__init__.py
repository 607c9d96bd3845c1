"""What an optimizer's step needs beside torch's optimizers: clipping, loss scaling, whole matrices."""

from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.scaler import GradScaler
from shardwise.optim.whole_matrix import whole_matrix

__all__ = ["GradScaler", "clip_grad_norm_", "whole_matrix"]
