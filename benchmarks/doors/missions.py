"""Twelve architectures of transformers through a whole mission: trained sharded, saved, asked, exported.

    python benchmarks missions                     # three minutes on two idle cores; needs the extra `onnx`
    python benchmarks missions granitemoe beit     # some of them
    python benchmarks missions --out missions      # and write results/DATE-missions.*

None of them was used while this was built. Each is a small model with random weights. Two CPU ranks take one step of
AdamW, each on a batch of its own, beside an unsharded model that takes the same step on both; they save a step's
directory with the optimizer and answer from the shards, greedily or in one forward. A fresh process then loads the
directory with `from_pretrained`, compares its answers, and exports it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

import shardwise as sw
from benchmarks.common import facts, own_ranks, report
from shardwise.errors import UserError, one_line
from shardwise.export.onnx import export_onnx

RANKS = 2
TOKENS = 8
TOLERANCE = 1e-5
TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
IMAGES = {"image_size": 32, "patch_size": 8}
EYES = {key: value for key, value in TEXT.items() if key != "vocab_size"}
DEPTHS = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1], "image_size": 32}
PAIR = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, **IDS,
    "decoder_start_token_id": 1,
}  # fmt: skip
PROPHET = {
    "vocab_size": 96, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2,
    "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_position_embeddings": 64, **IDS, "decoder_start_token_id": 1,
}  # fmt: skip
IMAGE_TOKEN = 90


@dataclass(frozen=True)
class Architecture:
    """What is built, and what it reads."""

    kind: str
    model: str
    config: str
    settings: dict[str, Any]
    image_tokens: int = 0
    """Tokens of an image in a prompt."""

    @property
    def generates(self) -> bool:
        """Whether it is asked by greedy generation; else by one forward."""
        return self.kind in {"encoder-decoder", "experts", "state space"}

    def build(self) -> Any:
        """Return the model, the same each time."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.settings)
        return getattr(transformers, self.model)(config).eval()

    def batch(self, rank: int) -> dict[str, torch.Tensor]:
        """Return a rank's batch of two, with labels."""
        source = torch.Generator().manual_seed(rank)
        ids = torch.randint(3, 80, (2, 12), generator=source)
        ids[:, 1 : 1 + self.image_tokens] = IMAGE_TOKEN
        images = torch.randn(2, 3, 32, 32, generator=source)
        if self.kind == "vision":
            return {"pixel_values": images, "labels": torch.tensor([0, 1])}
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        return {**given, "pixel_values": images} if self.kind == "text and image" else given


def of(kind: str, model: str, config: str, image_tokens: int = 0, **settings: Any) -> Architecture:
    """Return an architecture, by the names of its class and of its configuration's."""
    return Architecture(kind, model, config, settings, image_tokens)


ARCHITECTURES = {
    "blenderbot": of("encoder-decoder", "BlenderbotForConditionalGeneration", "BlenderbotConfig", **PAIR),
    "prophetnet": of("encoder-decoder", "ProphetNetForConditionalGeneration", "ProphetNetConfig", **PROPHET),
    "umt5": of(
        "encoder-decoder", "UMT5ForConditionalGeneration", "UMT5Config", vocab_size=96, d_model=32, d_kv=8, d_ff=64,
        num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
    ),
    "granitemoe": of("experts", "GraniteMoeForCausalLM", "GraniteMoeConfig", **TEXT, **IDS, **EXPERTS),
    "phimoe": of("experts", "PhimoeForCausalLM", "PhimoeConfig", **TEXT, **IDS, **EXPERTS),
    "jetmoe": of(
        "experts", "JetMoeForCausalLM", "JetMoeConfig", vocab_size=96, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_key_value_heads=2, kv_channels=8, num_local_experts=4, num_experts_per_tok=2, **IDS,
    ),
    "convnextv2": of("vision", "ConvNextV2ForImageClassification", "ConvNextV2Config", **DEPTHS),
    "beit": of("vision", "BeitForImageClassification", "BeitConfig", **EYES, **IMAGES),
    "paligemma": of(
        "text and image", "PaliGemmaForConditionalGeneration", "PaliGemmaConfig", 4, image_token_index=IMAGE_TOKEN,
        projection_dim=32, hidden_size=32,
        text_config={"model_type": "gemma", **TEXT, **IDS, "num_key_value_heads": 1, "head_dim": 8},
        vision_config={"model_type": "siglip_vision_model", **EYES, "image_size": 32, "patch_size": 16},
    ),
    "aya_vision": of(
        "text and image", "AyaVisionForConditionalGeneration", "AyaVisionConfig", 4, image_token_index=IMAGE_TOKEN,
        downsample_factor=2, adapter_layer_norm_eps=1e-6, vision_feature_layer=-1,
        text_config={"model_type": "cohere2", **TEXT, **IDS, "num_key_value_heads": 2, "head_dim": 8},
        vision_config={"model_type": "siglip_vision_model", **EYES, "image_size": 32, "patch_size": 8},
    ),
    "falcon_mamba": of(
        "state space", "FalconMambaForCausalLM", "FalconMambaConfig", vocab_size=96, hidden_size=32,
        num_hidden_layers=2, state_size=8, **IDS,
    ),
    "jamba": of(
        "state space", "JambaForCausalLM", "JambaConfig", **TEXT, **IDS, num_key_value_heads=2, num_experts=2,
        attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False,
    ),
}  # fmt: skip


@dataclass
class Row:
    """One architecture. A stage that failed has its refusal; those after it are empty."""

    name: str
    kind: str
    trained: str = ""
    saved: str = ""
    asked: str = ""
    exported: str = ""


def ask(one: Architecture, model: Any) -> list[Any]:
    """Return greedy tokens, or the places where the logits of a forward are greatest, for rank 0's batch."""
    given = {name: value for name, value in one.batch(0).items() if name != "labels"}
    if one.generates:
        made = model.generate(**given, do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS)
        return list(made[:, -TOKENS:].tolist())
    with torch.no_grad():
        return list(model(**given).logits.argmax(-1).tolist())


def attempt(row: Row, stage: str, task: Callable[[], str]) -> bool:
    """Do a stage, and note what came of it. Returns whether it succeeded."""
    try:
        setattr(row, stage, task())
    except Exception as error:  # whatever it is belongs in the table
        setattr(row, stage, f"refused: {one_line(error, with_type=not isinstance(error, UserError))}")
        return False
    return True


def train_and_ask(name: str, directory: Path) -> tuple[Row, list[Any]]:
    """Train, save and ask one architecture. Every rank must call this."""
    one, answers = ARCHITECTURES[name], list[Any]()
    row = Row(name, one.kind)
    state: dict[str, Any] = {}

    def train() -> str:
        plain = one.build()
        state["model"] = model = sw.shard(one.build())
        state["optimizer"] = optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        loss = model(**one.batch(dist.get_rank())).loss
        loss.backward()
        optimizer.step()
        losses = [plain(**one.batch(rank)).loss for rank in range(RANKS)]
        (sum(losses) / RANKS).backward()
        reference.step()
        off = abs(loss.item() - losses[dist.get_rank()].item())
        moved = sw.full_state_dict(model, rank0_only=False)
        difference = max(float((moved[key] - value).abs().max()) for key, value in plain.state_dict().items())
        assert off < TOLERANCE, f"its loss differs from the unsharded model's by {off:.1e}"
        return f"weights within {difference:.0e} of the unsharded model's"

    def save() -> str:
        sw.checkpoint.save(directory / name, state["model"], state["optimizer"], step=1)
        return f"{len(list((directory / name).glob('*.safetensors')))} files of tensors"

    def answer() -> str:
        answers.extend(ask(one, state["model"]))
        return "tokens" if one.generates else "logits"

    for stage, task in (("trained", train), ("saved", save), ("asked", answer)):
        if not attempt(row, stage, task):
            break
    return row, answers


def finish(row: Row, answers: list[Any], directory: Path) -> None:
    """Load the directory as others do, compare, and export."""
    one = ARCHITECTURES[row.name]

    def compare() -> str:
        model = getattr(transformers, one.model).from_pretrained(directory / row.name).eval()
        assert ask(one, model) == answers, "answers from the shards and after from_pretrained differ"
        return f"{row.asked} as after from_pretrained"

    def export() -> str:
        found = export_onnx(directory / row.name, directory / f"{row.name}-onnx").checked
        assert found.passes(1e-4), f"onnxruntime differs from PyTorch by {found.difference:.1e}"
        same = f", {found.same} of {found.answers} answers" if found.answers else ""
        return f"verified, off by {found.difference:.0e}{same}"

    if answers and attempt(row, "asked", compare):
        attempt(row, "exported", export)


def _rank(names: list[str], directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = []
    for name in names:
        row, answers = train_and_ask(name, directory)
        if dist.get_rank() == 0:
            print(f"{name}: {row.asked or row.saved or row.trained}", file=sys.stderr, flush=True)
        found.append((asdict(row), answers))
    own_ranks.tell(found)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of the architectures")
    parser.add_argument("--out", help="write results/DATE-OUT.json and .md")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)  # the ranks'
    options = parser.parse_args()
    if unknown := set(options.names) - set(ARCHITECTURES):
        parser.error(f"{min(unknown)!r} is not one of {', '.join(ARCHITECTURES)}")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    names = options.names or [*ARCHITECTURES]
    if own_ranks.is_rank():
        _rank(names, options.directory)
        return
    with tempfile.TemporaryDirectory() as name:
        sys.argv += ["--directory", name]
        rows = []
        for document, answers in own_ranks.run(RANKS)[0]:
            rows.append(Row(**document))
            finish(rows[-1], answers, Path(name))
            print(f"{rows[-1].name:12} {rows[-1].exported or rows[-1].asked}", flush=True)
    header = ["model", "kind", "one step on two ranks", "saved", "asked from the shards", "ONNX"]
    table = report.table(header, [[*map(str, asdict(row).values())] for row in rows])
    print(table)
    if options.out:
        machine = facts.machine()
        versions = {name: version(name) for name in ("transformers", "torch", "onnx", "onnxruntime")}
        head = (
            "# Held-out architectures through whole missions\n\n"
            f"{report.facts_line(machine)}. {report.facts_line(versions)}.\n"
            f"Small models with random weights, sharded with `sw.shard` over {RANKS} CPU ranks.\n\n"
        )
        document = {"machine": machine, "versions": versions, "rows": [asdict(row) for row in rows]}
        report.write(options.out, document, head + table)
