"""Shows what sharding does to a JAX training step: python examples/jax_sharding.py

Runs on the available accelerators, otherwise on eight CPU devices. Each part first prints what it will show.
Needs the extra `jax`: pip install 'shardwise[jax]'.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # without effect on accelerators

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardwise.jax as swj

VOCAB, WIDTH, LENGTH, ROWS = 256, 128, 32, 64


class Block(nnx.Module):
    """A residual MLP."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: (rows, length, width)."""
        return x + self.down(nnx.relu(self.up(x)))


class Model(nnx.Module):
    """Predicts a token from the one before it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens: (rows, length); logits are (rows, length, vocabulary)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def loss_fn(model: Model, tokens: jax.Array, rng: jax.Array) -> tuple[jax.Array, int]:
    """Return the sum of the losses of all targets, and the number of targets."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
    return losses.sum(), losses.size


def say(text: str) -> None:
    """Print a heading."""
    print(f"\n--- {text}\n")


def main() -> None:
    """Run all parts in order."""
    mesh = swj.mesh()  # all devices along dp_shard: parameters and the rows of a batch are cut over them
    say(f"A mesh of {mesh.size} {jax.default_backend()} devices: {dict(mesh.shape)}")

    model = swj.init(lambda key: Model(nnx.Rngs(key)), mesh)(jax.random.key(0))
    step = swj.train_step(loss_fn, optax.adamw(1e-2), mesh)
    state = step.init(model)
    say("Where everything lies. Large arrays are cut along a dim that divides; small ones are on every device")
    print(swj.describe(state))
    say("Which device has which part of a kernel of shape (128, 512): its columns are dealt out")
    swj.describe(state).picture("params.blocks.0.up.kernel")

    batch = jax.ShapeDtypeStruct((ROWS * mesh.size, LENGTH), jnp.int32)  # compiling needs no data
    compiled = step.lower(state, batch).compile()
    say("The memory of one step. Without sharding, every device would have the column 'whole'")
    print(swj.memory(compiled))
    say("What the compiler sends. Weights are gathered before they are used, gradients are summed over rows")
    print(swj.collectives(compiled))

    say("The same step with two rows a device: does the compiler still do what was meant?")
    small = step.lower(state, jax.ShapeDtypeStruct((2 * mesh.size, LENGTH), jnp.int32)).compile()
    print("\n".join(swj.check(small)) or "yes")
    print("(where not: `x = swj.keep_rows(x)` at the start of a block says that rows are to stay where they are)")

    say("Training")
    rng = np.random.default_rng(0)
    for index in range(10):
        start = rng.integers(0, VOCAB, (ROWS, 1))
        tokens = (start + 3 * np.arange(LENGTH)) % VOCAB
        state, metrics = step(state, tokens.astype(np.int32))
        print(f"step {index}: loss {metrics['loss']:.3f}, norm of the gradients {metrics['grad_norm']:.3f}")


if __name__ == "__main__":
    main()
