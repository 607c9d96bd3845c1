"""A configuration: one TOML file, checked before anything is started. Imports no torch."""
