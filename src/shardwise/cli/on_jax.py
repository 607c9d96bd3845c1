"""`shardwise train` on JAX, in this process, which has all devices of the machine; and `shardwise plan` for JAX."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from shardwise.cli.process.exit import Exit
from shardwise.cli.process.standard_streams import outlive_readers
from shardwise.errors import PlanError, UserError
from shardwise.policy.precision import precision_of
from shardwise.tables import aligned
from shardwise.train.process.interruption import ending_signals

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.plan.models.source import ModelSource
    from shardwise.plan.simulate.compiled import Seconds, Sent
    from shardwise.plan.simulate.network import Cluster
    from shardwise.train.config.schema import Config


def train(config: Config) -> Exit:
    """Train on JAX. Returns the exit status; the caller must print a UserError.

    Raises ModuleNotFoundError, which names the missing module, if JAX is not installed.
    """
    outlive_readers()
    for number in ending_signals():
        signal.signal(number, signal.default_int_handler)  # replaced during the training loop, so that it can save
    try:
        from shardwise.train.on_jax.trainer import run

        run(config)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    return Exit.DONE


PRECISIONS = {"fp32": ("float32", None, "fp32"), "bf16": ("float32", "bfloat16", "bf16")}
PRECISIONS["bf16-true"] = ("bfloat16", None, "bf16")
"""By name of a precision: JAX's dtype of parameters, JAX's dtype of the loss (None: the parameters'), and the dtype of
matrix products in the hardware files."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question to `shardwise plan --backend jax`."""

    model: str
    cluster: Cluster
    settings: Sequence[Mapping[str, Any]]
    """For each program to compile, some fields of a `Job`."""
    precision: str
    seq_len: int


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: one setting with one backend."""

    backend: str
    setting: Mapping[str, Any]
    needed_bytes: int
    has_bytes: int
    """Usable memory of a device."""
    step_time_s: tuple[float, float]
    """Shortest and longest time of a step."""
    bytes_sent: float
    """Bytes that one device sends in a step."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The row's cells as text, one per column of `_HEAD`."""
        from shardwise.plan.report.rendering import seconds
        from shardwise.plan.search.exploration import gib

        group, accumulation = self.setting["shard_group"], self.setting["accumulation"]
        low, high = (seconds(end) for end in self.step_time_s)
        return (
            self.backend,
            self.setting["strategy"] + (f"/{group}" if group else ""),
            str(self.setting["micro_batch"]) + (f"x{accumulation}" if accumulation > 1 else ""),
            self.setting["activation_checkpointing"],
            gib(self.needed_bytes),
            low if low == high else f"{low}-{high}",
            f"{self.bytes_sent / 1e9:,.2f}",
            "" if self.needed_bytes <= self.has_bytes else "does not fit",
        )


_HEAD = ("backend", "strategy", "batch", "recompute", "GiB", "s/step", "GB sent", "")


def plan(asked: Asked, as_json: bool, html: Path | None = None) -> Exit:
    """Print the memory, communication and time of XLA's programs, beside the torch engine's forecast.

    Args:
        asked: the question.
        as_json: print JSON instead of a table.
        html: a page to write as well.

    Raises PlanError for a model or a mesh that JAX does not support, ModuleNotFoundError if JAX is not installed.
    """
    from shardwise.plan.models.source import resolve

    for library in ("jax", "flax", "optax"):
        if find_spec(library) is None:
            raise ModuleNotFoundError(name=library)
    is_factory = ":" in asked.model and "/" not in asked.model
    source = None if is_factory else resolve(asked.model)
    print(f"compiling {len(asked.settings)} programs for {asked.cluster.world_size} devices", file=sys.stderr)
    found, rows = _of_jax(asked, source)
    if source is not None:
        beside = _of_torch(asked)
        rows = [row for pair in zip(rows, beside, strict=True) for row in pair] if beside else rows
    parameters, platform = found["parameters"], found["platform"]
    title = f"{source.title if source else asked.model}: {parameters:,} parameters"
    if as_json:
        answer = {"parameters": parameters, "compiled_for": platform, "rows": [asdict(row) for row in rows]}
        print(json.dumps(answer, indent=2))
    else:
        print(_table(asked, title, rows, _note(platform)))
    if html is not None:
        _write_page(asked, title, rows, found, html)
        print(f"page: {html}", file=sys.stderr)
    return Exit.DONE


def _of_jax(asked: Asked, source: ModelSource | None) -> tuple[dict[str, Any], list[Row]]:
    """Compile for all settings; return what `compile_in_subprocess` returned, and a row for each setting."""
    from shardwise.plan.simulate.compiled import seconds
    from shardwise.train.on_jax.planning import CompileRequest, Setting, compile_in_subprocess
    from shardwise.train.on_jax.supported import REMAT

    if source is not None and source.config is None:
        raise PlanError(
            f"{asked.model}: JAX builds models only from a transformers configuration or from module:function"
        )
    stored, computed, products = PRECISIONS[asked.precision]
    devices = asked.cluster.world_size
    settings = []
    for one in asked.settings:
        dp_shard = _shards(one, asked.cluster)
        remat = REMAT.get(one["activation_checkpointing"])
        if remat is None:
            raise PlanError(
                f"--activation-checkpointing {one['activation_checkpointing']}: must be one of {', '.join(REMAT)} "
                "with --backend jax"
            )
        settings.append(Setting(dp_shard, devices // dp_shard, one["micro_batch"], one["accumulation"], remat))
    model = asked.model if source is None else dict(source.config or {})
    gpu = asked.cluster.hardware.name.partition("-")[0]
    found = compile_in_subprocess(CompileRequest(model, devices, asked.seq_len, stored, computed, settings, gpu))
    rows = []
    for one, compiled in zip(asked.settings, found["rows"], strict=True):
        sent = _sent(compiled, widened=found["platform"] == "cpu" and (computed or stored) == "bfloat16")
        took = seconds(compiled["flops"], products, sent, asked.cluster)
        rows.append(_row_of_jax(one, compiled, took, asked.cluster))
    return found, rows


def _row_of_jax(setting: Mapping[str, Any], compiled: Mapping[str, Any], took: Seconds, cluster: Cluster) -> Row:
    has = int(cluster.hardware.memory.usable_bytes.value)
    return Row("jax", setting, compiled["memory"]["peak_bytes"], has, took.ends, took.bytes_sent)


def _shards(setting: Mapping[str, Any], cluster: Cluster) -> int:
    """Return the number of devices that share one copy of the model. Raises PlanError for a strategy or a group that
    JAX does not support."""
    strategy, group = setting["strategy"], setting["shard_group"]
    if strategy == "no_shard":
        return 1
    if strategy == "full_shard":
        return cluster.world_size
    if strategy != "hybrid_shard":
        raise PlanError(f"--strategy {strategy}: must be full_shard, hybrid_shard or no_shard with --backend jax")
    group = group or cluster.gpus_per_node
    if cluster.world_size % group:
        raise PlanError(f"--shard-group {group} does not divide the {cluster.world_size} devices")
    return int(group)


def _sent(compiled: Mapping[str, Any], widened: bool) -> Iterator[Sent]:
    """Yield a program's collectives as an accelerator would run them: an all-reduce of which each device needs only a
    piece counts as a reduce-scatter. A collective over both axes counts as one over dp_shard and one over dp_replicate,
    where the replicas exchange only pieces.

    widened: whether the program sends parameters and gradients in fp32 that an accelerator would send in bf16.
    """
    from shardwise.plan.simulate.compiled import Sent
    from shardwise.plan.simulate.network import REPLICATE

    sizes = compiled["axes"]
    for part in compiled["collectives"]["parts"]:
        op, nbytes, times = part["operation"].replace("-", "_"), part["nbytes"], part["times"]
        nbytes = nbytes // 2 if widened and part["dtype"] == "f32" and part["parameter"] else nbytes
        op = op if op in ("all_gather", "reduce_scatter", "all_reduce") else "all_to_all"
        over_shards, over_replicas = "dp_shard" in part["axes"], "dp_replicate" in part["axes"]
        if over_shards:
            yield Sent("reduce_scatter" if part["is_cut"] else op, "shard", sizes["dp_shard"], nbytes, times)
        if over_replicas:
            own = nbytes // sizes["dp_shard"] if over_shards else nbytes
            yield Sent(op, REPLICATE, sizes["dp_replicate"], own, times)


def _of_torch(asked: Asked) -> list[Row]:
    """Return a row with the torch engine's forecast for each setting; none, and a printed note, if torch is missing or
    the engine does not support a setting."""
    from shardwise.plan.search.exploration import needed_bytes

    try:
        from shardwise.plan import forecast

        cluster = asked.cluster
        shared: dict[str, Any] = {
            "gpu": cluster.hardware,
            "gpus_per_node": cluster.gpus_per_node,
            "nodes": cluster.nodes,
            "interconnect": cluster.interconnect,
            "precision": precision_of(asked.precision),
            "seq_len": asked.seq_len,
        }
        found = [forecast(asked.model, **shared, **setting) for setting in asked.settings]
    except (ModuleNotFoundError, UserError) as error:
        print(f"no forecast for the torch engine: {' '.join(str(error).split())}", file=sys.stderr)
        return []
    return [
        Row("torch", setting, needed_bytes(one), one.usable_bytes, (one.step_time_s,) * 2, one.bytes_sent_per_rank)
        for setting, one in zip(asked.settings, found, strict=True)
    ]


_NUMBERS = {"batch", "GiB", "s/step", "GB sent"}


def _note(platform: str) -> str:
    """Return a note on what the figures include and what they do not."""
    compiled = "the same number of these GPUs, and its temporaries hold attention's scores"
    if platform == "cpu":
        compiled = (
            "the same number of CPU devices, where temporaries hold bf16 as fp32, and attention's scores; with "
            "JAX's CUDA plugin installed it compiles for A100, H100 and H200"
        )
    return (
        f"jax: the program that XLA compiles for {compiled}. s/step: matrix products and collectives, first "
        "overlapped, then one after another; other operations do not count. torch: the engine's forecast, with "
        "context and NCCL included."
    )


def _where(asked: Asked) -> str:
    cluster = asked.cluster
    on = f"{cluster.world_size} x {cluster.hardware.name}" + (f" on {cluster.nodes} nodes" * (cluster.nodes > 1))
    return f"{on}, {asked.seq_len:,} tokens per sequence, {asked.precision}, adamw"


def _table(asked: Asked, title: str, rows: Sequence[Row], note: str) -> str:
    """Return the table as text, 80 columns wide unless names are longer."""
    import textwrap

    from shardwise.plan.report.rendering import WIDTH

    numbers = [index for index, name in enumerate(_HEAD) if name in _NUMBERS]
    table = aligned([_HEAD, *(row.cells for row in rows)], numbers)
    return "\n".join([title, _where(asked), "", *table, "", textwrap.fill(note, WIDTH)])


def _write_page(asked: Asked, title: str, rows: Sequence[Row], found: Mapping[str, Any], path: Path) -> None:
    """Write an HTML page with the table, and with what each XLA program holds in memory and sends."""
    from shardwise.pages import filled, write_page

    of_jax = [row for row in rows if row.backend == "jax"]
    programs = zip(of_jax, found["rows"], strict=True)
    page = filled(
        "compiled.html.jinja",
        title=title,
        where=_where(asked),
        head=_HEAD,
        numbers=_NUMBERS,
        rows=[row.cells for row in rows],
        note=_note(found["platform"]),
        programs=[(", ".join(row.cells[1:4]), compiled["tables"]) for row, compiled in programs],
    )
    write_page(page, path)
