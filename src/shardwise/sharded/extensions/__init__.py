"""What attaches to sharded parameters: operations and methods that training alone does not need."""
