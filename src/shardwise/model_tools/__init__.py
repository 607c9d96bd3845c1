"""What can be done with a sharded model outside forward and backward."""
