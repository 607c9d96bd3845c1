"""The user's module tree: which modules become units, which unit owns each parameter, and initial values."""
