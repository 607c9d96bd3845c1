"""What a checkpoint's files contain: tensors, training state, names, and the manifest that makes them one."""
