"""How much memory the ranks of `shardwise generate` take, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common.process_tree import watched
from tests.generation.rig import save_llama

MIB = 2**20
BLOCKS, WIDTH = 24, 512
SIZES = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": BLOCKS, "num_attention_heads": 8}
BLOCK_BYTES = 4 * 16 * WIDTH**2
"""A block's parameters in fp32, without its norms: 4 square matrices and 3 of four times the size."""


def largest(model: Path, ranks: int) -> int:
    """Return the largest resident set of a process that takes part, in bytes."""
    command = "from shardwise.cli.main import main; main()"
    options = ("--prompt", "some words", "--prompt", "others", "--batch-size", "1", "--max-new-tokens", "4")
    words = ["-c", command, "generate", str(model), *options, "--no-do-sample", "--ranks", str(ranks)]
    return watched([*words, "--out", str(model / f"{ranks}.jsonl")], 240).largest_bytes


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_a_rank_holds_its_share_and_the_units_in_flight(tmp_path: Path) -> None:
    """Beside what a model of two small blocks takes: half of the weights, the block at hand and the next one."""
    save_llama(tmp_path / "large", **SIZES)
    save_llama(tmp_path / "small")
    weights = (tmp_path / "large" / "model.safetensors").stat().st_size
    assert weights == pytest.approx(BLOCKS * BLOCK_BYTES, rel=0.02)
    for ranks, share in ((1, weights), (2, weights / 2 + 2 * BLOCK_BYTES)):
        taken = largest(tmp_path / "large", ranks) - largest(tmp_path / "small", ranks)
        print(f"{ranks} ranks: {taken / MIB:.1f} MiB, share and units {share / MIB:.1f} MiB")
        assert taken < share + 24 * MIB
    assert 24 * MIB < BLOCKS * BLOCK_BYTES / 4
