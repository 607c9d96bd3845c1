"""The recorded step as FSDP1, FSDP2 or DeepSpeed would run it: its memory and the order of its events."""
