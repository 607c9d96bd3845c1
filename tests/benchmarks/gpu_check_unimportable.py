"""A check that cannot even be imported."""

raise ModuleNotFoundError("No module named 'xxhash'", name="xxhash")
