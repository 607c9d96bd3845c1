"""The engine: what shards a model and trains it. It imports nothing else of shardwise but its errors, its registry of
seams and what it needs of a device; everything else attaches to it.

In reading order: `layout`, `strategy`, `collectives`, `torch_collectives`, `mesh`, `sharded_parameter`, `operations`,
`slots`, `parameter_group`, `gradients`, `schedule`, `unit`, `unsharder`, `saved_tensors`, `reducer`, `engine`, `shard`.
Each imports earlier ones only.
"""
