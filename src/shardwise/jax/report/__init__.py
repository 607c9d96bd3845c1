"""What lies where, and what the compiler made of a step: tables."""
