"""From a checkpoint and prompts to answers: `sw.generate`, and what `shardwise generate` is made of."""
