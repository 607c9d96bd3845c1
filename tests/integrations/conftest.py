"""Tests of the doors from other libraries: `make test-integrations` installs these first."""

from importlib.util import find_spec

_NEEDED = ("accelerate", "lightning", "peft", "trl")
collect_ignore_glob = [] if all(find_spec(name) for name in _NEEDED) else ["test_*.py"]
