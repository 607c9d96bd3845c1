"""The user's module tree: which modules become units, whose parameters are whose, and their initial numbers."""
