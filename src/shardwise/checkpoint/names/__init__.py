"""Names of tensors in files, and where the elements of one tensor are stored in another."""
