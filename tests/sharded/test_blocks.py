"""Blocks of few bits: codes equal those of bitsandbytes, and encoding decoded numbers gives the same blocks again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.sharded.extensions.blocks import BLOCK_NUMEL, NF4, SCALE_BYTES, Coder, block_bytes

KINDS = ["nf4", "int8"]
BITSANDBYTES = (
    "00000111111112222233344445556667788899aaabbbccccddddeeeeeeefffff"
    "000000011111111112222223333344444555566667778888999aaaabbbbccccc"
)
"""Codes that bitsandbytes 0.50 computes from `lines()` in blocks of 64, two codes a byte."""


def lines() -> Tensor:
    return torch.stack([torch.linspace(-1, 1, 64), torch.linspace(-0.5, 0.25, 64)]).flatten()


def encoded(numbers: Tensor, kind: str) -> Tensor:
    blocks = torch.zeros(-(-numbers.numel() // BLOCK_NUMEL), block_bytes(kind), dtype=torch.uint8)
    Coder.on(torch.device("cpu"), kind).encode(numbers, blocks)
    return blocks


def decoded(blocks: Tensor, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    numbers = torch.empty(len(blocks) * BLOCK_NUMEL, dtype=dtype)
    Coder.on(torch.device("cpu"), kind).decode(blocks, numbers)
    return numbers


def test_codes_are_those_of_bitsandbytes() -> None:
    codes = encoded(lines(), "nf4")[:, :-SCALE_BYTES]
    assert bytes(codes.flatten().tolist()).hex() == BITSANDBYTES


def test_codes_are_those_of_the_library_itself() -> None:
    """Where it is installed. Scales are bf16 here, so the largest of each block is made one that bf16 has."""
    functional = pytest.importorskip("bitsandbytes.functional")
    rows = torch.randn(2048, BLOCK_NUMEL, generator=torch.Generator().manual_seed(0)) * 0.02
    largest = rows.abs().amax(1, keepdim=True).bfloat16().float()
    weight = torch.where(rows.abs() >= rows.abs().amax(1, keepdim=True), largest * rows.sign(), rows)
    weight = weight.clamp(-largest, largest)
    theirs, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", quant_storage=torch.uint8)
    ours = encoded(weight.flatten(), "nf4")
    assert torch.equal(ours[:, :-SCALE_BYTES].flatten(), theirs.flatten())
    assert torch.equal(decoded(ours, "nf4"), functional.dequantize_4bit(theirs, state).flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_came_out_of_blocks_gives_them_again(kind: str, dtype: torch.dtype) -> None:
    numbers = (torch.randn(BLOCK_NUMEL * 300, generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype)
    numbers[: 3 * BLOCK_NUMEL] *= torch.tensor([0.0, 1e-4, 300.0]).repeat_interleave(BLOCK_NUMEL).to(dtype)
    blocks = encoded(numbers, kind)
    again = decoded(blocks, kind, dtype)
    assert torch.equal(encoded(again, kind), blocks)
    error = (again.double() - numbers.double()).norm() / numbers.double().norm()
    assert error < (0.1 if kind == "nf4" else 0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_block_may_be_a_part_and_there_may_be_many(kind: str) -> None:
    numbers = torch.randn(2**13 * BLOCK_NUMEL + 100, generator=torch.Generator().manual_seed(2))
    blocks = encoded(numbers, kind)
    assert torch.equal(blocks[-2:], encoded(numbers[-100:], kind))
    whole = decoded(blocks, kind)
    assert torch.equal(whole[-128:], decoded(blocks[-2:], kind))
    assert not whole[numbers.numel() :].any()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_nan(kind: str) -> None:
    numbers = torch.zeros(2 * BLOCK_NUMEL)
    assert not decoded(encoded(numbers, kind), kind).any()
    numbers[3] = torch.nan
    again = decoded(encoded(numbers, kind), kind)
    assert again[:BLOCK_NUMEL].isnan().all(), "a block with NaN is NaN: nobody takes it for numbers"
    assert not again[BLOCK_NUMEL:].any()


def test_every_code_of_nf4_and_of_int8() -> None:
    sixteen = torch.tensor(NF4).repeat(4)
    assert torch.equal(decoded(encoded(sixteen * 0.5, "nf4"), "nf4"), sixteen * 0.5)
    steps = torch.cat([torch.arange(-127, -63), torch.arange(64, 128)]).float()
    assert torch.equal(decoded(encoded(steps, "int8"), "int8").round(), steps)
