"""From a plan to a run: the training configuration for a planned job."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shardwise.errors import ConfigError, PlanError
from shardwise.plan.dry_run.job import Job
from shardwise.plan.models.source import ModelSource
from shardwise.plan.models.transformers_models import complete_config, model_and_config
from shardwise.policy.precision import short_dtype_name
from shardwise.policy.settings import RUN, tree_of
from shardwise.train.config.files import config_of
from shardwise.train.config.schema import RANDOM, UNSET, Config, ModelConfig
from shardwise.train.config.tasks import DEFAULT, KINDS, TaskName, task_of
from shardwise.train.data.model_files import has_weights

STEPS = 1000
"""`train.steps` in a written configuration: a plan does not know the length of training."""
OFFLOAD_PATH = "offload"
"""`offload.path` in a written configuration. Ranks may share it: their files have no names and leave nothing behind."""


def training_config(source: ModelSource, job: Job, name: str) -> Config:
    """Return the configuration that trains a planned job.

    If the model was given as a Hugging Face directory or a name of a hub, training starts from its weights, if it has
    any, and uses its tokenizer, and the user must name the data (`data.source` is "unset"). Any other model starts from
    random weights, on the default data if it is a causal language model.

    Args:
        source: the model, which must have a name.
        job: the job as it was forecast.
        name: the name of the run.

    Raises:
        PlanError: the trainer cannot run the job: it has no task for the model, or the plan is for an engine,
            loss, attention or optimizer that the trainer does not have.
    """
    check_model(source)
    _check_job(job)
    if job.attention != source.attention:
        raise PlanError(
            f"`shardwise train` uses the fastest attention that the model has, {source.attention}, not "
            f"{job.attention}: plan without --attention, or train with sw.shard in a script of your own"
        )
    precision = job.precision
    master = short_dtype_name(precision.master or "float32")
    if job.lora:
        master = job.lora.dtype or job.compute_dtype
    units = job.units if isinstance(job.units, int) else job.units_by_name
    tree = tree_of({**{one: getattr(job, one) for one in RUN}, "units": units})
    tree |= {
        "model": {**source.model_section(), **_weights(source), **_named_task(source), "dtype": master},
        "log": {"name": name},
        **_offload(job),
        **_lora(job),
    }
    tree["data"] |= _data(source)
    tree["train"] |= {"steps": STEPS, "global_batch": job.micro_batch * job.accumulation * job.data_ranks}
    if job.optimizer_in_backward:
        tree["train"]["clip"] = 0.0
    tree["parallel"] |= {
        "ranks": job.gpus_per_node,
        "param_dtype": short_dtype_name(precision.param or precision.master or "float32"),
        "reduce_dtype": short_dtype_name(precision.reduce or precision.param or precision.master or "float32"),
    }
    try:
        return config_of(tree, "no training configuration can hold this plan")
    except ConfigError as error:
        raise PlanError(str(error)) from None


def _weights(source: ModelSource) -> dict[str, Any]:
    """Return the key that says that a model which has no weights starts from random ones."""
    directory = None if source.path is None else ModelConfig(path=source.path).directory
    return {} if directory is None or has_weights(directory) else {"weights": RANDOM}


def _named_task(source: ModelSource) -> dict[str, Any]:
    task = DEFAULT if source.config is None else _task(source)
    return {} if task == DEFAULT else {"task": task}


def _data(source: ModelSource) -> dict[str, Any]:
    is_file = source.path is None or source.path.endswith(".json")
    return {} if is_file and not _named_task(source) else {"source": UNSET}


def check_model(source: ModelSource) -> None:
    """Raise PlanError for a transformers model that the trainer has no task for."""
    if source.config is not None and _task(source) is None:
        raise PlanError(
            f"{source.title}: `shardwise train` has no task for it (it has {', '.join(KINDS)}); plan it without "
            "--config and train it with sw.shard in a script of your own"
        )


def _task(source: ModelSource) -> TaskName | None:
    """Return the task of a source with a transformers configuration; None if the class that is planned is for none."""
    assert source.config is not None
    assert source.description is not None
    if source.description.is_language_model:
        return DEFAULT
    planned, _ = model_and_config(complete_config(source.config))
    return task_of(planned.__name__)


def _offload(job: Job) -> dict[str, Any]:
    if job.offload is None:
        return {}
    path = OFFLOAD_PATH if "nvme" in {job.offload.params, job.offload.optimizer} else None
    places = asdict(job.offload)
    ring_bytes = places.pop("ring_bytes")
    ring_mib = None if ring_bytes is None else max(1, ring_bytes // 2**20)
    return {"offload": {**places, "path": path, "ring_mib": ring_mib}}


def _lora(job: Job) -> dict[str, Any]:
    if job.lora is None:
        return {}
    targets = None if job.lora.targets is None else [*job.lora.targets]
    return {"lora": {"r": job.lora.r, "dropout": job.lora.dropout, "targets": targets, "base": job.precision.frozen}}


def _check_job(job: Job) -> None:
    if job.engine != "shardwise":
        raise PlanError(f"--config writes a configuration for shardwise, but the plan is for engine={job.engine!r}")
    if job.loss != "model":
        raise PlanError(
            f"`shardwise train` uses the model's own loss, not {job.loss!r}: plan without --loss, or train with "
            "sw.shard in a script of your own"
        )
    if job.optimizer not in {"adamw", "adamw-bf16", "adamw-8bit", "muon"}:
        raise PlanError(
            f"`shardwise train` has adamw, adamw-bf16, adamw-8bit and muon, not {job.optimizer}: plan with --optimizer "
            "adamw"
        )
