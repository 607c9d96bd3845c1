"""Integrations with other libraries. Each module needs a library that is not installed along with shardwise."""
