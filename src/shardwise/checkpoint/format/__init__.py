"""The contents of a checkpoint's files: tensors, training state, names, and the manifest that makes it a checkpoint."""
