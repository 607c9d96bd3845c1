"""FSDP2's own tests, from a PyTorch source tree, on CPU ranks: `benchmarks/doors/fsdp2_tests.py` runs them."""
