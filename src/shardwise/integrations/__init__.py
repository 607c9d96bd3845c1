"""Doors from other libraries. Each module needs the library that it is named after, which is not installed with us."""
