"""The checks of `benchmarks/accelerator/gpu.py`: what can be learned about the accelerator path with one device."""
