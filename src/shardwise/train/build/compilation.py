"""`train.compile`: torch.compile, block by block."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def compile_blocks(model: nn.Module) -> int:
    """Compile every repeated block in place; torch compiles the first of a kind and reuses it for the others.

    Block by block, because a sharded model gathers and frees parameters between blocks, which a graph over the whole
    model would have to break for anyway. Not collective. Call it after `sw.shard`.

    Returns:
        The number of blocks.
    """
    found = list(blocks(model))
    for block in found:
        block.compile()
    return len(found)


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost repeated blocks: the members of each ModuleList that is in no other one's member."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from blocks(child)
