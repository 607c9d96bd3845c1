"""Tensors that a model ties and that files hold under several names."""

from __future__ import annotations

import torch

from shardwise.checkpoint.format import tensor_files
from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.format.matching import Matched
from shardwise.checkpoint.format.tensor_files import TensorFiles
from shardwise.checkpoint.io.storage import Directory
from shardwise.errors import CheckpointError


def check_ties(where: object, opened: Contents | Directory, files: TensorFiles, matched: Matched) -> int:
    """Raise CheckpointError if a tensor that is tied in the model, and stored under several names, is not the same
    under all of them. No communication: this rank's elements are compared.

    Returns the most bytes that were staged at one time to compare them.
    """
    staged_bytes = 0
    for piece, others in matched.also:
        own = [place for held, place in matched.wanted if held is piece]
        values = []
        for places in (own, others):
            twin = piece.with_tensor(torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype, device="cpu"))
            read = tensor_files.read(opened, files, [(twin, place) for place in places])
            values.append(twin.tensor)
            staged_bytes = max(staged_bytes, read.peak_staged_bytes + 2 * twin.tensor.nbytes)
        if not torch.equal(*values):
            raise CheckpointError(
                f"{where} holds different numbers for {own[0].name!r} and {others[0].name!r}, which the model "
                "ties: build the model with tie_word_embeddings=False"
            )
    return staged_bytes
