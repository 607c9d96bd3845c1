"""Reports: where arrays are placed, and what the compiler made of a step."""
