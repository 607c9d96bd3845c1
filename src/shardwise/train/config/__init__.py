"""The configuration of a run: one TOML file, checked before anything is started. Imports no torch."""
