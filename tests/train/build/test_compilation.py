from torch import nn

from shardwise.train.build.compilation import blocks, compile_blocks


def test_the_outermost_repeated_blocks_are_compiled() -> None:
    def block() -> nn.Module:
        return nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})

    model = nn.ModuleDict(
        {"encoder": nn.ModuleDict({"layers": nn.ModuleList([block(), block()])}), "head": nn.Linear(2, 2)}
    )
    layers = list(model["encoder"]["layers"])  # type: ignore[index]
    assert list(blocks(model)) == layers
    assert compile_blocks(model) == 2
    assert all(layer._compiled_call_impl is not None for layer in layers)
    assert model["head"]._compiled_call_impl is None
