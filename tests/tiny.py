"""First part of the configuration of a small run."""

GPT2 = """
[model.config]
model_type = "gpt2"
n_embd = 16
n_layer = 2
n_head = 2

[data]
source = "texts/*.txt"
seq_len = 16
eval_fraction = 0.2
"""
