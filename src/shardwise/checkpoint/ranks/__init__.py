"""How the ranks of one save or load agree and fail together, and the thread of an asynchronous save."""
