"""What a job keeps on the host and on disk: its bytes there, and the time of every copy and of a step on the host."""
