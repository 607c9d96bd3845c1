"""Inputs of blocks in the host's memory until backward, played on CPUs: the same bits, in order, gone meanwhile."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.model_tools import activation_offload
from shardwise.model_tools.activation_checkpointing import checkpoint_units
from tests.engine.rig import Net, batch, on_ranks, same_tensors, seeded, squares
from tests.engine.streams import Order, played

DEPTH = 6


def train(mode: str, copied: bool = False) -> tuple[list[Tensor], dict[str, Tensor], Order]:
    losses = []
    with played() as order:
        model = checkpoint_units(sw.shard(seeded(lambda: Net(DEPTH))), mode)
        if copied:
            model = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for step in range(3):
            two = [squares(model, batch(2 * step + i)) for i in (0, 1)]
            two[0].backward(retain_graph=True)
            two[0].backward()
            two[1].backward()
            with torch.no_grad():
                losses += [*(loss.detach() for loss in two), squares(model, batch(step))]
            optimizer.step()
            optimizer.zero_grad()
        weights = {name: p.full_tensor() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    return losses, weights, order


@on_ranks(2)
def test_the_same_bits_in_order() -> None:
    usual, offloaded = train("full"), train("offload")
    assert offloaded[2].races == []
    assert len(offloaded[2].operations) == len(usual[2].operations) + 2, "a stream for each direction"
    assert all(torch.equal(a, b) for a, b in zip(usual[0], offloaded[0], strict=True))
    same_tensors(usual[1], offloaded[1])


@on_ranks(1)
def test_inputs_are_gone_between_forward_and_backward_and_come_one_ahead() -> None:
    inputs: list[weakref.ref[Any]] = []
    there: list[int] = []
    nbytes: list[int] = []
    with played():
        model: Any = checkpoint_units(sw.shard(seeded(lambda: Net(DEPTH))), "offload")

        def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs.append(weakref.ref(args[0].untyped_storage()))
            nbytes.append(args[0].nbytes)

        for block in model.blocks:
            block.register_forward_pre_hook(note)
        x = batch(0)
        loss = squares(model, x)
        assert sum(held() is not None for held in inputs[: DEPTH - 1]) == 0, "all but the last one's have left"
        taken = activation_offload.KeptInput.take

        def count(kept: activation_offload.KeptInput) -> Tensor:
            there.append(sum(known().is_coming for known in offload._order if known() is not None))
            return taken(kept)

        offload = model.blocks[0].forward.args[2]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(activation_offload.KeptInput, "take", count)
            loss.backward()
    assert there == [2] * (DEPTH - 1) + [1], "its own, and the next one's"
    held = sw.memory(model).host["activations"]
    assert sum(nbytes[:DEPTH]) <= held <= 1.25 * sum(nbytes[:DEPTH])


@on_ranks(1)
def test_a_copy_of_the_model_has_streams_of_its_own() -> None:
    own, copied = train("offload"), train("offload", copied=True)
    assert copied[2].races == []
    assert all(torch.equal(a, b) for a, b in zip(own[0], copied[0], strict=True))


@on_ranks(1)
def test_an_order_that_is_missing_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train("offload")[2].races == []
    monkeypatch.setattr(activation_offload.ActivationOffload, "_let_go", lambda self: setattr(self, "_leaving", None))
    assert train("offload")[2].races != []


def test_batches_of_many_sizes_need_memory_of_few() -> None:
    with played() as order:
        buffers = activation_offload._HostBuffers()
        sizes = set()
        for nbytes in range(1000, 2000, 7):
            memory = buffers.take(nbytes, torch.device("cpu"), order.current)
            assert nbytes <= memory.nbytes <= 1.26 * nbytes
            sizes.add(memory.data_ptr())
            buffers.give_back(memory, order.current.record_event())
    assert len(sizes) <= 6
