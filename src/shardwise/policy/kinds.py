"""Kinds of memory: the same names in `sw.memory`, the planner, the trainer's logs and reports."""

KINDS = (
    "param_shards",
    "gathered_slots",
    "grad_shards",
    "reduce_slots",
    "optimizer",
    "buffers",
    "activations",
    "temporaries",
    "other",
)

STATE_KINDS = ("param_shards", "gathered_slots", "grad_shards", "reduce_slots", "optimizer")
"""Kinds that depend on the strategy. Activations are the same under every strategy."""
