import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.train.build.models import TextShape, build_model
from shardwise.train.config.schema import ModelConfig

TEXT = TextShape(vocab_size=320, end_id=256, seq_len=32)
TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def config_of(model: nn.Module) -> Any:
    return model.config


def test_an_inline_configuration_takes_the_rest_from_the_data() -> None:
    model = build_model(ModelConfig(config=TINY), TEXT)
    config = config_of(model)
    assert (config.vocab_size, config.eos_token_id, config.bos_token_id) == (320, 256, 256)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.training


def test_what_is_said_is_kept_and_the_configuration_is_not_changed() -> None:
    inline = {
        **TINY,
        "vocab_size": 384,
        "eos_token_id": 7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    before = json.dumps(inline)
    config = config_of(build_model(ModelConfig(config=inline), TEXT))
    assert (config.vocab_size, config.eos_token_id) == (384, 7)
    assert json.dumps(inline) == before


def test_positions_grow_with_the_sequences() -> None:
    long = TextShape(vocab_size=320, end_id=256, seq_len=4096)
    gpt2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2}
    assert config_of(build_model(ModelConfig(config=gpt2), long)).n_positions == 4096
    more = config_of(build_model(ModelConfig(config={**gpt2, "n_positions": 8192}), long))
    assert more.n_positions == 8192, "what is said is kept, under whatever name"


@pytest.mark.parametrize(("init", "device"), [("meta", "meta"), ("device", "meta"), ("cpu", "cpu")])
def test_where_it_is_built(init: Any, device: str) -> None:
    model = build_model(ModelConfig(config=TINY, init=init, dtype="bf16"), TEXT)
    assert {parameter.device.type for parameter in model.parameters()} == {device}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_path(tmp_path: Path, name: str) -> None:
    config_of(build_model(ModelConfig(config=TINY), TEXT)).save_pretrained(tmp_path)
    model = build_model(ModelConfig(path=str(tmp_path / name)), TEXT)
    assert config_of(model).hidden_size == 16


def test_weights_are_left_to_the_shards(tmp_path: Path) -> None:
    saved: Any = build_model(ModelConfig(config=TINY, init="cpu"), TEXT)
    saved.generation_config.max_new_tokens = 7
    saved.save_pretrained(tmp_path)
    model: Any = build_model(ModelConfig(path=str(tmp_path), weights=str(tmp_path)), TEXT)
    assert model.training
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.generation_config.max_new_tokens == 7


def test_answers_end_where_documents_of_the_data_do(tmp_path: Path) -> None:
    saved: Any = build_model(ModelConfig(config=TINY, init="cpu"), TEXT)
    for own, ends in ((None, TEXT.end_id), (2, [TEXT.end_id, 2]), ([2, TEXT.end_id], [2, TEXT.end_id])):
        saved.generation_config.eos_token_id = own
        saved.save_pretrained(tmp_path)
        model: Any = build_model(ModelConfig(path=str(tmp_path), weights=str(tmp_path)), TEXT)
        assert model.generation_config.eos_token_id == ends


def test_a_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_factory.py").write_text(
        "from torch import nn\ndef make(): return nn.Linear(2, 3).eval()\ndef number(): return 3\n"
        "def sized(width, *, depth, bias=True): return nn.Linear(width, depth)\nwidth = 3\n"
    )
    (tmp_path / "half_a_module.py").write_text("def make(:\n")
    (tmp_path / "not_a_module.py").write_text("from torch import nn\nnn.Linaer\n")
    monkeypatch.chdir(tmp_path)
    model = build_model(ModelConfig(factory="my_factory:make", dtype="bf16"), TEXT)
    assert isinstance(model, nn.Linear)
    assert model.weight.dtype == torch.bfloat16
    assert model.training
    for name, message in [
        ("my_factory:mak", "my_factory has no mak; did you mean make"),
        ("no_such_module:make", "No module named 'no_such_module'"),
        ("my_factory:width", "is of type int, not a function"),
        ("my_factory:sized", r"needs arguments \(width, depth\)"),
        ("half_a_module:make", r"half_a_module cannot be imported: SyntaxError: .*half_a_module\.py, line 1"),
        ("not_a_module:make", "not_a_module cannot be imported: AttributeError: .*Linaer"),
        ("my_factory:number", r"returned a int, not a torch\.nn\.Module"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build_model(ModelConfig(factory=name), TEXT)


@pytest.mark.parametrize(
    ("inline", "message"),
    [
        ({"model_type": "lama"}, "'lama' is unknown; did you mean .*llama"),
        ({**TINY, "num_layer": 2}, "num_layer is not a key of model_type 'llama'; did you mean"),
        ({**TINY, "vocab_size": 257}, "vocab_size=257, but the tokenizer needs 320"),
        ({"model_type": "gpt2", "n_positions": 8}, "seq_len=32 is more than the model's max_position_embeddings=8"),
        ({**TINY, "hidden_size": "wide"}, "invalid for model_type 'llama'.*hidden_size"),
        ({"model_type": "clip_vision_model"}, "transformers cannot build it"),
        ({**TINY, "hidden_act": "nope"}, "transformers cannot build it: KeyError: 'nope'"),
        ({**TINY, "num_hidden_layers": -1}, "invalid llama configuration: num_hidden_layers=-1 is less than 0"),
        (
            {**TINY, "num_attention_heads": 4, "num_key_value_heads": 3},
            "num_attention_heads=4 is not a multiple of num_key_value_heads=3",
        ),
        ({**TINY, "hidden_size": 0}, "hidden_size=0 is less than 1"),
        ({**TINY, "num_attention_heads": 0}, "num_attention_heads=0 is less than 1"),
    ],
)
def test_mistakes_are_one_line(inline: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        build_model(ModelConfig(config=inline), TEXT)
    assert "\n" not in str(raised.value)


def test_rotary_positions_go_beyond_what_the_model_was_made_for() -> None:
    shorter = {**TINY, "max_position_embeddings": 8}
    with pytest.warns(UserWarning, match="shardwise: data.seq_len=32 is more than the model's max_position_embeddings"):
        assert config_of(build_model(ModelConfig(config=shorter), TEXT)).max_position_embeddings == 8


def test_missing_files_are_named_with_their_neighbours(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    with pytest.raises(ConfigError, match=r"my-modle.*did you mean .*my-model"):
        build_model(ModelConfig(path=str(tmp_path / "my-modle")), TEXT)
    with pytest.raises(ConfigError, match=r"no such file: .*my-model/config\.json"):
        build_model(ModelConfig(path=str(tmp_path / "my-model")), TEXT)
