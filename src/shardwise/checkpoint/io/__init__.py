"""Files: where they are stored, reading and writing of byte ranges, checksums. No torch."""
