"""MODEL, in all its forms."""

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import HubError, PlanError
from shardwise.plan.dry_run.recording import Kernel
from shardwise.plan.models.source import resolve, shapes
from shardwise.toml_text import toml_value
from tests.hub.cached import put

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}

OWN = """
import torch
x = 3
built = torch.nn.Linear(2, 2)
def wide(width, *more, bias, kind=None): ...
def make(width=2, *more, **rest): return torch.nn.Linear(width, width)
"""


def built(model: object, attention: str = "sdpa") -> nn.Module:
    with torch.device("meta"):
        return resolve(model).builder(attention)()  # type: ignore[arg-type]


def agrees(published: str, counted: int) -> bool:
    """Whether a number, rounded or cut to the digits that were published, is the published one.

    An exact number has all its digits ("8,030,261,248"). In "840M" the zeros after the second digit are not meant.
    """
    digits, unit = re.fullmatch(r"([\d.,]+)([MBT]?)", published).groups()  # type: ignore[union-attr]
    if not unit:
        return counted == int(digits.replace(",", ""))
    whole, _, decimals = digits.replace(",", "").partition(".")
    zeros = 0 if decimals else min(len(whole) - len(whole.rstrip("0")), max(0, len(whole) - 2))
    meant = int((whole + decimals)[: len(whole + decimals) - zeros])
    step = {"M": 10**6, "B": 10**9, "T": 10**12}[unit] * 10**zeros / 10 ** len(decimals)
    return meant in (int(counted / step), int(counted / step + 0.5))


@pytest.mark.parametrize(
    ("published", "right", "wrong"),
    [
        ("8.03B", (8_030_261_248, 8_025_000_000, 8_039_999_999), (8_024_999_999, 8_040_000_000)),
        ("405B", (405_853_388_800, 404_500_000_000), (404_499_999_999, 406_000_000_000)),
        ("840M", (840_592_640, 835_000_000), (834_999_999, 850_000_000)),
        ("1T", (1_026_408_209_408,), (499_000_000_000, 2_000_000_000_000)),
        ("124,439,808", (124_439_808,), (124_439_809,)),
    ],
)
def test_a_published_number_is_rounded_or_cut(published: str, right: tuple[int, ...], wrong: tuple[int, ...]) -> None:
    assert all(agrees(published, counted) for counted in right)
    assert not any(agrees(published, counted) for counted in wrong)


@pytest.mark.parametrize("name", shapes())
def test_a_packaged_shape_has_the_parameters_that_its_publisher_states(name: str) -> None:
    shape = shapes()[name]
    assert shape.source.startswith("https://")
    assert name == name.lower()
    model = built(name, resolve(name).attention)
    published, headless, _ = shape.published_params.partition(" without its classes")
    left_out = list(model.classifier.parameters()) if headless else []
    assert agrees(published, sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in left_out))
    assert model.training


OLDER = """
llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3-70b llama-3-405b gpt-3-175b mixtral-8x7b mixtral-8x22b gpt2
gpt2-xl vit-l-16 vit-h-14 vit-g-14 vit-big-g-14
"""
FAMILIES = """
llama-3.1-8b llama-3.2-1b llama-3.3-70b llama-4-scout qwen2.5-32b qwen3-32b qwen3-30b-a3b qwen3-next-80b-a3b qwen3.5-27b
gemma-3-27b gemma-4-31b mistral-7b ministral-3-8b deepseek-v3 deepseek-r1 deepseek-v4-flash gpt-oss-20b glm-5 kimi-k2
olmo-2-7b olmo-3-32b phi-4 smollm3-3b granite-3.3-8b nemotron-3-nano-30b-a3b falcon-h1-34b modernbert-base dinov3-vitl16
siglip2-base whisper-large-v3
"""


def test_issue_names_are_there() -> None:
    older = OLDER.split()
    assert {*older, *FAMILIES.split()} <= shapes().keys()
    assert len(shapes()) >= len(older) + 40
    assert resolve("Qwen3-32B").title == "Qwen3 32B"


def test_a_directory_a_file_a_dict_and_a_factory_are_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**TINY, "torch_dtype": "bfloat16", "transformers_version": "4.0"})
    )
    own = {key: value for key, value in TINY.items() if key != "model_type"}
    (tmp_path / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"def make():\n    return LlamaForCausalLM(LlamaConfig(**{own}))\n"
    )
    monkeypatch.chdir(tmp_path)
    models = [built(form) for form in (".", "config.json", tmp_path, TINY, "own:make")]
    assert len({tuple((n, p.shape, p.dtype) for n, p in model.named_parameters()) for model in models}) == 1
    sections = [resolve(form).model_section() for form in ("config.json", TINY, "own:make")]  # type: ignore[arg-type]
    assert sections == [{"path": "config.json"}, {"config": TINY}, {"factory": "own:make"}]
    with pytest.raises(PlanError, match="give the model as module:function"):
        resolve(lambda: models[0]).model_section()


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "llama-3-405b", "mixtral-8x7b", "vit-l-16"])
def test_a_shape_goes_into_a_training_configuration(name: str) -> None:
    section = resolve(name).model_section()["config"]
    assert tomllib.loads(tomli(section)) == section
    again = built(section)
    assert [p.shape for p in again.parameters()] == [p.shape for p in built(name).parameters()]
    for key in ("rope_theta", "rope_scaling"):
        assert key not in section
    if section["model_type"] == "llama":
        assert again.config.rope_parameters == built(name).config.rope_parameters  # type: ignore[union-attr]


def tomli(section: dict[str, Any]) -> str:
    return "\n".join(f"{key} = {toml_value(value)}" for key, value in section.items())


def test_attention_reaches_the_model() -> None:
    assert built(TINY, "eager").config._attn_implementation == "eager"  # type: ignore[union-attr]
    assert built(TINY).config._attn_implementation == "sdpa"  # type: ignore[union-attr]
    with pytest.raises(PlanError, match=r"attention='flash': must be one of sdpa, eager"):
        resolve(TINY).builder("flash")


def test_a_configuration_without_architectures_gets_the_head_of_its_kind() -> None:
    vit = {
        "model_type": "vit",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    assert type(built(vit)).__name__ == "ViTForImageClassification"
    assert type(built({**TINY, "architectures": ["LlamaModel"]})).__name__ == "LlamaModel"


T5 = {"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 320}
WHISPER = {
    "model_type": "whisper", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 320, "pad_token_id": 0,
    "max_source_positions": 50,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name"), [(T5, "T5ForConditionalGeneration"), (WHISPER, "WhisperForConditionalGeneration")]
)
def test_what_has_an_encoder_is_built_and_run_with_it(config: dict[str, Any], name: str) -> None:
    model = built(config)
    assert type(model).__name__ == name
    planned = sw.plan.forecast(config, gpus_per_node=2, seq_len=16)
    assert planned.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert any("encoder" in event.module for event in planned.recording.events if isinstance(event, Kernel))


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("llama-3-8bb", "MODEL 'llama-3-8bb' was not found; did you mean llama-3-8b"),
        (
            "nothing-like-it",
            r"was not found; give a packaged shape \(shardwise plan without a MODEL lists them\), a conf",
        ),
        ("lama3.1-8b", "'lama3.1-8b' was not found; did you mean llama-3.1-8b or"),
        ("confg.json", "MODEL 'confg.json' was not found; did you mean config.json"),
        ("empty", "'empty' is a directory without a config.json"),
        ("broken.json", "broken.json is not JSON"),
        ("run.toml", "run.toml is not JSON: .*; to plan with the settings of a run, use --from"),
        ("x" * 256, "MODEL 'x*' was not found"),
        ("config.json", 'has no "model_type"'),
        ({"model_type": "lama"}, "model_type 'lama' is unknown to transformers; did you mean llama"),
        ({"hidden_size": 3}, 'needs a "model_type"'),
        ("nowhere:make", "'nowhere:make': nowhere cannot be imported: No module named 'nowhere'"),
        ("torch.nn:Linaer", "torch.nn has no Linaer; did you mean Linear"),
        ("broken:make", "'broken:make': broken cannot be imported: ZeroDivisionError: division by zero"),
        ("leaving:make", "'leaving:make': leaving cannot be imported: SystemExit: 3"),
        ("own:x", "MODEL 'own:x' is of type int, not a function: name a function that builds the model"),
        ("own:built", "MODEL 'own:built' is of type Linear, not a function: name a function that builds the model"),
        ("own:wide", r"MODEL 'own:wide' needs arguments \(width, bias\): name a function that needs none"),
        (nn.Linear(2, 2), "is a Linear that is already built"),
    ],
)
def test_what_is_no_model_is_one_line(
    model: object, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "leaving.py").write_text("raise SystemExit(3)")
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "run.toml").write_text("[train]")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PlanError, match=line) as caught:
        resolve(model)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert "did you mean empty" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ({**TINY, "num_hidden_layers": -1}, "invalid llama configuration: num_hidden_layers=-1 is less than 0"),
        ({**TINY, "num_hidden_layers": "three"}, "transformers cannot build this llama: "),
        ("builtins:dict", "'builtins:dict' returned a dict, not a torch.nn.Module"),
    ],
)
def test_what_cannot_be_built_says_so_when_it_is(model: object, line: str) -> None:
    with pytest.raises(PlanError, match=line):
        built(model)


def test_arguments_that_may_be_left_out_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lax.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert isinstance(built("lax:make"), nn.Linear)


def test_positions() -> None:
    assert resolve("gpt2").positions == 1024
    assert resolve("llama-3-8b").positions is None  # rotary
    assert resolve("vit-l-16").positions is None
    assert resolve("torch.nn:Identity").positions is None
    assert resolve({"model_type": "xlnet"}).positions is None  # transformers says -1: any


def test_a_rotary_model_is_warned_of_sequences_that_it_was_not_made_for() -> None:
    llama = resolve("llama-3-8b")
    assert llama.beyond(8192) is None
    assert str(llama.beyond(16384)).startswith("seq_len=16384 is more than the model's max_position_embeddings=8192: ")
    assert resolve("vit-l-16").beyond(16384) is None


def test_a_name_of_a_hub_is_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without weights in the cache: a plan needs none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "config.json").write_text(json.dumps(TINY))
    pinned = put(tmp_path / "made", "org/tiny", tmp_path / "cache", monkeypatch)
    for name in ("org/tiny", pinned):
        source = resolve(name)
        assert (source.title, source.path, source.config) == (name, name, TINY)
    with pytest.raises(HubError, match=r"^MODEL 'org/other': no such file or directory here, and org/other is not"):
        resolve("org/other")
    (tmp_path / "org" / "tiny").mkdir(parents=True)  # a path wins
    with pytest.raises(PlanError, match=r"MODEL 'org/tiny' is a directory without a config\.json"):
        resolve("org/tiny")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "README.md").touch()
    put(tmp_path / "bare", "org/bare", tmp_path / "cache", monkeypatch)
    with pytest.raises(HubError, match=r"^MODEL 'org/bare': org/bare has no config\.json"):
        resolve("org/bare")
