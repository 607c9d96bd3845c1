"""The checks of `benchmarks/gpu.py`: what can be learned about the accelerator path with one device."""
