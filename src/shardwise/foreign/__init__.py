"""Configurations of other libraries translated to shardwise's settings: DeepSpeed's, and Accelerate's and transformers'
for FSDP and FSDP2. It does not import torch."""
