"""Initial values for a model built on the meta device, equal to those of a build on the CPU."""
