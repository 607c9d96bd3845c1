"""What an optimizer's step needs beside torch's optimizers: clipping and loss scaling over all ranks."""

from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.scaler import GradScaler

__all__ = ["GradScaler", "clip_grad_norm_"]
