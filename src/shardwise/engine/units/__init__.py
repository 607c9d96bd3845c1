"""A unit: its parameters, its gradients on their way and its calls under way, three objects with a state each."""
