"""`model.task`: what a run learns, from rows of data to a loss and metrics."""
