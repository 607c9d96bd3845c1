"""What tensors are called in files, and where the elements of one lie in another."""
