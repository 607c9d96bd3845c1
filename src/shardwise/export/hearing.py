"""The part of a model that hears: spectrograms to the features that stand in place of audio tokens.

A trace knows the shapes of tensors and no numbers. Attention that transformers computes block by block, with a special
case for a last block that is not full, is replaced while it runs by one that is the same for every length.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from shardwise.export import grids

MASKS = ("input_features_mask", "feature_attention_mask")
"""Names of the argument that says which frames of a spectrogram, or which of its features, are no padding."""
_BLOCKS = ("GraniteSpeechConformerAttention", "GraniteSpeechPlusConformerAttention")
"""Classes of attention within blocks of a length, which is their `context_size`."""


class Hearing(nn.Module):
    """Spectrograms to the features that stand in place of audio tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model
        grids.attend_whole(model)

    def forward(self, input_features: Tensor, frames_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return `audio_features`, [tokens, width], those of one clip after those of another.

        Args:
            input_features: [clips, bins, frames] or [clips, frames, bins], as the model takes them.
            frames_mask: [clips, frames] or [clips, tokens] int64, 0 at padding; None if the model takes none.
        """
        with _of_any_length(self._model):
            return {"audio_features": heard(self._model, input_features, frames_mask)}


def takes_mask(model: Any) -> bool:
    """Whether the mask is for frames, and features are computed with it."""
    base = model.base_model
    return not hasattr(base, "get_audio_features") or bool(_masks(base))


def heard(model: Any, input_features: Tensor, mask: Tensor | None) -> Tensor:
    """Return the features of clips, [tokens, width], those of one clip after those of another."""
    base = model.base_model
    if not hasattr(base, "get_audio_features"):
        return _by_tower(base, input_features, mask)
    given = {} if mask is None else dict.fromkeys(_masks(base), mask)
    features: Tensor = base.get_audio_features(input_features, **given, return_dict=True).pooler_output
    if mask is not None and not given:  # it is of features
        features = features[mask.bool()]
    return features.flatten(0, -2)


def _masks(base: Any) -> list[str]:
    """Return the arguments for masks of the method that computes features."""
    return [name for name in MASKS if name in inspect.signature(base.get_audio_features).parameters]


def _by_tower(base: Any, input_features: Tensor, mask: Tensor | None) -> Tensor:
    """Return the features of clips as Qwen2-Audio's forward computes them, which has no method for that."""
    from transformers.masking_utils import create_bidirectional_mask

    if mask is None:
        raise TypeError("its forward takes no mask")
    tower = base.audio_tower
    lengths, counts = tower._get_feat_extract_output_lengths(mask.sum(-1))
    steps = (input_features.shape[-1] - 2) // 2 + 1
    attention = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=input_features.new_zeros(input_features.shape[0], steps, 1),
        attention_mask=(torch.arange(steps) < lengths[:, None]).long(),
    )
    hidden = tower(input_features, attention_mask=attention).last_hidden_state
    features: Tensor = base.multi_modal_projector(hidden)
    return features[torch.arange(features.shape[1]) < counts[:, None]]


# What takes the place of transformers' own functions while an encoder runs --------------------------------------------


@contextlib.contextmanager
def _of_any_length(model: Any) -> Iterator[None]:
    """Put functions that a trace can follow in place of those of transformers."""
    with contextlib.ExitStack() as stack:
        for kind in {type(module) for module in model.modules()}:
            module = sys.modules[kind.__module__]
            if kind.__name__ in _BLOCKS:
                stack.enter_context(mock.patch.object(kind, "forward", _in_blocks))
            if "cu_seqlens" in inspect.signature(kind.forward).parameters:
                ours: dict[str, Any] = {**grids.ATTENTION, "get_audio_cu_seqlens": ends_of_windows}
                for name in ours.keys() & vars(module).keys():
                    stack.enter_context(mock.patch.object(module, name, ours[name]))
        yield


def _in_blocks(self: Any, hidden_states: Tensor, attention_dists: Tensor) -> Tensor:
    """Do what the forward of Granite Speech's attention does, for a last block of any length."""
    length, size = hidden_states.shape[1], self.context_size
    blocks = (length + size - 1) // size
    padded = nn.functional.pad(self.pre_norm(hidden_states), (0, 0, 0, blocks * size - length))
    padded = padded.unflatten(1, (blocks, size)).flatten(0, 1)
    query, key, value = (
        part.unflatten(-1, (self.num_heads, self.dim_head)).transpose(1, 2)
        for part in (self.to_q(padded), *self.to_kv(padded).chunk(2, dim=-1))
    )
    apart = torch.einsum("bhcd,crd->bhcr", query, self.rel_pos_emb(attention_dists)) * self.scale
    inside = (torch.arange(blocks * size) < length).view(blocks, 1, 1, size).repeat(hidden_states.shape[0], 1, 1, 1)
    apart = apart.masked_fill(~inside, -torch.finfo(apart.dtype).max)
    attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=apart, scale=self.scale)
    attended = attended.transpose(1, 2).flatten(2).unflatten(0, (-1, blocks)).flatten(1, 2)
    returned: Tensor = self.dropout(self.to_out(attended[:, :length]))
    return returned


def ends_of_windows(
    chunk_lengths: Tensor, feature_lens: Tensor, n_window_infer: int, n_window: int, *_: Any, **__: Any
) -> Tensor:
    """Return where windows of attention begin among the features of all clips, and the end of the last: as many for
    each clip as it has chunks, empty ones at its end.

    Takes what the function of its name in transformers does: frames of each chunk, and of each clip.
    """
    steps = chunk_lengths
    for _step in range(3):
        steps = (steps + 1) // 2
    per_chunk = steps.view(feature_lens.shape[0], -1)
    counts = per_chunk.sum(1)
    begins = counts.cumsum(0) - counts
    windows = torch.arange(per_chunk.shape[1]) * steps.max() * (n_window_infer // (2 * n_window))
    starts = begins[:, None] + torch.minimum(windows[None], counts[:, None])
    return torch.cat([starts.flatten(), counts.sum()[None]])
