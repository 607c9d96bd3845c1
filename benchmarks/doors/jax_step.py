"""A sharded JAX step beside replicated data parallel, and beside one written by hand with flax and NamedSharding.

    python benchmarks jax_step [--devices 8] [--layers 4] [--width 256] [--rows 32] [--steps 5]

All three train one decoder with AdamW on the same rows and start from the same numbers. The one by hand is as flax's
guide to several devices has it: kernels annotated, `nnx.jit` around creation with the specs as constraints, a jitted
step of `nnx.value_and_grad` and `nnx.Optimizer`, donated; its annotations are the specs that shardwise chose. Bytes are
XLA's own (`memory_analysis`), operations too (`cost_analysis`); collectives are counted in each program's text. Devices
of one host share its cores: times are shown and are no target.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.common import facts, report
from benchmarks.common.target import Target

VOCABULARY = 2048
SAME_BYTES = 0.02
SAME_WORK = 0.02


def build_classes() -> Any:
    """The model; imported here, since the number of devices must be set before JAX looks at them."""
    import jax
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, width: int, specs: dict[str, Any], rngs: nnx.Rngs) -> None:
            def linear(name: str, inputs: int, outputs: int) -> nnx.Linear:
                kernel_init = nnx.initializers.lecun_normal()
                if name in specs:
                    kernel_init = nnx.with_partitioning(kernel_init, specs[name])
                return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=kernel_init, rngs=rngs)

            self.norm_1 = nnx.RMSNorm(width, rngs=rngs)
            self.qkv_proj = linear("qkv_proj", width, 3 * width)
            self.o_proj = linear("o_proj", width, width)
            self.norm_2 = nnx.RMSNorm(width, rngs=rngs)
            self.up_proj = linear("up_proj", width, 4 * width)
            self.down_proj = linear("down_proj", 4 * width, width)

        def __call__(self, x: jax.Array) -> jax.Array:
            rows, length, width = x.shape
            qkv = self.qkv_proj(self.norm_1(x)).reshape(rows, length, 3, width // 64, 64)
            attended = jax.nn.dot_product_attention(*(qkv[:, :, index] for index in range(3)), is_causal=True)
            x = x + self.o_proj(attended.reshape(rows, length, width))
            return x + self.down_proj(nnx.gelu(self.up_proj(self.norm_2(x))))

    class Decoder(nnx.Module):
        def __init__(self, width: int, layers: int, specs: dict[str, Any], rngs: nnx.Rngs) -> None:
            embedding_init = nnx.initializers.normal(0.02)
            if "embed" in specs:
                embedding_init = nnx.with_partitioning(embedding_init, specs["embed"])
            self.embed = nnx.Embed(VOCABULARY, width, embedding_init=embedding_init, rngs=rngs)
            self.blocks = nnx.List([Block(width, specs, rngs) for _ in range(layers)])
            self.norm = nnx.RMSNorm(width, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.embed.attend(self.norm(x))

    return Decoder


def loss_fn(model: Any, tokens: Any, rng: Any) -> tuple[Any, Any]:
    import optax

    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
    return losses.sum(), losses.size


class Side:
    """One of the three: its compiled program, and a call that makes a step and returns the loss."""

    def __init__(self, compiled: Any, advance: Callable[[Any], float]) -> None:
        self.compiled, self.advance = compiled, advance
        self.step_s: list[float] = []
        self.losses: list[float] = []


def with_shardwise(options: argparse.Namespace, decoder: Any, batch: Any, **axes: int) -> Side:
    import jax
    import optax
    from flax import nnx

    import shardwise.jax as swj

    mesh = swj.mesh(**axes)
    init = swj.init(lambda key: decoder(options.width, options.layers, {}, nnx.Rngs(key)), mesh)
    step = swj.train_step(loss_fn, optax.adamw(1e-3), mesh)
    state = step.init(init(jax.random.key(0)))
    compiled = step.lower(state, swj.put_batch(batch, mesh)).compile()

    def advance(batch: Any) -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return float(metrics["loss"])

    return Side(compiled, advance)


def by_hand(options: argparse.Namespace, decoder: Any, batch: Any) -> Side:
    import jax
    import optax
    from flax import nnx
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    specs = {
        "embed": ("dp_shard", None),
        "qkv_proj": (None, "dp_shard"),
        "o_proj": ("dp_shard", None),
        "up_proj": (None, "dp_shard"),
        "down_proj": ("dp_shard", None),
    }
    mesh = jax.make_mesh((options.devices,), ("dp_shard",), (AxisType.Auto,))
    jax.set_mesh(mesh)

    @nnx.jit
    def create() -> Any:
        model = decoder(options.width, options.layers, specs, nnx.Rngs(jax.random.key(0)))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
        for part in (model, optimizer):
            state = nnx.state(part)
            nnx.update(part, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return model, optimizer

    def train(model: Any, optimizer: Any, tokens: Any) -> Any:
        def mean(model: Any) -> Any:
            loss_sum, weight = loss_fn(model, tokens, None)
            return loss_sum / weight

        loss, gradients = nnx.value_and_grad(mean)(model)
        optimizer.update(model, gradients)
        return loss, optax.tree.norm(gradients)

    model, optimizer = create()
    step = nnx.jit(train, donate_argnums=(0, 1))
    rows = NamedSharding(mesh, PartitionSpec("dp_shard"))
    compiled = step.lower(model, optimizer, jax.device_put(batch, rows)).compile()

    def advance(batch: Any) -> float:
        return float(step(model, optimizer, jax.device_put(batch, rows))[0])

    return Side(compiled, advance)


def measure(sides: dict[str, Side], batches: list[Any]) -> None:
    """Turn by turn. The first step compiles and is not timed."""
    for index, batch in enumerate(batches):
        for side in sides.values():
            start = time.perf_counter()
            side.losses.append(side.advance(batch))
            if index:
                side.step_s.append(time.perf_counter() - start)


def row_of(side: Side, batch_bytes: float) -> dict[str, Any]:
    import shardwise.jax as swj

    memory, sent = swj.memory(side.compiled), swj.collectives(side.compiled)
    cost = side.compiled.cost_analysis()
    return {
        "step_s": median(side.step_s),
        "state_bytes": memory.argument_bytes - batch_bytes,
        "temporary_bytes": memory.temporary_bytes,
        "peak_bytes": memory.peak_bytes,
        "flops": cost["flops"],
        "bytes_accessed": cost["bytes accessed"],
        "counts": sent.counts(),
        "sent_bytes": sent.bytes(),
        "losses": side.losses,
    }


def targets_of(rows: dict[str, Any], devices: int) -> list[Target]:
    ours, hand, replicated = rows["shardwise"], rows["by hand"], rows["replicated"]
    off = {name: abs(ours[name] / hand[name] - 1) for name in ("flops", "bytes_accessed")}
    sums = [sum(row["sent_bytes"].values()) for row in (ours, hand)]
    losses = zip(ours["losses"], replicated["losses"], strict=True)
    state_off = abs(ours["state_bytes"] * devices / replicated["state_bytes"] - 1)
    counts = f"{ours['counts']} and {hand['counts']}"
    return [
        Target("a device's state, off from 1/N of the replicated", state_off, SAME_BYTES),
        Target("operations, off from the one by hand", off["flops"], SAME_WORK),
        Target("bytes accessed, off from the one by hand", off["bytes_accessed"], SAME_WORK),
        Target("bytes of collectives, over the one by hand", sums[0] / sums[1], 1.0, counts),
        Target("temporaries, over the one by hand", ours["temporary_bytes"] / hand["temporary_bytes"], 1 + SAME_WORK),
        Target("losses, off from the replicated, relative", max(abs(a / b - 1) for a, b in losses), 1e-5),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("devices", 8), ("layers", 4), ("width", 256), ("rows", 32), ("length", 128), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out")
    options = parser.parse_args()
    flags = f"--xla_force_host_platform_device_count={options.devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()

    import numpy as np

    rng = np.random.default_rng(0)
    shape = (options.rows, options.length + 1)
    batches = [rng.integers(0, VOCABULARY, shape, dtype=np.int32) for _ in range(options.steps + 1)]
    decoder = build_classes()
    sides = {
        "shardwise": with_shardwise(options, decoder, batches[0], dp_shard=options.devices),
        "replicated": with_shardwise(options, decoder, batches[0], dp_shard=1, dp_replicate=options.devices),
        "by hand": by_hand(options, decoder, batches[0]),
    }
    measure(sides, batches)
    rows = {name: row_of(side, batches[0].nbytes / options.devices) for name, side in sides.items()}
    targets = targets_of(rows, options.devices)
    text = markdown(options, rows, targets)
    print(text)
    if options.out:
        machine = {**facts.machine(), **{name: facts.version(name) for name in ("jax", "flax", "optax")}}
        report.write(options.out, {"rows": rows, "facts": machine}, text)


def markdown(options: argparse.Namespace, rows: dict[str, Any], targets: list[Target]) -> str:
    from shardwise.jax.report.tables import amount

    header = ["", *rows]
    names = ("state_bytes", "temporary_bytes", "peak_bytes", "bytes_accessed")
    cells = [["seconds a step, median", *(f"{row['step_s']:.3f}" for row in rows.values())]]
    cells += [[f"{name.replace('_', ' ')}, a device", *(amount(row[name]) for row in rows.values())] for name in names]
    cells.append(["operations, a device", *(f"{row['flops']:.4g}" for row in rows.values())])
    for operation in sorted({operation for row in rows.values() for operation in row["counts"]}):
        counted = [(row["counts"].get(operation, 0), row["sent_bytes"].get(operation, 0)) for row in rows.values()]
        cells.append([f"{operation}: operations, bytes", *(f"{count}, {amount(sent)}" for count, sent in counted)])
    cells.append(["last loss", *(f"{row['losses'][-1]:.6f}" for row in rows.values())])
    text = " ".join((__doc__ or "").split("\n\n")[2].split())
    machine = {**facts.machine(), **{name: facts.version(name) for name in ("jax", "flax", "optax")}}
    verdicts = "\n".join(f"- {target}" for target in targets)
    sizes = f"{options.layers} layers of width {options.width}, {options.rows} x {options.length} tokens"
    return (
        f"# A JAX step, sharded\n\n{options.devices} devices, {sizes}. {text}\n\n{report.table(header, cells)}\n\n"
        f"{verdicts}\n\n"
        f"{report.facts_line(machine)}\n"
    )
