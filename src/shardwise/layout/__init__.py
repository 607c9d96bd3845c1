"""Where every element of a parameter is stored: pure arithmetic on ints and tuples. Imports no torch."""
