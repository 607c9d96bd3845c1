"""Settings are described once, and everything that takes them is derived from the description."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.fsdp.strategy import Strategy
from shardwise.policy.settings import ARGUMENTS, RUN, SHARD, tree_of, values_in, words
from shardwise.train.config.schema import Config
from tools.settings_table import MARKED, PAGE, table

ROOT = Path(__file__).parents[2]

NEW = """
# One more line in the description, and nothing else.
import importlib.util
import inspect
import sys

spec = importlib.util.find_spec("shardwise.policy.settings")
source = open(spec.origin).read()
line = '    volume: int = setting(7, "How loud it is.", plain=int, key="parallel.volume", least=1)\\n'
before = "    slots: int = setting("
assert source.count(before) == 1
settings = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
exec(compile(source.replace(before, line + before), spec.origin, "exec"), settings.__dict__)

from shardwise.plan import forecast
from shardwise.plan.dry_run.job import Job

assert inspect.signature(forecast).parameters["volume"].default == 7
assert Job(volume=3).volume == 3
try:
    Job(volume=0)
except settings.ConfigError as error:
    assert str(error) == "volume=0: must be a whole number of at least 1"
else:
    raise AssertionError

from pathlib import Path
from shardwise.cli.foreign import with_settings
from shardwise.cli.plan_options import Options
from shardwise.train.config.files import load

Path("run.toml").write_text('model.path = "x"\\ntrain.steps = 1\\nparallel.volume = 4\\n')
config = load("run.toml")
assert config.parallel.volume == 4
assert type(config.parallel).model_fields["volume"].description == "How loud it is."
try:
    load("run.toml", ["parallel.volum=4"])
except settings.ConfigError as error:
    assert "did you mean parallel.volume?" in str(error)
else:
    raise AssertionError
assert Options(volume="1,2").arguments()["volume"] == [1, 2]
assert with_settings(Options(foreign=Path("run.toml"))).volume == "4"

from shardwise.cli.app import run

assert run(["plan", "--help"]) == 0

from shardwise.plan.models.source import resolve
from shardwise.train.build.from_plan import training_config

tiny = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
assert training_config(resolve(tiny | {"vocab_size": 64}), Job(volume=3), "run").parallel.volume == 3

from torch import nn
from shardwise.train.build import sharding
from shardwise.train.process.ranks import started

given = {}
sharding.sw.shard = lambda model, **arguments: given.update(arguments)
with started() as ranks:
    sharding.shard_model(nn.Linear(2, 2), config.parallel, ranks)
assert given["volume"] == 4

from shardwise.train.on_jax.supported import check_supported

try:
    check_supported(config)
except settings.ConfigError as error:
    assert "parallel.volume = 4 is not supported" in str(error)
else:
    raise AssertionError

from tools.settings_table import table

print(table())
"""


def test_a_new_setting_is_everywhere_once_it_is_described(tmp_path: object) -> None:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", NEW],
        capture_output=True,
        text=True,
        cwd=str(tmp_path),
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    help_, listed = done.stdout.split("| setting |")
    assert "--volume <str>" in help_
    assert "How loud it is. [7]" in " ".join(help_.split())
    assert "| `volume` | How loud it is. | 7 | `volume=` | `parallel.volume` | `--volume` |" in listed


def test_the_signature_of_shard_is_the_description() -> None:
    parameters = inspect.signature(sw.shard).parameters
    assert {name: one.default for name, one in ARGUMENTS.items()} == {
        name: parameter.default for name, parameter in parameters.items() if name != "model"
    }
    assert SHARD.keys() <= ARGUMENTS.keys() & RUN.keys()


def test_the_user_guide_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert MARKED.findall(page) == [table()], "run python tools/settings_table.py"


def test_each_key_is_one_of_a_configuration() -> None:
    for one in RUN.values():
        if one.key:
            section, key = one.key.split(".")
            assert key in Config.model_fields[section].annotation.model_fields  # type: ignore[union-attr]


def test_settings_and_keys_translate_into_one_another() -> None:
    values = {"strategy": Strategy.HYBRID_SHARD, "shard_group": 2, "units": ("A", "B"), "slots": 4, "loss": "model"}
    tree = tree_of(values)
    assert tree["parallel"] == {
        "strategy": "hybrid_shard",
        "units": ["A", "B"],
        "reshard_after_forward": None,
        "slots": 4,
        "shard_group": 2,
        "cp": None,
        "tp": None,
        "ep": None,
    }
    found = values_in(tree)
    assert found == {"strategy": "hybrid_shard", "shard_group": 2, "units": frozenset({"A", "B"}), "slots": 4}
    assert values_in({"parallel": {"strategy": "auto"}}) == {}


@pytest.mark.parametrize("name", [name for name, one in RUN.items() if one.default is not None and not one.is_flag])
def test_words_of_defaults_are_read_as_they_are_written(name: str) -> None:
    one = RUN[name]
    [value] = one.values(words(one.default))
    assert one.checked(value) == one.checked(one.default)


def test_a_value_that_cannot_be_is_named_with_its_setting() -> None:
    for name, value, line in (
        ("slots", 1, "slots=1: must be a whole number of at least 2"),
        ("loss", "modl", "loss='modl': must be one of model, fused, chunked; did you mean model?"),
        ("compile", 1, "compile=1: must be True or False"),
    ):
        with pytest.raises(ConfigError) as caught:
            RUN[name].checked(value)
        assert str(caught.value).startswith(line)
