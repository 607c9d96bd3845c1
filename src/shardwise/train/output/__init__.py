"""What a run leaves behind: its directory, metrics, checkpoints, the final model, lines on the terminal."""
