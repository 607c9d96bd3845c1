"""Configurations of other libraries translated to shardwise's settings: DeepSpeed's, and Accelerate's and transformers'
for FSDP. It does not import torch."""
