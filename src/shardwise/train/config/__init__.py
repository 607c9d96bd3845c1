"""From a TOML file to a checked configuration, and from that to a model that is sharded."""
