"""Names of classes that make the largest unit smaller, by the sizes of the modules inside it."""

from __future__ import annotations

from torch import nn

from shardwise.plan.dry_run.smaller_units import smaller_units


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 256), nn.Linear(64, 256), nn.Linear(256, 64)


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(64, count)
        self.each = nn.ModuleList(Expert() for _ in range(count))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(nn.Linear(256, 256).weight.detach())
        self.router = nn.Linear(64, 4)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(8, 8).weight[0].detach())


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention, self.inner = Norm(), Attention(), inner


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


def test_the_largest_unit_is_split_as_deep_as_less_is_gathered() -> None:
    model = Model(Block(Experts(8)), Block(Experts(8)))
    # Experts together are hardly smaller than a block; attention and an expert are, and a linear layer more so.
    assert smaller_units(model, None) == ((("Attention", "Expert"), 2), (("Block", "Linear"), 3))
    assert smaller_units(model, [Experts, Attention])[0] == (("Attention", "Expert"), 2)


def test_linear_layers_leave_less_where_blocks_have_slots_of_two_sizes() -> None:
    """Attention and the expert are smaller than the block, but need slots each."""
    assert smaller_units(Model(Block(Expert()), Block(Expert())), None) == ((("Block", "Linear"), 3),)


def test_a_unit_with_nothing_inside_that_would_be_smaller_stays() -> None:
    assert smaller_units(Model(Fused(), Fused()), None) == ()
    assert smaller_units(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), None) == ()
    assert smaller_units(nn.Linear(4, 4), None) == ()
