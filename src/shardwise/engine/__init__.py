"""Units, the arena their gathered parameters live in, the hooks that move them, and the one call that sets it up."""
