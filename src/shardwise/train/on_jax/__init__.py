"""`[parallel] backend = "jax"`: the same configuration, data and run directory, trained by JAX. Imports no torch."""
