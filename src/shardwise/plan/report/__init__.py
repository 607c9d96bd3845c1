"""Reports of answers: a table for a terminal, a page for a browser."""
