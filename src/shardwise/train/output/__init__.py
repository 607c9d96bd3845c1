"""What a training run leaves behind: lines on the terminal, checkpoints, a sample, the final model."""
