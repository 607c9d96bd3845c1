"""`shardwise plan`: what it prints, writes and refuses."""

import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwise.cli.app import run
from shardwise.errors import PlanError
from shardwise.plan import planner
from shardwise.plan.hardware.devices import device_names
from shardwise.plan.models.source import shapes
from shardwise.train import trainer
from shardwise.train.build.models import TextShape, build_model
from shardwise.train.config.files import load

TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 320, "torch_dtype": "bfloat16", "rope_theta": 500000.0,
}  # fmt: skip
FIXED = ["--strategy", "full_shard", "--micro-batch", "2", "--activation-checkpointing", "none", "--seq-len", "64"]
Printed = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    monkeypatch.chdir(tmp_path)


def test_everything_that_can_be_written(capsys: Printed) -> None:
    written = ["--html", "plan.html", "--trace", "step.json", "--config", "run.toml"]
    asked = ["--micro-batch", "1,2", "--strategy", "full_shard,no_shard", "--activation-checkpointing", "none"]
    arguments = ["plan", "config.json", "--gpus", "2", "--seq-len", "64", "--workers", "1", *asked, *written]
    assert run(arguments) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("config.json: ")
    assert "full_shard" in shown.out
    assert "4 configurations: 4 fit." in shown.out
    assert [line for line in shown.err.splitlines() if not line.startswith("planning: ")] == [
        "page: plan.html",
        "timeline: step.json",
        "configuration: run.toml; train with it: shardwise train run.toml",
    ]
    assert "shardwise" not in Path("plan.html").read_text().split("<pre>")[0]
    assert json.loads(Path("step.json").read_text())["traceEvents"]
    assert tomllib.loads(Path("run.toml").read_text())["parallel"]["ranks"] == 2


def test_json_is_the_forecast(capsys: Printed) -> None:
    import shardwise as sw

    asked = ["plan", "config.json", "--gpus", "2", "--precision", "fp32", "--price", "2.5", "--json"]
    assert run([*asked, *FIXED]) == 0
    printed = json.loads(capsys.readouterr().out)
    precision = sw.Precision("fp32", "fp32", "fp32")
    arguments = {"gpus_per_node": 2, "seq_len": 64, "micro_batch": 2, "price_per_hour": 2.5}
    forecast = sw.plan.forecast("config.json", precision=precision, **arguments)
    assert printed["cost"]["per_day"] == 2.5 * 2 * 24
    assert printed == json.loads(json.dumps(forecast.to_dict()))


def test_experts_over_ranks_are_searched_named_and_trained_with(capsys: Printed) -> None:
    mixture = {**TINY, "model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 2}
    Path("config.json").write_text(json.dumps(mixture))
    arguments = ["plan", "config.json", "--gpu", "cpu", "--gpus", "4", "--precision", "fp32", *FIXED]
    assert run([*arguments, "--ep", "2", "--config", "run.toml", "--workers", "1"]) == 0
    shown = capsys.readouterr().out
    assert "4 x cpu, ep 2 (inside a node), 64 tokens per sequence" in shown.replace("\n", " ")
    assert "full_shard ep2" in shown
    assert "experts: routing is balanced" in shown
    assert tomllib.loads(Path("run.toml").read_text())["parallel"]["ep"] == 2
    assert run(["plan", "--from", "run.toml", "--gpu", "cpu", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["job"]["mesh"] == {"dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 1, "ep": 2}
    assert run([*arguments, "--ep", "1,2", "--json", "--workers", "1"]) == 0
    assert {found["ep"] for found in json.loads(capsys.readouterr().out)["search"]["candidates"]} == {1, 2}


def test_the_winner_trains_unchanged(capsys: Printed) -> None:
    """A configuration written for one CPU rank is loaded and run for a step: shape, dtype and batch are as planned."""
    arguments = ["plan", "config.json", "--gpu", "cpu", "--gpus", "1", "--global-batch", "4", "--precision", "bf16"]
    fixed = ["--micro-batch", "2", "--seq-len", "64", "--strategy", "full_shard", "--config", "tiny.toml"]
    assert run([*arguments, *fixed, "--activation-checkpointing", "full", "--slots", "4"]) == 0
    config = load("tiny.toml")
    assert (config.train.micro_batch, config.train.global_batch, config.data.seq_len) == (2, 4, 64)
    assert (config.train.activation_checkpointing, config.parallel.slots) == ("full", 4)
    assert (config.model.dtype, config.parallel.param_dtype, config.parallel.reduce_dtype) == ("fp32", "bf16", "fp32")
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    trainer.run(load("tiny.toml", ["train.steps=1", "data.source=texts/*.txt", "data.eval_fraction=0.0"]))
    row = json.loads(Path("runs/tiny/metrics.jsonl").read_text())
    assert row["tokens"] == 4 * 64
    capsys.readouterr()


def test_a_plan_of_what_does_not_fit_says_so_and_shows_it(capsys: Printed) -> None:
    assert run(["plan", "config.json", "--gpus", "2", "--budget", "600MiB", "--html", "plan.html", *FIXED]) == 2
    shown = capsys.readouterr()
    assert "Left out:" in shown.out
    assert "Nothing fits" in Path("plan.html").read_text()
    error = shown.err.splitlines()[-1]
    assert error.startswith(
        "error: nothing fits 2 x h100-sxm-80gb; the nearest configuration, full_shard with micro-batch 2"
    )
    assert error.endswith("use a smaller micro-batch, activation checkpointing, more GPUs or a GPU with more memory")


def test_a_precision_that_the_gpu_lacks_is_refused(capsys: Printed) -> None:
    assert run(["plan", "config.json", "--gpu", "v100-sxm-16gb"]) == 2
    line = "precision bf16: NVIDIA V100 SXM2 16 GB has no matrix products in bf16; use precision fp16 or fp32"
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {line}"  # perhaps after a line of progress


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["config.json", "--gpu", "t4", "--backend", "jax"],
            "precision bf16: NVIDIA T4 has no matrix products in bf16; use precision fp16 or fp32",
        ),
        (["llama-3-8bb"], "MODEL 'llama-3-8bb' was not found; did you mean llama-3-8b"),
        (["config.json", "--gpu", "h100-sxm-80"], "unknown device 'h100-sxm-80'; did you mean h100-sxm-80gb"),
        (["config.json", "--interconnect", "infinband"], "unknown interconnect 'infinband'"),
        (["config.json", "--global-batch", "12"], "a global batch of 12 is not a multiple of 8 ranks; use 8 or 16"),
        (
            ["config.json", "--micro-batch", "two"],
            "--micro-batch two: must be whole numbers of at least 1, separated by commas",
        ),
        (["config.json", "--strategy", "zero4"], "unknown strategy 'zero4'; did you mean 'zero3'? must be one of"),
        (
            ["config.json", "--offload", "disk"],
            "offload='disk': must be params=PLACE, optimizer=PLACE, gradients=PLACE, step=PLACE, or",
        ),
        (["config.json", "--offload", "params=disk"], "offload.params='disk': must be None, 'cpu' or 'nvme'"),
        (
            ["config.json", "--offload", "cpu", "--optimizer", "muon"],
            "offload='params=cpu,optimizer=cpu' with",
        ),
        (
            ["config.json", "--offload", "cpu", "--engine", "fsdp2"],
            "offload='params=cpu,optimizer=cpu' is",
        ),
        (["config.json", "--precision", "fp8"], "precision.param = 'fp8': must be one of the dtypes"),
        (["config.json", "--compare", "ddp,zero"], "cannot compare 'zero': must be one of ddp, fsdp2, shardwise"),
        (["config.json", "--base", "nf4"], "--base nf4 needs a frozen base: add --lora 16, or leave --base out"),
        (
            ["config.json", "--lora", "8", "--base", "nf"],
            "precision.frozen = 'nf': must be one of nf4, int8; did you mean",
        ),
        (["config.json", "--budget", "lots"], "--budget lots: must be an amount of memory, such as 70GiB"),
        (
            ["config.json", "--objective", "speed"],
            "objective='speed': must be one of tokens_per_s, memory, micro_batch",
        ),
        (
            ["config.json", "--optimizer", ","],
            "--optimizer ',' has no values: give one or several, separated by commas",
        ),
        (["config.json", "--activation-checkpointing", ""], "--activation-checkpointing '' has no values"),
        (["config.json", "--precision", ","], "--precision ',' has no values"),
        (["config.json", "--global-batch", "-3"], "--global-batch -3: must be a whole number of at least 1"),
        (["config.json", "--units", "0"], "--units 0: must be a whole number of at least 1"),
        (["config.json", "--workers", "-1"], "--workers -1: must be a whole number of at least 1"),
        (["config.json", "--quick", "--thorough"], "--quick and --thorough cannot be combined"),
        (["config.json", "--ep", "3"], "ep=3 does not divide the number of ranks that full_shard shards over, 8; use"),
        (["config.json", "--ep", "2", "--tp", "2"], "ep=2 with tp=2 is not supported: leave one of them out"),
        (["config.json", "--cp", "4", "--tp", "4"], "cp=4 x tp=4 does not divide 8 ranks (1 nodes of 8); use one of 1"),
        (["config.json", "--output", "x.toml"], "--output is only for a calibration: add --calibrate"),
        (
            ["--calibrate", "--ranks", "-2"],
            "--ranks -2: must be a whole number of at least 1; leave it out for the default",
        ),
        (["config.json", "--config", "."], "cannot write .: it is a directory; name a file"),
        (["config.json", "--trace", "t.png"], "t.png: a trace must be named .json (Perfetto, chrome://tracing)"),
        (["gpt2-xl", "--seq-len", "4096"], "seq_len=4096 is more than the model's max_position_embeddings=1024"),
        (
            ["siglip2-base", "--config", "run.toml"],
            "SigLIP 2 base, patch 16, 224: `shardwise train` has no task for it (it has causal-lm, masked-lm,",
        ),
        (["config.json", "--budget", "9" * 400], "--budget 999"),
        (["config.json", "--gpus", "1", "--reshard-after-forward", "4"], "reshard_after_forward=4 does not divide the"),
        (["config.json", "--html", "no/where.html"], "cannot write no/where.html: no such directory: no"),
        (["config.json", "--nodes", "0"], "nodes=0: must be a whole number of at least 1"),
        (["config.json", "--price", "-2"], "price_per_hour=-2.0: must be a price above 0 for one device"),
        (["--calibrate", "--output", "no/where.toml"], "cannot write no/where.toml: no such directory: no"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_run(arguments: list[str], line: str, capsys: Printed) -> None:
    assert run(["plan", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (error,) = (said for said in shown.err.splitlines() if not said.startswith("planning: "))  # after 3 s, it says so
    assert error.startswith(f"error: {line}")


def test_without_a_model_a_plan_lists_what_is_packaged(capsys: Printed) -> None:
    assert run(["plan"]) == 2
    shown = capsys.readouterr()
    assert shown.err == "error: MODEL is missing: shardwise plan llama-3.1-8b --gpus 8 (see shardwise plan --help)\n"
    lines = shown.out.splitlines()
    assert [line for line in lines if not line.startswith("  ")] == [
        "Packaged shapes (MODEL):",
        "Packaged devices (--gpu):",
    ]
    assert "  kimi-k2" in lines
    assert max(map(len, lines)) <= 100
    names = re.findall(r"[^\s,]+", "\n".join(line for line in lines if line.startswith("  ")))
    assert names == [*shapes(), *device_names()]


def test_a_file_that_may_not_be_written_is_told_first(capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert run(["plan", "config.json", "--html", "plan.html", *FIXED]) == 2
    assert capsys.readouterr().err.startswith("error: cannot write plan.html: no permission to write it")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--optimizer", "sgd"], "`shardwise train` has adamw, adamw-bf16, adamw-8bit and muon, not sgd"),
        (["--loss", "chunked"], "`shardwise train` uses the model's own loss, not 'chunked'"),
        (["--attention", "eager"], "`shardwise train` uses the fastest attention that the model has, sdpa, not eager"),
    ],
)
def test_a_plan_that_the_trainer_cannot_run_is_shown_all_the_same(asked: list[str], said: str, capsys: Printed) -> None:
    assert run(["plan", "config.json", "--gpus", "1", *asked, "--config", "run.toml", *FIXED[2:]]) == 2
    shown = capsys.readouterr()
    assert shown.out.startswith("config.json: ")
    assert said in shown.err
    assert not Path("run.toml").exists()


def test_a_budget_decides_what_fits_in_json_too(capsys: Printed) -> None:
    assert run(["plan", "config.json", "--gpus", "2", "--budget", "600MiB", "--json", *FIXED]) == 2
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_a_group_to_reshard_to_leaves_strategies_out_and_says_which(capsys: Printed) -> None:
    asked = ["--gpus", "2", "--reshard-after-forward", "2", "--workers", "1", "--strategy", "full_shard,no_shard"]
    assert run(["plan", "config.json", *asked, *FIXED[2:]]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "Left out: no_shard: reshard_after_forward=2 does not divide the shard group of 1 rank; leave it out" in shown
    )


def test_learned_positions_are_as_many_in_the_plan_as_in_training(capsys: Printed) -> None:
    """The default sequence length is the model's, and the written configuration builds the model that was planned."""
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 320}
    Path("config.json").write_text(json.dumps(gpt2))
    fixed = [*FIXED[:-2], "--gpus", "1", "--config", "run.toml", "--json"]
    assert run(["plan", "config.json", *fixed]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["job"]["seq_len"] == 64
    config = load("run.toml")
    model = build_model(config.model, TextShape(257, 256, config.data.seq_len))
    assert sum(parameter.numel() for parameter in model.parameters()) == printed["parameters"]


def test_a_vision_model_has_a_plan_and_a_configuration_without_data(capsys: Printed) -> None:
    vit = {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
    Path("config.json").write_text(json.dumps({**vit, "intermediate_size": 64, "patch_size": 16}))
    assert run(["plan", "config.json", "--precision", "fp32", "--html", "plan.html", *FIXED]) == 0
    assert run(["plan", "config.json", "--precision", "fp32", "--config", "run.toml", *FIXED]) == 0
    config = load("run.toml")
    assert (config.model.task, config.data.source) == ("image-classification", "unset")


@pytest.mark.slow
def test_calibration_writes_a_file_that_plans_use(capfd: Printed) -> None:
    assert run(["plan", "--calibrate", "--quick", "--ranks", "2", "--output", "here.toml"]) == 0
    assert "use it with shardwise plan MODEL --gpu here.toml" in capfd.readouterr().out
    assert run(["plan", "config.json", "--gpu", "here.toml", "--gpus", "2", "--json", *FIXED]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed["fits"]
    assert 0 < printed["step_time_s"] < 10


def test_a_directory_trains_on_from_what_is_there(capsys: Printed) -> None:
    """The written configuration names the directory, whose weights and tokenizer are used. The user is told to set
    data.source."""
    Path("mine").mkdir()
    Path("mine/config.json").write_text(json.dumps(TINY))
    for name in ("model.safetensors", "tokenizer.json"):
        Path("mine", name).touch()
    arguments = ["--gpu", "cpu", "--gpus", "1", "--precision", "fp32", *FIXED, "--config", "run.toml"]
    assert run(["plan", "mine", *arguments]) == 0
    said = "train with it: shardwise train run.toml data.source=... (which the file does not set)"
    assert said in capsys.readouterr().err
    assert Path("run.toml").read_text().startswith("# Set data.source to a file")
    config = load("run.toml")
    assert (config.model.path, config.model.weights, config.data.tokenizer) == ("mine", "path", None)
    assert run(["train", "run.toml"]) == 2
    assert "data.source is not set: set it to what to train on" in capsys.readouterr().err


def test_how_few_devices_would_do_is_an_answer(capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although nothing fits the devices that the question names."""

    def nothing_fits() -> None:
        raise PlanError("nothing fits 8 x h100")

    found = {"smallest_cluster": 16}
    answer = SimpleNamespace(best=None, extra=found, to_dict=lambda: found, check_fits=nothing_fits)
    monkeypatch.setattr(planner, "plan", lambda question, progress: answer)
    asked = ["plan", "config.json", "--smallest-cluster", "--json"]
    assert run(asked) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert run([*asked, "--trace", "step.json"]) == 2
    answer.extra = {"smallest_cluster": None}
    assert run(asked) == 2
    assert "nothing fits 8 x h100" in capsys.readouterr().err
