"""How much of a step's communication a GPU would wait for, ours beside FSDP2's order, in one simulation. No GPU needed.

    python benchmarks exposed                       # Llama-3 8B, micro-batch 1 x 8192, bf16, 8 and 64 H100s
    python benchmarks exposed --model llama-2-7b --gpus 8 16

Both engines' steps are recorded from ours (the same kernels and bytes) and put on streams by the planner's simulation,
with the parameters that it has for everybody (`plan/simulate`, `plan/hardware/data/host.toml`). FSDP2's order, copies
and waits are those of its published code (`plan/simulate/other_engines/fsdp2.py`). Nothing here was measured on a GPU.

- exposed: the device stands still because a collective is not over; late: because the host has not handed out what
  comes next; idle: in all.
- copies: kernels on the stream that computes which only sharding needs: parameters out of a gather's buffer, gradients
  into a reduction's. They hide gathers and reductions that are under way, and cost their time all the same, so the
  sum is told too.

Where each stands still, and what changes of order would gain: `exposed_changes.py`.

Target: ours not above FSDP2's in any row, in exposed communication and in idle time.
"""

import argparse
from dataclasses import replace

import shardwise as sw
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.step import record
from shardwise.plan.models.source import resolve
from shardwise.plan.simulate.forecast import forecast_of
from shardwise.plan.simulate.timeline import COMPUTE, Timeline

ENGINES = ("shardwise", "fsdp2")
GPUS_PER_NODE = 8


COPIES = {"_foreach_copy_", "chunk_cat_", "copy_out_"}
HEADER = (
    "GPUs",
    "recompute",
    "engine",
    "step, ms",
    "exposed",
    "late",
    "idle",
    "of the step",
    "copies",
    "idle and copies",
)


def copies_s(timeline: Timeline) -> float:
    """Seconds of what only sharding computes."""
    return sum(span.seconds for span in timeline.spans if span.stream == COMPUTE and span.name in COPIES)


def cells(timeline: Timeline) -> list[str]:
    """A row's figures, in milliseconds."""
    step_s, idle_s, copying_s = timeline.step_time_s, timeline.idle_s, copies_s(timeline)
    inside = [f"{seconds * 1e3:.2f}" for seconds in (timeline.exposed_comm_s, timeline.late_s, idle_s)]
    return [
        f"{step_s * 1e3:.1f}",
        *inside,
        f"{idle_s / step_s:.2%}",
        f"{copying_s * 1e3:.1f}",
        f"{(idle_s + copying_s) * 1e3:.1f}",
    ]


def job_of(gpu: str, gpus: int, seq_len: int, recompute: str = "none") -> Job:
    """Whole nodes of `gpus` GPUs in all, one sequence on each."""
    return Job(
        gpu=gpu,
        gpus_per_node=min(gpus, GPUS_PER_NODE),
        nodes=max(1, gpus // GPUS_PER_NODE),
        micro_batch=1,
        seq_len=seq_len,
        precision=sw.Precision(param="bf16", reduce="fp32"),
        activation_checkpointing=recompute,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", help="(%(default)s)")
    parser.add_argument("--gpu", default="h100-sxm-80gb", help="(%(default)s)")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64], help="(%(default)s)")
    parser.add_argument("--seq-len", type=int, default=8192, help="(%(default)s)")
    options = parser.parse_args()
    if any(gpus % min(gpus, GPUS_PER_NODE) for gpus in options.gpus):
        parser.error(f"--gpus: whole nodes of {GPUS_PER_NODE}")
    missed = []
    print(f"| {' | '.join(HEADER)} |\n|---:|---|---|{'---:|' * (len(HEADER) - 3)}")
    source = resolve(options.model)
    for gpus in options.gpus:
        for recompute in ("none", "full"):
            job = job_of(options.gpu, gpus, options.seq_len, recompute)
            recording = record(source.builder(job.attention), job)
            steps = []
            for engine in ENGINES:
                steps.append(forecast_of(replace(recording, job=replace(job, engine=engine))).timeline)
                print(f"| {' | '.join([str(gpus), recompute, engine, *cells(steps[-1])])} |", flush=True)
            ours, theirs = steps
            if ours.exposed_comm_s > theirs.exposed_comm_s or ours.idle_s > theirs.idle_s:
                missed.append(f"{gpus} GPUs, recompute {recompute}")
    print(f"ours not above FSDP2's: {'MISSED at ' + '; '.join(missed) if missed else 'met in every row'}")
    return bool(missed)
