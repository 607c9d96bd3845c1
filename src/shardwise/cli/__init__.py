"""The command line: parse, start the ranks, report how they ended. No logic of training lives here."""
