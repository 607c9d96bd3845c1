"""Where every element lives: pure arithmetic on ints and tuples. Imports no torch."""
