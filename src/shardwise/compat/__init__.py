"""PyTorch's own signatures, over sharded models: a script changes its imports."""
