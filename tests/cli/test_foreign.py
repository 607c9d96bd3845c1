"""`shardwise convert ds_config.json`, `shardwise plan --from`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cli.app import run
from shardwise.cli.foreign import with_settings
from shardwise.cli.plan import Options, _question
from shardwise.errors import ConfigError
from shardwise.train.config.files import load
from shardwise.train.run.preflight import check
from tests.foreign.rig import AUTO, DEEPSPEED, FSDP1


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(DEEPSPEED))
    (tmp_path / "auto.json").write_text(json.dumps(AUTO))
    (tmp_path / "accelerate.yaml").write_text(FSDP1)
    monkeypatch.chdir(tmp_path)


def test_a_configuration_that_trains(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", "ds_config.json", "out.toml"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("out.toml: a shardwise configuration, from DeepSpeed: ds_config.json\n")
    assert "To set: model.path, data.source.\n" in out
    config = load("out.toml")
    assert (config.train.lr, config.train.steps, config.train.global_batch, config.log.every) == (3e-5, 5000, 64, 100)
    assert (config.parallel.strategy, config.parallel.param_dtype) == ("full_shard", "bf16")
    with pytest.raises(ConfigError, match=r"^model\.path is not set: set it to the model"):
        check(config, 0)
    Path("config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"^data\.source is not set"):
        check(load("out.toml", ["model.path=config.json", "model.weights=random"]), 0)
    Path("text.txt").write_text("words " * 40_000)
    check(load("out.toml", ["model.path=config.json", "model.weights=random", "data.source=text.txt"]), 0)
    assert run(["convert", "ds_config.json", "out.toml"]) == 2
    assert capsys.readouterr().err == "error: out.toml exists already: name another file, or remove it\n"


def test_on_standard_output_with_the_notes_as_comments(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", "auto.json"]) == 0
    text = capsys.readouterr().out
    Path("out.toml").write_text(text)
    assert load("out.toml").parallel.strategy == "shard_grad_op"
    assert load("out.toml").offload.optimizer == "cpu"
    assert "# To set: model.path, data.source, train.steps.\n" in text
    assert "# Different: optimizer steps run on the device" in text
    assert "# Left to the program there (auto), and to our defaults here: " in text
    assert run(["convert", "accelerate.yaml"]) == 0
    assert 'units = ["LlamaDecoderLayer", "LlamaMLP"]' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convert", "ds_confg.json"], "ds_confg.json: no such file; did you mean ds_config.json?"),
        (["convert", "ds_config.json", "no/such/out.toml"], "no/such/out.toml cannot be written: No such file"),
        (["convert", "ds_config.json", "--to", "hf"], "--to is for checkpoints, but ds_config.json is a configuration"),
        (["convert", "ds_config.json", "--max-file-bytes", "5"], "--max-file-bytes is for checkpoints"),
        (["convert", "step-100"], "TARGET is missing: shardwise convert step-100 TARGET"),
        (["plan", "llama-3-8b", "--from", "ds_confg.json"], "ds_confg.json: no such file"),
    ],
)
def test_mistakes(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_a_plan_of_what_they_have_now(capsys: pytest.CaptureFixture[str]) -> None:
    options = with_settings(Options(model="llama-3-8b", foreign=Path("accelerate.yaml"), micro_batch="2"))
    arguments = _question(options).arguments
    assert (arguments["strategy"], arguments["gpus_per_node"], arguments["nodes"]) == (["shard_grad_op"], 8, 2)
    assert (arguments["activation_checkpointing"], arguments["micro_batch"]) == (["full"], [2])
    assert arguments["precision"][0].param == "bfloat16"
    told = capsys.readouterr().err
    assert told.startswith("accelerate.yaml (Accelerate): strategy shard_grad_op")
    options = with_settings(Options(model="llama-3-8b", foreign=Path("ds_config.json"), strategy="no_shard", gpus=16))
    question = _question(options)
    assert question.arguments["strategy"] == ["no_shard"]  # the command line's
    assert (question.arguments["micro_batch"], question.global_batch) == ([4], 64)
    assert with_settings(Options(model="x")) == Options(model="x")


def test_the_command_line_wins() -> None:
    def asked(**given: object) -> Options:
        return with_settings(Options(model="llama-3-8b", **given))  # type: ignore[arg-type]

    options = asked(foreign=Path("accelerate.yaml"), gpus=8, nodes=1)  # the usual, but given
    assert (options.gpus, options.nodes) == (8, 1)
    Path("ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 3, "mics_shard_size": 4}, "gradient_accumulation_steps": 4})
    )
    file = Path("ds.json")
    assert (asked(foreign=file).accumulation, asked(foreign=file).shard_group) == ("4", "4")
    assert asked(foreign=file, global_batch=128).accumulation is None
    assert asked(foreign=file, strategy="full_shard").shard_group is None
    assert asked(foreign=file, compare="ddp,fsdp2").strategy is None


def test_offload_to_the_host_is_planned_with() -> None:
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}))
    options = Options(model="llama-3-8b", foreign=Path("ds.json"))
    assert with_settings(options).offload == "optimizer=cpu,gradients=cpu"
    for change in ({"offload": "none"}, {"compare": "ddp,fsdp2"}, {"engine": "fsdp2"}):
        assert with_settings(replace(options, **change)).offload == change.get("offload")  # type: ignore[arg-type]


def test_offload_to_disk_is_planned_with() -> None:
    part = {"device": "nvme", "nvme_path": "/local"}
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_param": part}}))
    assert with_settings(Options(model="llama-3-8b", foreign=Path("ds.json"))).offload == "params=nvme"


RUN = """
[model]
path = "llama-3-8b"
dtype = "bf16"
[data]
seq_len = 1024
[train]
steps = 10
micro_batch = 2
optimizer_in_backward = true
clip = 0
activation_checkpointing = "offload"
[parallel]
ranks = 4
strategy = "hybrid_shard"
shard_group = 2
[offload]
params = "cpu"
"""


def test_a_configuration_to_train_with_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(RUN)
    question = _question(with_settings(Options(foreign=Path("run.toml"), micro_batch="4")))
    arguments = {name: value for name, value in question.arguments.items() if value is not None}
    told = capsys.readouterr().err
    assert told.startswith("run.toml (shardwise): model llama-3-8b, gpus 4, precision bf16/fp32/bf16, strategy hybrid_")
    assert ", shard-group 2, " in told
    assert told.endswith("optimizer adamw, optimizer-in-backward, offload params=cpu\n")
    assert question.model == "llama-3-8b"
    assert (arguments["optimizer_in_backward"], arguments["offload"]) == (True, "params=cpu")
    assert (arguments["micro_batch"], arguments["seq_len"], arguments["shard_group"]) == ([4], [1024], [2])
    assert arguments["activation_checkpointing"] == ["offload"]
    [precision] = arguments["precision"]
    assert (precision.param, precision.reduce, precision.master) == ("bfloat16", "float32", "bfloat16")
    other = with_settings(Options(foreign=Path("run.toml"), compare="ddp,fsdp2"))
    assert (other.optimizer_in_backward, other.offload, other.strategy) == (False, None, None)
    Path("run.toml").write_text(RUN.replace("clip = 0", "clip = 1.0"))
    assert run(["plan", "--from", "run.toml"]) == 2
    assert "the norm of all gradients is known only after the last gradient" in capsys.readouterr().err
    Path("run.toml").write_text(RUN.replace("[parallel]", '[parallel]\nbackend = "jax"'))
    with pytest.raises(ConfigError, match="is planned only with shardwise plan --backend jax"):
        with_settings(Options(foreign=Path("run.toml")))


def test_transformers_distributed_config_is_converted_and_planned(capsys: pytest.CaptureFixture[str]) -> None:
    Path("distributed.json").write_text(json.dumps({"fsdp_size": 4, "dp_replicate_size": 2, "tp_size": 1}))
    assert run(["convert", "distributed.json", "out.toml"]) == 0
    assert "out.toml: a shardwise configuration, from transformers: distributed.json" in capsys.readouterr().out
    parallel = load("out.toml").parallel
    assert (parallel.strategy, parallel.shard_group, parallel.ranks) == ("hybrid_shard", 4, 8)
    found = with_settings(Options(foreign=Path("distributed.json")))
    assert (found.strategy, found.shard_group, found.gpus) == ("hybrid_shard", "4", 8)
    Path("distributed.json").write_text(json.dumps({"fsdp_size": 4, "tp_size": 2}))
    assert run(["convert", "distributed.json", "tensor.toml"]) == 0
    parallel = load("tensor.toml").parallel
    assert (parallel.strategy, parallel.tp, parallel.ranks) == ("full_shard", 2, 8)
    found = with_settings(Options(foreign=Path("distributed.json")))
    assert (found.strategy, found.tp, found.gpus) == ("full_shard", "2", 8)
