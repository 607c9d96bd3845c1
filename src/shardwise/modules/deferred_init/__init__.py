"""Initial numbers for a model built on the meta device, the same as a build on the CPU gives."""
