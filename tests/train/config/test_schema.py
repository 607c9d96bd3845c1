"""The configuration: defaults, overrides, messages, and back to TOML."""

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError, MeshError
from shardwise.policy.strategies import OTHER_NAMES
from shardwise.train.config import files
from shardwise.train.config.files import dump_toml, load
from shardwise.train.config.schema import Config

MINIMAL = """
[model.config]
model_type = "llama"

[train]
steps = 10
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(MINIMAL)
    return path


def test_a_minimal_file_gets_the_promised_defaults(path: Path) -> None:
    config = load(path)
    assert config.log.name == "tiny"
    assert config.run_directory == Path("runs/tiny")
    assert (config.model.dtype, config.model.init, config.model.weights) == ("fp32", "meta", "path")
    assert (config.data.tokenizer, config.data.seq_len, config.data.eval_fraction) == (None, 512, 0.02)
    assert (config.train.micro_batch, config.train.global_batch, config.train.clip) == (1, None, 1.0)
    assert (config.train.schedule, config.train.activation_checkpointing) == ("cosine", "none")
    assert (config.parallel.ranks, config.parallel.strategy, config.parallel.slots) == ("auto", "full_shard", 3)
    assert (config.checkpoint.keep, config.checkpoint.asynchronous, config.checkpoint.resume) == (2, False, "auto")
    assert (config.log.directory, config.log.every, config.log.tensorboard) == ("runs", 1, False)


def test_every_key_is_documented() -> None:
    for section in Config.model_fields.values():
        for name, field in section.annotation.model_fields.items():  # type: ignore[union-attr]
            assert field.description, name


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.lr=1e-4", "train", "lr", 1e-4),
        ("train.lr=1", "train", "lr", 1.0),
        ("train.steps = 7", "train", "steps", 7),
        ("train.betas=[0.5, 0.9]", "train", "betas", (0.5, 0.9)),
        ("train.compile=true", "train", "compile", True),
        ("log.name=2026-01-31", "log", "name", "2026-01-31"),
        ("data.source=a=b", "data", "source", "a=b"),
        ('data.source="a b"', "data", "source", "a b"),
        ("parallel.ranks=4", "parallel", "ranks", 4),
        ("parallel.units=1000", "parallel", "units", 1000),
        ('parallel.units=["Block"]', "parallel", "units", ["Block"]),
        ("parallel.reshard_after_forward=false", "parallel", "reshard_after_forward", False),
        ("parallel.reshard_after_forward=2", "parallel", "reshard_after_forward", 2),
        ("parallel.shard_group=none", "parallel", "shard_group", None),
        ("model.config.hidden_size=64", "model", "config", {"model_type": "llama", "hidden_size": 64}),
        ("model.config.rope.theta=2.5", "model", "config", {"model_type": "llama", "rope": {"theta": 2.5}}),
        ("train.activation_checkpointing=every-3", "train", "activation_checkpointing", "every-3"),
    ],
)
def test_overrides(path: Path, override: str, section: str, key: str, value: object) -> None:
    got = getattr(getattr(load(path, [override]), section), key)
    assert got == value
    assert type(got) is type(value)


def test_the_last_override_wins(path: Path) -> None:
    assert load(path, ["train.steps=1", "train.steps=2"]).train.steps == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rate=1", "unknown key train.learning_rate; did you mean train.lr?"),
        ("learning_rate=1", "override 'learning_rate=1': unknown section [learning_rate]; did you mean train.lr?"),
        ("train.max_seq_length=1", "unknown key train.max_seq_length; did you mean data.seq_len?"),
        ("train.lrr=1", "unknown key train.lrr; did you mean train.lr?"),
        ("parallel.stratgy=no_shard", "unknown key parallel.stratgy; did you mean parallel.strategy?"),
        ("train.strategy=no_shard", "unknown key train.strategy; did you mean parallel.strategy?"),
        ("trian.lr=1", "unknown section [trian]; did you mean [train]?"),
        (
            "xyz.q=1",
            "unknown section [xyz]; the sections are model, lora, data, train, eval, parallel, checkpoint, offload, "
            "hub, log",
        ),
        ("log.xyz=1", "unknown key log.xyz; [log] has directory, name, every, tensorboard, wandb, profile"),
        ("lr=1", "override 'lr=1': unknown section [lr]; did you mean train.lr?"),
        ("train=1", "override 'train=1': train is a section; set one of its keys"),
        ("train.lr", "override 'train.lr' must have the form section.key=value, such as train.lr=1e-4"),
        ("train.steps.x=1", "override 'train.steps.x=1': train.steps is a value, not a table"),
        ("data.source=", "data.source = '': must have at least 1 character"),
        (f"train.seed={2**63}", f"train.seed = {2**63}: must be less than {2**63}"),
        ("train.steps=0", "train.steps = 0: must be greater than 0"),
        ("train.steps=ten", "train.steps = 'ten': must be an integer"),
        ('train.steps="10"', "train.steps = '10': must be an integer"),
        ("train.betas=[0.9]", "train.betas has too few items"),
        ("train.betas=[0.9, 0.9, 0.9]", "train.betas = [0.9, 0.9, 0.9]: must have 2 items"),
        ("train.betas=0.9", "train.betas = 0.9: must be a list"),
        (
            "train.activation_checkpointing=half",
            "train.activation_checkpointing = 'half': must be 'none', 'full', 'selective-ops', 'every-N' (N is 1 "
            "or more) or 'offload'",
        ),
        ("log.name=a/b", "log.name = 'a/b': must be the name of a directory, without / and \\"),
        (
            "train.momentum=0.5",
            '[train] momentum = 0.5 has no effect with optimizer = "adamw", which has betas: leave it out, or set '
            'optimizer = "muon"',
        ),
        (
            "offload.ring_mib=5",
            "[offload] ring_mib = 5 has no effect without offload.optimizer, because only optimizer state goes "
            'through the ring: set optimizer = "cpu" or "nvme", or leave ring_mib out (ring_mib=none)',
        ),
        (
            "offload.step=cpu",
            '[offload] step = "cpu" steps with state that is kept on the host: set optimizer = "cpu" or "nvme", or '
            "leave step out (step=none)",
        ),
        ("train.clip=nan", "train.clip = nan: must be a finite number"),
        ("parallel.slots=1", "parallel.slots = 1: must be greater than or equal to 2"),
        ("parallel.ranks=all", "parallel.ranks = 'all': must be 'auto', or must be an integer"),
        ("model.path=x", "[model] give exactly one of path, config and factory; found path and config"),
        ("model.config=none", "[model] give exactly one of path, config and factory; found none of them"),
        ("log.name=..", "[log] name '..' must be the name of a directory of its own"),
        (
            "parallel.strategy=zero",
            "parallel.strategy = 'zero': must be 'no_shard', 'shard_optimizer', 'shard_grad_op', 'full_shard', "
            "'hybrid_shard', 'hybrid_shard_zero2' or 'auto', or another name for one of them: ddp (no_shard), "
            "zero1 (shard_optimizer), zero2 (shard_grad_op), zero3 (full_shard), fsdp (full_shard), "
            "hsdp (hybrid_shard)",
        ),
    ],
)
def test_mistakes_are_named_on_one_line(path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(path, [override])
    assert str(caught.value).removeprefix(f"{path}: ") == message


def test_the_fields_names_of_strategies_are_taken_and_ours_written(path: Path) -> None:
    for theirs, ours in OTHER_NAMES.items():
        config = load(path, [f"parallel.strategy={theirs}"])
        assert config.parallel.strategy == ours
        assert f'strategy = "{ours}"' in dump_toml(config)
    with pytest.raises(MeshError, match="full_shard always uses 4 of 4 ranks"):
        load(path, ["parallel.strategy=zero3", "parallel.shard_group=2"]).for_ranks(4)


def test_a_mistyped_required_key_is_named_before_the_missing_one(path: Path) -> None:
    path.write_text(MINIMAL.replace("steps", "stesp"))
    with pytest.raises(ConfigError, match=r"unknown key train\.stesp; did you mean train\.steps\? \(and 1 more\)"):
        load(path)


def test_required_keys(path: Path) -> None:
    path.write_text("[train]\nsteps = 1\n")
    with pytest.raises(ConfigError, match="model is required"):
        load(path)


@pytest.mark.parametrize(("text", "message"), [("= 1", "is not TOML"), (None, "no configuration file at")])
def test_files_that_cannot_be_read(path: Path, text: str | None, message: str) -> None:
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_a_folder_with_the_name_of_a_recipe_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    assert load("quickstart").log.name == "quickstart"


def test_a_configuration_is_frozen(path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(path).train.steps = 3  # type: ignore[misc]


def test_for_ranks_fills_in_the_numbers(path: Path) -> None:
    fitted = load(path, ["train.micro_batch=3"]).for_ranks(4)
    assert (fitted.train.global_batch, fitted.parallel.ranks) == (12, 4)
    assert load(path, ["train.global_batch=24"]).for_ranks(4).train.global_batch == 24


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        (
            ["parallel.strategy=hybrid_shard", "parallel.shard_group=3"],
            4,
            "does not divide the 4 ranks; use one of 1, 2, 4",
        ),
        (["parallel.shard_group=2"], 4, "needs a hybrid strategy"),
        (["parallel.strategy=no_shard", "parallel.shard_group=2"], 4, "no_shard always uses 1 of 4 ranks"),
        (["parallel.reshard_after_forward=3"], 4, "does not divide the shard group of 4 ranks"),
    ],
)
def test_groups_that_do_not_fit(path: Path, overrides: list[str], ranks: int, message: str) -> None:
    with pytest.raises(MeshError, match=re.escape(message)):
        load(path, overrides).for_ranks(ranks)


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (["parallel.strategy=hybrid_shard", "parallel.shard_group=2", "parallel.reshard_after_forward=1"], 4),
        (["parallel.shard_group=4"], 4),
        (["parallel.strategy=no_shard", "parallel.shard_group=1"], 4),
    ],
)
def test_groups_that_fit(path: Path, overrides: list[str], ranks: int) -> None:
    assert load(path, overrides).for_ranks(ranks).parallel.ranks == ranks


def test_a_global_batch_must_be_whole_micro_batches(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.global_batch=6 is not a multiple of .* 2 x 2 = 4"):
        load(path, ["train.global_batch=6", "train.micro_batch=2"]).for_ranks(2)


@pytest.mark.parametrize("key", ["micro_batch", "global_batch"])
def test_a_step_that_no_rank_has_memory_for_is_refused(path: Path, key: str) -> None:
    with pytest.raises(
        ConfigError, match=r"5\.12e\+22 tokens per step on each rank .* are more than the 2147483648 supported; lower"
    ):
        load(path, [f"train.{key}={10**20 if key == 'micro_batch' else 2 * 10**20}"]).for_ranks(2)


values = st.recursive(
    st.text() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # a busy machine
@given(inline=st.dictionaries(st.text().filter(lambda key: key != "model_type"), values, max_size=4))
def test_what_is_written_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, inline: dict[str, object]) -> None:
    config = Config.model_validate(
        {
            "model": {"config": {**inline, "model_type": "llama"}},
            "train": {"steps": 3, "lr": 1 / 3, "betas": [0.1, 0.7]},
            "parallel": {"units": ["A", "B"], "ranks": 4, "reshard_after_forward": False},
            "log": {"name": 'a "name"\x7f'},
        }
    )
    path = tmp_path_factory.mktemp("config") / "written.toml"
    path.write_bytes(dump_toml(config).encode("utf-8"))
    assert load(path) == config
    assert tomllib.loads(path.read_text())["parallel"]["units"] == ["A", "B"]


def test_other_trainers_names_lead_to_keys_that_exist() -> None:
    assert set(files._OTHERS_NAMES.values()) <= set(files._known_names())
    assert not {dotted.partition(".")[2] for dotted in files._known_names()} & set(files._OTHERS_NAMES)


def test_an_adapter_needs_its_rank(path: Path) -> None:
    assert load(path).lora.r == 0
    assert load(path, ["lora.r=8", "lora.alpha=4", 'lora.targets=["q_proj"]']).lora.targets == ["q_proj"]
    assert load(path, ["lora.r=0", "lora.alpha=4"]).lora.r == 0
    assert load(path, ["lora.r=8", "lora.base=nf4"]).lora.base == "nf4"
    with pytest.raises(ConfigError, match=r"lora\.base.*(nf4|int8)"):
        load(path, ["lora.r=8", "lora.base=nf3"])
    with pytest.raises(ConfigError, match=r"\[lora\] alpha is given but r is not: set r"):
        load(path, ["lora.alpha=4"])


def test_several_sources_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'model.config = {model_type = "llama"}\ntrain.steps = 1\n'
        '[[data.sources]]\nsource = "a"\nweight = 2.0\n[[data.sources]]\nsource = "org/b"\nsplit = "test"\n'
    )
    config = load(path)
    assert [(one.source, one.weight, one.split) for one in config.data.each_source] == [
        ("a", 2.0, None),
        ("org/b", 1.0, "test"),
    ]
    path.write_text(dump_toml(config))
    assert load(path) == config
    assert config.data.named == "a, org/b"
    assert config.data.with_sources(["c", "d"]).named == "c, d"


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ('[{source="a", wieght=1}]', "data.sources, number 1: unknown key wieght; did you mean weight?"),
        ('[{source="a"}, {weight=1}]', "data.sources, number 2: source is required"),
        ('[{source="a", weight=0}]', "data.sources, number 1: weight = 0: must be greater than 0"),
        ("[]", "data.sources = []: must have 1 items"),
    ],
)
def test_mistakes_in_one_of_several_sources(sources: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('model.config = {model_type = "llama"}\ntrain.steps = 1\n')
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "run.toml", [f"data.sources={sources}"])
    assert message in str(error.value)


def test_a_source_and_sources_are_too_many(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('model.config = {model_type = "llama"}\ntrain.steps = 1\ndata.split = "x"\n')
    with pytest.raises(ConfigError, match="split and sources are both given: give split to one of the sources"):
        load(tmp_path / "run.toml", ['data.sources=[{source="a"}]'])
