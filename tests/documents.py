"""Fenced blocks of README and documentation, with what a comment above a block says about it.

    <!-- not run: needs a server -->            the reason for which no test runs the block
    <!-- run by: tests/examples/test_x.py -->   the test that runs it
    <!-- ranks: 2 -->                           how many ranks run it, where one does not suffice

`tests/test_documents.py` runs all others. A block of language "text", "diff" or "json" is output or data, "sh" holds
commands of other programs, and one without a language commands of ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = [
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
]
_BLOCK = re.compile(r"((?:^ *<!--[^\n]*-->\n)*)^( *)```([a-z]*)[^\n]*\n(.*?)^\2```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- (not run|run by|ranks): (.+?) -->")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str]

    @property
    def name(self) -> str:
        """Where the block begins."""
        return f"{self.page}:{self.line}"


def blocks(page: str, language: str | None = None) -> list[Block]:
    """Return a page's blocks in order, all or those of a language ("" for those without one)."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        marks, indent, kind, body = match.groups()
        line = text.count("\n", 0, match.start(3)) + 1
        body = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
        found.append(Block(page, line, kind, body, dict(_MARK.findall(marks))))
    return [block for block in found if language in (None, block.language)]


def small_llama() -> Any:
    """Return the configuration of the pages' model at a small size."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=2048, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )


def names_of_the_pages() -> dict[str, Any]:
    """Return what blocks of Python use without making it: packages, a small model, two batches, a loss."""
    import torch
    import transformers
    from torch import nn

    import shardwise as sw

    class Llama(transformers.LlamaForCausalLM):
        """With a method beside `forward`."""

        def encode(self, tokens: torch.Tensor) -> Any:
            return self.model(tokens)

    torch.manual_seed(0)
    tokens = torch.arange(16).reshape(2, 8)
    return {
        "sw": sw,
        "torch": torch,
        "nn": nn,
        "F": nn.functional,
        "LlamaDecoderLayer": transformers.models.llama.modeling_llama.LlamaDecoderLayer,
        "build_model": lambda: Llama(small_llama()),
        "loss_of": lambda out, targets: nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten()),
        "tokens": tokens,
        "targets": tokens,
        "batches": [(tokens, tokens)] * 2,
        "send": lambda name, tensor: None,
    }
