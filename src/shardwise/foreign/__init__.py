"""Configurations of other libraries in our words: DeepSpeed's, Accelerate's and transformers' for FSDP. No torch."""
