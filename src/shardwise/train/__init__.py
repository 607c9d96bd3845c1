"""The trainer: configuration, data, models, the loop. Needs the `train` extra."""
