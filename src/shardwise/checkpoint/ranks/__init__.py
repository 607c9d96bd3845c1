"""How the ranks of one save or load keep together, and the thread of an asynchronous save."""
