"""The engine: what shards a model and trains it. It imports nothing else of shardwise but its errors, its registry of
seams and what it needs of a device; everything else attaches to it.

In reading order: `layout`, `strategy`, `collectives`, `buffers`, `torch_collectives`, `mesh`,
`collective_log`, `sharded_parameter`, `operations`, `step_hooks`, `modules`, `slots`, `parameter_group`, `gradients`,
`schedule`, `unit`, `unsharder`, `saved_tensors`, `reducer`, `engine`, `shard`. Each imports earlier ones only.
"""
