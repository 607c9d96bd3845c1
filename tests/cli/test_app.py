"""What the command line prints and returns, run in this process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli import bench, main
from shardwise.cli.app import run
from shardwise.errors import UserError

from .conftest import CONFIG


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert run([]) == 0
    assert capsys.readouterr().out == shown
    assert all(f"  {command}" in shown for command in ("train", "inspect", "bench"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    module = subprocess.run([sys.executable, "-m", "shardwise", "--version"], capture_output=True, text=True)
    shown = capsys.readouterr().out
    assert shown.startswith("shardwise 0.")
    assert (module.stdout, module.stderr) == (shown, "")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["trian"], "error: No such command 'trian'."),
        (["train"], "error: Missing argument 'CONFIG.toml'."),
        (["train", "x.toml", "--slots=3"], "error: No such option: --slots"),
        (["train", "x.toml"], "error: no configuration file at x.toml"),
        (["inspect", "x.toml"], "error: no configuration file at x.toml"),
        (["inspect", "."], "error: . is not a checkpoint: it has no manifest.json"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(line)
    assert shown.err.count("\n") == 1


def test_debug_shows_where_a_mistake_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "x.toml", "--debug"]) == 2
    assert "ConfigError: no configuration file" in capsys.readouterr().err


def test_more_ranks_than_gpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shardwise.device_tools.count", lambda: 1)
    (tmp_path / "run.toml").write_text(CONFIG)
    assert run(["train", str(tmp_path / "run.toml"), "parallel.ranks=2"]) == 2
    assert capsys.readouterr().err == (
        "error: parallel.ranks=2, but this machine has 1 GPU; ask for at most 1, "
        "or set CUDA_VISIBLE_DEVICES= to run on the CPU\n"
    )


@pytest.mark.parametrize("under_torchrun", [False, True])
def test_an_adapter_without_peft_is_told_before_torch_is_loaded(under_torchrun: bool, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    script = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['peft'] = None  # importing either raises\n"
        "from shardwise.train.run import preflight\n"
        "preflight.find_spec = lambda name: None\n"
        "from shardwise.cli.app import run\n"
        "sys.exit(run(['train', 'run.toml', 'lora.r=4']))\n"
    )
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} if under_torchrun else {}
    told = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={**os.environ, **ranks}, capture_output=True, text=True
    )
    assert told.returncode == 2
    assert told.stderr == "error: lora.r=4 needs PEFT, which is not installed: pip install 'shardwise[train,peft]'\n"
    assert told.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_without_the_extra_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "shardwise.cli.app")
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 2
    line = "error: the module 'typer' is missing; install it with: pip install 'shardwise[train]'\n"
    assert capsys.readouterr().err == line


def test_bench_hands_its_options_to_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "peers.py").write_text("import sys; sys.exit(sys.argv[1:] != ['peers', '--layers', '2', '--help'])")
    monkeypatch.setattr(bench, "SCRIPT", tmp_path / "peers.py")
    assert run(["bench", "--layers", "2", "--help"]) == 0
    assert run(["bench", "--layers", "3"]) == 1


def test_a_mistake_of_bench_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--engines", "fsdp3"]) == 2
    told = capfd.readouterr().err
    assert told.startswith("error: unknown engine 'fsdp3'; known are ")
    assert told.endswith(" (see shardwise bench --help)\n")


def test_bench_outside_a_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SCRIPT", Path("nowhere") / "peers.py")
    with pytest.raises(UserError, match="not part of the installed package"):
        bench.find_script()


GONE = {
    "generate runs/nope --prompt a": "runs/nope: no such checkpoint",
    "export nope --onnx out": "nope: no such checkpoint; a model on a hub is named org/name",
    "convert runs/nope out --to hf": "runs/nope: no such checkpoint",
    "inspect runs/nope": "runs/nope: no such checkpoint",
    "inspect nope.toml": "no configuration file at nope.toml",
    "report runs/nope": "runs/nope: no such run",
    "plan runs/nope --gpus 1": "MODEL 'runs/nope' was not found",
    "doctor nope.toml": "no configuration file at nope.toml",
    "init --model runs/nope --data x.jsonl": "model.path='runs/nope': no such file or directory",
}


def test_what_is_not_there_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    """All commands in one process: its start takes longer than they do."""
    (tmp_path / "runs").mkdir()
    program = (
        "import sys\nfrom shardwise.cli.app import run\n"
        "for line in sys.stdin.read().splitlines():\n"
        "    assert run(line.split()) == 2\n"
        "    assert 'torch' not in sys.modules, line\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], input="\n".join(GONE), cwd=tmp_path, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    lines = told.stderr.splitlines()
    assert len(lines) == len(GONE)
    for line, words in zip(lines, GONE.values(), strict=True):
        assert line.startswith(f"error: {words}")
