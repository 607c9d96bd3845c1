"""PyTorch's own signatures over sharded models, so that a script only changes its imports."""
