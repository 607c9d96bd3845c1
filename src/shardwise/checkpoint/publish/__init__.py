"""How written files become a checkpoint that readers see, all at once."""
