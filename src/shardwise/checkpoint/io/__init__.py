"""Files: where they lie, byte ranges on their way to and from them, checksums. No torch."""
