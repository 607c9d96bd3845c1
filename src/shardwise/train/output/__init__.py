"""Output of a training run: lines on the terminal, checkpoints, a sample, the final model."""
