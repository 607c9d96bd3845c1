"""The exchange of tokens between ranks of experts in a dry run, which has no values to route them by: routing is taken
to be balanced."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import Tensor
from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface

from shardwise.plan.dry_run.recorder import Recorder

_NAME = "shardwise_balanced"


class BalancedExchange(AllToAllEP):
    """transformers' own exchange. What it reads to the host is that this rank sends as many (token, expert) pairs to
    every rank, itself included, as it receives from it."""

    def __init__(self, recorder: Recorder, *of_module: Any) -> None:
        super().__init__(*of_module)
        self._recorder = recorder

    def _dispatch_tokens(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        pairs, ranks = top_k_index.numel(), self.ep_mesh.size()
        sizes = [pairs // ranks + (rank < pairs % ranks) for rank in range(ranks)]
        with self._recorder.answering([*sizes, *sizes]):  # sent and received
            return super()._dispatch_tokens(hidden_states, top_k_index, top_k_weights)  # type: ignore[no-untyped-call]


def registered(recorder: Recorder) -> str:
    """Register the exchange with transformers, for one dry run. Returns its name there."""
    EPImplementationInterface.register(_NAME, partial(BalancedExchange, weakref.proxy(recorder)))
    return _NAME
