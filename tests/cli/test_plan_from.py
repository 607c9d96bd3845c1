"""`shardwise plan --from run.toml` plans the run that the file trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwise.cli.foreign import with_settings
from shardwise.cli.plan import Options, _question
from shardwise.errors import ConfigError, PlanError
from shardwise.plan.dry_run.job import Job
from shardwise.plan.models.source import resolve
from shardwise.plan.simulate.forecast import forecast_of, recorded
from shardwise.train.build import compute_dtype
from shardwise.train.build.from_plan import training_config
from shardwise.train.build.job import hardware_here, job_of, source_of
from shardwise.train.build.models import TextShape
from shardwise.train.config.files import load
from shardwise.train.process.ranks import Ranks

RUN = """
[model]
dtype = "{dtype}"
[model.config]
model_type = "llama"
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 4
vocab_size = 320
max_position_embeddings = 128
[data]
seq_len = 64
[train]
steps = 1
micro_batch = 2
[parallel]
ranks = 2
"""
LORA = "[lora]\nr = 4\n"
TEXT = TextShape(320, 256, 64)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(more: str = "", dtype: str = "fp32") -> Path:
    path = Path("run.toml")
    path.write_text(RUN.format(dtype=dtype) + more)
    return path


def trained(path: Path) -> dict[str, int]:
    """Return the memory that the planner forecasts for the run as the trainer describes it."""
    device = torch.device("cpu")
    ranks = Ranks(0, 2, device)
    config, _ = compute_dtype.settle(load(path).for_ranks(2), device, None)
    job = job_of(config, ranks, hardware_here(config, device))
    return dict(forecast_of(recorded(source_of(config, TEXT), job)).memory)


def asked(path: Path) -> Job:
    """Return the job that `shardwise plan --from` asks about."""
    arguments = _question(with_settings(Options(foreign=path, gpu="cpu"))).arguments
    given = {name: value for name, value in arguments.items() if value is not None}
    return Job.of(**{name: value[0] if isinstance(value, list) else value for name, value in given.items()})


def planned(path: Path) -> dict[str, int]:
    """Return the memory that the planner forecasts for the job of `asked`."""
    model = load(path).model.config
    assert model is not None
    return dict(forecast_of(recorded(resolve(model), asked(path))).memory)


@pytest.mark.parametrize(
    ("more", "dtype"),
    [
        (LORA, "fp32"),
        (LORA + 'targets = ["q_proj"]', "fp32"),
        (LORA + "dropout = 0.5", "bf16"),
        (LORA.replace("[lora]", 'param_dtype = "bf16"\n[lora]'), "fp32"),
        ("", "fp32"),
        ('units = ["LlamaMLP"]', "bf16"),
    ],
)
def test_the_plan_is_that_of_the_run(more: str, dtype: str) -> None:
    if LORA in more:
        pytest.importorskip("peft")
    path = written(more, dtype)
    assert planned(path) == trained(path)


def test_the_device_is_the_files_unless_one_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    path = written('hardware = "rtx-4090"')
    options = with_settings(Options(foreign=path))
    assert (options.gpu, options.precision) == ("rtx-4090", "bf16/fp32/fp32")
    assert "gpu rtx-4090, gpus 2" in capsys.readouterr().err
    options = with_settings(Options(foreign=path, gpu="h100-sxm-80gb"))  # the usual, but given
    assert options.gpu == "h100-sxm-80gb"
    options = with_settings(Options(foreign=path, gpu="cpu"))
    assert options.precision == "stored/fp32/fp32"  # as training has it on CPU ranks
    with pytest.raises(PlanError, match="rtx-4091"):
        with_settings(Options(foreign=written('hardware = "rtx-4091"')))


def test_what_was_carried_is_written_into_a_configuration() -> None:
    path = written('units = ["LlamaMLP"]\n[lora]\nr = 4\ntargets = ["q_proj"]\ndropout = 0.5\n')
    model = load(path).model.config
    assert model is not None
    config = training_config(resolve(model), asked(path), "again")
    assert (config.parallel.units, config.model.dtype) == (["LlamaMLP"], "fp32")
    assert config.lora.model_dump(include={"r", "targets", "dropout"}) == load(path).lora.model_dump(
        include={"r", "targets", "dropout"}
    )


def test_axes_go_into_the_configuration() -> None:
    """With the batch of the ranks that have batches of their own."""
    job = Job(gpus_per_node=16, tp=2, cp=2, micro_batch=3, accumulation=2, strategy="shard_grad_op")  # type: ignore[arg-type]
    config = training_config(resolve("llama-3.1-8b"), job, "cut")
    parallel = config.parallel
    assert (parallel.cp, parallel.tp, parallel.ranks, config.train.global_batch) == (2, 2, 16, 3 * 2 * 4)


def test_a_unit_that_the_model_has_not_is_named() -> None:
    with pytest.raises(ConfigError, match=r"units: the model has no module of class 'LlamaMPL'; did you mean LlamaMLP"):
        planned(written('units = ["LlamaMPL"]'))
