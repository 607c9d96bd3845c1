"""A small student learns from a large teacher, both sharded: torchrun --nproc-per-node 2 examples/distillation.py

The teacher is trained first, then frozen: its shards have no gradients and no optimizer state, and its forwards run
without autograd, each unit freed as soon as it has computed. The student learns the teacher's whole distribution of
the next token. It is compared with a student of the same size that learns from the data alone.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw

VOCAB, LENGTH, ROWS, NOISE = 64, 24, 16, 0.4
