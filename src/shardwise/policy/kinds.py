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

MEMORY_WORDS = {
    "param_shards": "parameter shards",
    "gathered_slots": "gathered parameters",
    "grad_shards": "gradient shards",
    "reduce_slots": "gradients to reduce",
    "optimizer": "optimizer state",
    "buffers": "buffers",
    "activations": "activations",
    "temporaries": "temporaries",
    "other": "other memory",
    "fragmentation": "fragmentation",
    "context": "GPU context",
    "nccl": "NCCL buffers",
}
"""Names of kinds of memory for users. The last three are not blocks that live in the allocator."""
