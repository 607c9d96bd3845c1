"""Communication that attaches to the engine's: further implementations of its collectives (`backends`), and channels
for small messages between hosts."""
