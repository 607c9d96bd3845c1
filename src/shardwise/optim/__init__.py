"""Beside torch's optimizers: gradient clipping, loss scaling, whole-matrix optimizers, and AdamW with less state."""

from shardwise.optim.adamw_8bit import AdamW8bit
from shardwise.optim.adamw_bf16 import AdamWBF16
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.scaler import GradScaler
from shardwise.optim.whole_matrix import whole_matrix

__all__ = ["AdamW8bit", "AdamWBF16", "GradScaler", "clip_grad_norm_", "whole_matrix"]
