"""Where a model to plan comes from."""
