"""What the planner's benchmark counts, on rows whose errors can be reckoned in the head."""

import json
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

from benchmarks.plans.planner import (
    GIB,
    Forecasted,
    feasibility_lines,
    float8_lines,
    forecast_rows,
    metric_lines,
    out_of_memory_lines,
    unscored_lines,
)
from benchmarks.plans.published.bundles import BundleRoofline, bundled
from benchmarks.plans.published.choose import Case, Choice
from benchmarks.plans.published.llama import Block, LlamaShape
from benchmarks.plans.published.other_engines.job import PublishedJob
from benchmarks.plans.published.recordings import Memory, Steps, steps_of, without_second
from benchmarks.plans.published.rows import (
    ADAPTED,
    DATA,
    OUT_OF_MEMORY,
    Row,
    adapted_model,
    read,
    read_what_can_be,
    row_of,
)
from benchmarks.plans.published.score import Scored, headline, merge, percentile, quantiles
from benchmarks.plans.published.tensor_parallel import cut_llama
from benchmarks.plans.published.timing import Timed, time_row
from shardwise.plan.dry_run.recording import (
    ActivationCollective,
    Collective,
    Facts,
    Kernel,
    KernelKind,
    StepPhase,
    UnitMark,
    Wait,
)
from shardwise.plan.dry_run.step import record
from shardwise.plan.hardware.devices import device_names, find_device, find_interconnect
from shardwise.plan.hardware.host import usual_host
from shardwise.plan.simulate.network import Cluster
from shardwise.plan.simulate.roofline import Efficiency, Roofline
from shardwise.plan.simulate.simulation import simulate
from shardwise.policy.adapters import Adapters

FACTS = Facts(**{field.name: 0 for field in fields(Facts)})
ROWS = {row.name: row for row in read()}


def test_float8_rows_are_scored_apart(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row for row in ROWS.values() if row.scored_apart("throughput")]
    assert {row.source for row in rows} == {"foundry", "thunder", "torchao", "torchtitan"}
    assert not any(row.scored("throughput") for row in rows)
    assert {row.job.float8 for row in rows} == {"compute", "gathers"}
    assert ROWS["thunder-010"].job.float8 == "gathers"
    assert ROWS["torchtitan-003"].job.float8 == "compute"
    assert ROWS["torchtitan-004"].job.float8 is None
    memory = Memory(peak=30 * GIB, reserved=40 * GIB, outside=0, usable=80 * GIB)
    row = ROWS["torchtitan-003"]
    twice = Timed(row.job.tokens_per_rank / (2 * row.published["tokens_per_s_per_gpu"]), 0.0)
    shown = "\n".join(float8_lines([Forecasted(row, Steps(FACTS, memory, (), None), twice)]))
    assert "+100.0%" in shown
    assert "throughput: median error 100.0%" in shown
    assert metric_lines([Forecasted(row, Steps(FACTS, memory, (), None), twice)], "throughput")[1] == []


def scored(source: str, forecast: float, published: float = 100.0) -> Scored:
    return Scored(source, f"{source}-1", published, forecast)


def test_every_published_row_can_be_asked_for() -> None:
    assert len(ROWS) == sum(bool(line.strip()) for line in DATA.read_text().splitlines()) == 184
    assert {row.job.gpu for row in ROWS.values()} <= set(device_names())


def test_rows_beside_tensor_parallelism() -> None:
    """torchtitan's plan: sequences are cut between blocks; each part of a block gathers them and scatters its sum."""
    rows = read(DATA.with_name("tensor_parallel.jsonl"))
    assert [row.job.mesh for row in rows] == [
        {"dp_replicate": 1, "dp_shard": shards, "cp": 1, "tp": 8, "ep": 1} for shards in (32, 8, 16)
    ]
    assert all(row.scored("throughput") and row.job.engine == "fsdp2" for row in rows)
    shape = LlamaShape(layers=2, width=32, heads=4, kv_heads=2, hidden=48, vocab=96, seq_len=16)
    job = PublishedJob(gpu="cpu", gpus_per_node=2, tp=2, seq_len=16, units={Block})
    recording = record(partial(cut_llama, shape), job)
    sent = [e.op for e in recording.events if isinstance(e, ActivationCollective) and e.phase is StepPhase.FORWARD]
    around = ["all_gather", "reduce_scatter"]
    assert sent == ["reduce_scatter", *around * 4, "all_gather"]
    assert recording.facts.sequence == 16
    assert recording.facts.params == sum(p.numel() for p in cut_llama(shape).parameters())


def test_whole_activations_beside_tensor_parallelism() -> None:
    """Without sequence parallelism each part of a block sums what it returns, and in backward what it was given, once
    for each layer that is cut by columns."""
    shape = LlamaShape(layers=2, width=32, heads=4, kv_heads=2, hidden=48, vocab=96, seq_len=16)
    job = PublishedJob(gpu="cpu", gpus_per_node=2, tp=2, seq_len=16, units={Block})
    recording = record(partial(cut_llama, shape, along_sequence=False), job)
    sent = [e for e in recording.events if isinstance(e, ActivationCollective)]
    assert {e.op for e in sent} == {"all_reduce"}
    assert sum(e.phase is StepPhase.FORWARD for e in sent) == 1 + 2 * 2
    assert sum(e.phase is StepPhase.BACKWARD for e in sent) == 1 + 2 * 5


def test_rows_beside_context_parallelism() -> None:
    """Ranks that share a sequence shard the model with the others; float8 is scored apart."""
    rows = read(DATA.with_name("context_parallel.jsonl"))
    assert [row.job.mesh["cp"] for row in rows] == [1, 2, 4, 8]
    assert all(row.job.shard_ranks == 8 and row.job.slice_len == 32768 for row in rows)
    assert all(row.scored_apart(metric) for row in rows for metric in ("throughput", "memory"))


def test_rows_of_automodel() -> None:
    """Both axes beside sharding, and adapters; what is published agrees with the settings of its recipes."""
    rows = read(DATA.with_name("automodel.jsonl"))
    axes = [(row.job.mesh["dp_shard"], row.job.cp, row.job.tp) for row in rows]
    assert axes == [(32, 2, 1), (4, 1, 2), (8, 1, 2), (4, 1, 2), (8, 1, 2)]
    for row in rows:
        published, job = row.published, row.job
        assert row.scored("throughput")
        assert (job.engine, job.gpu, job.precision.master) == ("fsdp2", "h100-sxm-80gb", "bfloat16")
        assert published["global_batch"] == job.data_ranks * job.micro_batch * job.accumulation
        tokens = published["global_batch"] * published["seq_len"]
        speed = tokens / published["step_time_s"] / published["n_gpus"]
        assert speed == pytest.approx(published["tokens_per_s_per_gpu"], rel=1e-3)


def test_adapters_beside_tensor_parallelism() -> None:
    """As of rows with a `lora_rank`: all linear layers of a block, but no head, have them; only they are trained."""
    pytest.importorskip("peft")
    shape = LlamaShape(layers=2, width=32, heads=4, kv_heads=2, hidden=48, vocab=96, seq_len=16)
    adapters = Adapters(4, ADAPTED)
    job = PublishedJob(gpu="cpu", gpus_per_node=2, tp=2, seq_len=16, units={Block}, lora=adapters)
    recording = record(partial(adapted_model, partial(cut_llama, shape), adapters, job.compute_dtype, job.tp), job)
    ends = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (48, 32), (32, 48)]
    assert recording.facts.trainable == 2 * sum(4 * (rows + columns) for rows, columns in ends)
    base = sum(p.numel() for p in cut_llama(shape).parameters())
    assert recording.facts.params == base + recording.facts.trainable


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fms-fsdp-002", {"strategy": "hybrid_shard", "shard_group": 8, "nodes": 12, "interconnect": "800gbps"}),
        ("fms-fsdp-015", {"strategy": "full_shard", "engine": "fsdp1", "interconnect": "400gbps"}),
        ("foundry-083", {"engine": "fsdp1", "loss": "fused", "accumulation": 21, "gpu": "a100-sxm-80gb"}),
        ("thunder-003", {"strategy": "shard_grad_op", "engine": "fsdp2"}),
        ("thunder-002", {"engine": "fsdp1", "compile": True}),
        ("torchtitan-046", {"engine": "fsdp1", "activation_checkpointing": "selective-ops"}),
        ("torchtitan-037", {"engine": "fsdp2", "activation_checkpointing": "every-2"}),
        ("torchao-001", {"gpu": "h100-sxm-96gb-500w", "segments": "expandable", "loss": "model"}),
        ("torchao-004", {"gpu": "mi300x", "segments": "fixed", "loss": "fused"}),
        ("torchao-013", {"segments": "expandable", "loss": "fused"}),
        ("torchtitan-001", {"segments": "fixed", "loss": "model"}),
        ("ds-bf16mw-002", {"engine": "deepspeed", "gpus_per_node": 1, "nodes": 1}),
    ],
)
def test_rows_become_jobs_by_the_rules(name: str, expected: dict[str, object]) -> None:
    job = ROWS[name].job
    found = {key: getattr(job, key) for key in expected}
    assert {key: getattr(value, "value", value) for key, value in found.items()} == expected


@pytest.mark.slow
def test_embeddings_and_head_are_units_of_their_own_in_torchtitan_since_the_summer_of_2025() -> None:
    late, early = (record(ROWS[name].build, ROWS[name].job).facts.unit_bytes for name in ("torchao-013", "torchao-001"))
    assert {"tok_embeddings", "output"} == late.keys() - early.keys()
    assert late["tok_embeddings"] == late["output"] == 2 * 128256 * 4096
    assert early[""] > 2 * late["output"] > 100 * late[""]


def test_precisions_by_the_rules() -> None:
    assert ROWS["foundry-037"].job.precision.reduce == "float32"
    assert ROWS["foundry-146"].job.precision.reduce == "bfloat16"
    assert ROWS["thunder-003"].job.precision.master == "bfloat16"


def test_rows_that_say_too_little_are_told_and_the_others_forecast(tmp_path: Path) -> None:
    good = json.loads(DATA.read_text().splitlines()[0])
    silent = {key: value for key, value in good.items() if key != "seq_len"}
    rows = [good, {**silent, "id": "silent"}, {**good, "id": "odd", "gpu": "V100"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {**good, "id": "open", "act_ckpt": None}]))
    found, failed = read_what_can_be(path)
    assert [row.name for row in found] == [good["id"], "open"]
    assert found[1].reasons == ("what recomputes is not stated",)
    assert failed == [
        "silent: the row does not say 'seq_len'",
        "odd: gpu 'V100' is not among the hardware data",
    ]


def test_runs_that_did_not_fit_are_mapped() -> None:
    rows = {row.name: row for row in read(OUT_OF_MEMORY)}
    assert len(rows) >= 10
    assert all(row.published["url"].startswith("https://") for row in rows.values())
    whole, half = rows["hf-fsdp-2"].job, rows["hf-fsdp-3"].job
    assert (whole.strategy.value, whole.world_size, whole.precision.param) == ("no_shard", 2, "float32")
    assert (half.precision.param, half.precision.reduce) == ("float16", "float32")


@pytest.mark.slow
def test_a_run_that_did_not_fit_is_forecast_not_to(tmp_path: Path) -> None:
    """GPT-2 XL with DDP on 24 GB: 16 bytes of states for each of 1.56e9 parameters, and DDP's buckets."""
    row = next(row for row in read(OUT_OF_MEMORY) if row.name == "hf-fsdp-2")
    steps = steps_of(row, tmp_path)
    lines, (target,) = out_of_memory_lines([Forecasted(row, steps, Timed(1.0, 0.0))])
    assert target.passed
    assert lines[-1].startswith("| hf-fsdp-2 | GPT-2 XL | 2 x rtx-4090, DDP | 23.65 |")
    assert steps.memory.peak > 20 * row.published["params"]
    roomy = Row({**row.published, "usable_gib": 40.0}, row.build, row.job)
    (missed,) = out_of_memory_lines([Forecasted(roomy, steps, Timed(1.0, 0.0))])[1]
    assert not missed.passed
    assert steps_of(row, tmp_path) == steps, "the second time it comes from the recording that is kept"
    assert len(list(tmp_path.glob("*.recording"))) == 1


@pytest.mark.slow
def test_rows_are_forecast_whatever_processes_end_meanwhile(tmp_path: Path) -> None:
    """`concurrent.futures` stands still here (Python 3.11): its pool forgets to replace processes that are done."""
    row = ROWS["foundry-216"]
    forecasts, failed = forecast_rows([row] * 3, tmp_path, workers=1, rows_per_process=1)
    assert [f.row.name for f in forecasts] == ["foundry-216"] * 3
    assert not failed


def test_what_is_scored_and_what_is_not() -> None:
    counts = {metric: sum(row.scored(metric) for row in ROWS.values()) for metric in ("throughput", "memory")}
    assert counts == {"throughput": 148, "memory": 24}
    why = {
        name: ROWS[name].reasons for name in ("torchao-003", "torchao-008", "xtuner-001", "thunder-005", "jax-gpu-001")
    }
    assert why == {
        "torchao-003": ("float8",),
        "torchao-008": ("power limited",),
        "xtuner-001": ("unknown ZeRO stage",),
        "thunder-005": ("tier C",),
        "jax-gpu-001": ("JAX",),
    }
    assert ROWS["thunder-003"].memory_metric == "allocated"
    assert ROWS["torchtitan-053"].memory_metric == "reserved"
    assert ROWS["thunder-015"].memory_metric is None


def test_a_row_never_seen_before_is_mapped(tmp_path: Path) -> None:
    hidden = {
        **json.loads(DATA.read_text().splitlines()[0]),
        "id": "new-1",
        "source_key": "new",
        "model": "Llama-2-7B",
        "strategy": "DDP",
        "gpu": "H200-SXM-141GB",
        "precision": "bf16 mixed",
        "usable_for": ["throughput"],
        "n_gpus": 16,
        "gpus_per_node": 8,
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(hidden) + "\n\n")
    (row,) = read(path)
    assert (row.job.strategy.value, row.job.nodes, row.job.gpu) == ("no_shard", 2, "h200-sxm")
    assert row == row_of(hidden) or row.inputs == row_of(hidden).inputs


def test_the_headline_is_a_median_over_sources_of_medians() -> None:
    rows = [scored("a", 110), scored("a", 120), scored("a", 300), scored("b", 99), scored("b", 98), scored("b", 97)]
    assert headline(rows) == pytest.approx((0.2 + 0.02) / 2)
    assert headline([*rows, scored("c", 500), scored("c", 500)]) == pytest.approx(0.11)  # two rows have no say
    assert headline(rows[:2]) is None


def test_sources_weigh_the_same_in_the_percentile() -> None:
    many = [scored("a", 101) for _ in range(97)] + [scored("b", 150), scored("b", 120), scored("b", 110)]
    assert percentile(many, 0.5) == pytest.approx(0.01)
    assert percentile(many, 0.8) == pytest.approx(0.2)
    assert percentile(many, 0.9) == pytest.approx(0.5)


def test_rows_of_equal_inputs_merge_to_their_median() -> None:
    rows = [(("x",), Scored("a", "a-1", 100, 99)), (("x",), Scored("a", "a-2", 120, 99)), (("y",), scored("a", 1))]
    merged = merge(rows)
    assert [(row.name, row.published, row.merged) for row in merged] == [("a-1+2", 110, 2), ("a-1", 100, 1)]
    assert merged[0].spread == pytest.approx(20 / 110)
    inputs = [ROWS[name].inputs for name in ("thunder-015", "thunder-016")]
    assert inputs[0] == inputs[1]  # the same run with and without a compiler setting that rows do not have a field for


def test_quantiles() -> None:
    assert quantiles([3, 1, 2, 4], (0.1, 0.5, 0.75, 1.0)) == [1, 2, 3, 4]


def test_bundles_take_as_long_as_their_kernels() -> None:
    hardware = find_device("a100-sxm-80gb")
    product = Kernel(
        "mm", KernelKind.MATMUL, 2 * 4096**3, 6 * 4096**2, "bf16", (1, 4096, 4096, 4096), "a", StepPhase.FORWARD
    )
    small = Kernel("add", KernelKind.MEMORY, 0, 10**9, "bf16", None, "b", StepPhase.FORWARD)
    gather = Collective(1, "all_gather", "shard", 10**9, 8, "u", StepPhase.FORWARD)
    mark = UnitMark("gather", "u", StepPhase.FORWARD)
    events = [
        product,
        small,
        product,
        gather,
        small,
        mark,
        small,
        Wait(1),
        product,
        UnitMark("release", "u", StepPhase.FORWARD),
    ]
    short = bundled(events)
    assert len(short) == 6
    cluster = Cluster(hardware, find_interconnect("8x200gbps"), 8, 1)
    whole = simulate(events, Roofline(hardware), cluster)
    told = simulate(short, BundleRoofline(hardware), cluster)
    roofline = Roofline(hardware)
    wave_s = roofline.wave_s(product, roofline.seconds(product))
    handed_out_s = len(events) * usual_host().operation_s.value
    assert told.step_time_s == pytest.approx(whole.step_time_s, abs=wave_s + handed_out_s)
    assert told.flops == whole.flops


def test_a_row_names_itself() -> None:
    row = ROWS["foundry-037"]
    assert isinstance(row, Row)
    assert (row.name, row.source, row.attention) == ("foundry-037", "foundry", "flash1")


def forecasted(name: str, step_s: float, memory: Memory) -> Forecasted:
    return Forecasted(ROWS[name], Steps(FACTS, memory, (), None), Timed(step_s, 0.0))


def test_what_the_benchmark_prints_of_forecasts() -> None:
    full, half = Memory(60 * GIB, 79 * GIB, GIB, 79 * GIB), Memory(20 * GIB, 30 * GIB, GIB, 79 * GIB)
    speeds = {
        name: ROWS[name].published["tokens_per_s_per_gpu"] for name in ("foundry-083", "foundry-088", "foundry-100")
    }
    exact = {name: ROWS[name].job.tokens_per_rank / speed for name, speed in speeds.items()}
    forecasts = [
        forecasted("foundry-083", exact["foundry-083"] / 1.02, half),
        forecasted("foundry-088", exact["foundry-088"] * 1.25, half),
        forecasted("foundry-100", exact["foundry-100"] / 2, full),
        forecasted("torchao-008", 1.0, half),
    ]
    lines, targets = metric_lines(forecasts, "throughput")
    assert "| foundry | 3 | 20.0% | 100.0% | +2.0% |" in lines
    assert [round(target.value, 6) for target in targets] == [0.2, 1.0]
    lines, (target,) = feasibility_lines(forecasts)
    assert lines[0] == "feasibility: 3 runs that ran, 2 forecast to fit (66.7%)"
    assert lines[-1] == "forecast not to fit: foundry-100 1.01"
    assert not target.passed
    assert any(
        line.startswith("torchao-008 (power limited); tokens/s 8,308, forecast 8,192; GiB")
        for line in unscored_lines(forecasts)
    )
    assert metric_lines(forecasts, "memory") == (["memory: no scored rows"], [])


def test_a_step_of_two_micro_batches_tells_a_step_of_one() -> None:
    def kernel(name: str, phase: StepPhase) -> Kernel:
        return Kernel(name, KernelKind.MEMORY, 0, 1, "bf16", None, "", phase)

    first = (
        kernel("a", StepPhase.FORWARD),
        Wait(1),
        kernel("b", StepPhase.BACKWARD),
        kernel("c", StepPhase.RECOMPUTE),
        Wait(2),
    )
    second = (kernel("d", StepPhase.FORWARD), kernel("e", StepPhase.BACKWARD), Wait(3))
    last = (kernel("f", StepPhase.OPTIMIZER), Wait(4))
    assert without_second((*first, *second, *last)) == (*first, *last)


def test_accumulation_repeats_the_second_micro_batch() -> None:
    row = ROWS["foundry-083"]
    kernel = Kernel("add", KernelKind.MEMORY, 0, 10**12, "bf16", None, "", StepPhase.FORWARD)
    steps = Steps(FACTS, Memory(0, 0, 0, 1), (kernel,), (kernel, kernel))
    one = time_row(row, Steps(FACTS, Memory(0, 0, 0, 1), (kernel,), None)).step_s
    assert time_row(row, steps).step_s == pytest.approx(one * row.job.accumulation, rel=1e-3)


def test_constants_are_chosen_by_all_sources_or_all_but_one() -> None:
    """Rows made with known constants of the grid give them back; a source left out has no say."""
    product = Kernel("mm", KernelKind.MATMUL, 2 * 8192**3, 0, "bf16", (1, 8192, 8192, 8192), "", StepPhase.FORWARD)
    steps = Steps(FACTS, Memory(0, 0, 0, 1), (product,) * 50, None)
    cases = []
    for name, matmul in (("foundry-146", 0.75), ("torchtitan-037", 0.95), ("fms-fsdp-015", 0.95)):
        row = ROWS[name]
        speed = time_row(row, steps, Efficiency(matmul=matmul)).tokens_per_s(row)
        cases.append(Case(row, steps, speed))
    choice = Choice(cases)
    assert choice.best().matmul == 0.95
    assert Choice(cases[:2]).best(without="torchtitan").matmul == 0.75
