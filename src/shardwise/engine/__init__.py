"""What surrounds the engine (`shardwise.fsdp`): `sw.shard`, which sets it up, and extensions that attach to it."""
