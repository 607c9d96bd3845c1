"""Pictures of any size: their patches one after another, and how many rows and columns of them each picture has.

An encoder of such pictures (Qwen2-VL, arXiv:2409.12191) computes places, windows and lengths from the numbers in
`grid_thw`. A trace knows the shapes of tensors and no numbers, so while it runs, the functions of transformers that
compute these are replaced by ones whose results have shapes that follow from those of the inputs, and each attention
over pieces of the sequence by one attention with a mask.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


class SeeingPatches(nn.Module):
    """Patches of pictures to the features that stand in place of their tokens."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self._encoder = encoder
        attend_whole(encoder)

    def forward(self, pixel_values: Tensor, image_grid_thw: Tensor) -> dict[str, Tensor]:
        """Return `image_features` [tokens, width], and `deepstack_features` [layers, tokens, width] if there are any.

        Args:
            pixel_values: [patches, width], of all pictures.
            image_grid_thw: [pictures, 3] int64: 1, and rows and columns of patches.
        """
        with _followed(sys.modules[type(self._encoder).__module__], pixel_values.shape[0]):
            seen = self._encoder(pixel_values, grid_thw=image_grid_thw, return_dict=True)
        made = {"image_features": seen.pooler_output}
        deeper = getattr(seen, "deepstack_features", None)
        return {**made, "deepstack_features": torch.stack(list(deeper))} if deeper else made


def attend_whole(encoder: Any) -> None:
    """Let attention over pieces keep its own forward: transformers' exporter puts those for pieces of one length in
    place."""
    for module in encoder.modules():
        if "cu_seqlens" in inspect.signature(type(module).forward).parameters:
            module.forward = type(module).forward.__get__(module)


def take_deeper(model: Any) -> None:
    """Let a decoder's forward also take `deepstack_features` [layers, batch, length, width], zero where no picture is,
    in place of those at pictures alone and a mask: a trace has no numbers to choose by."""
    reader = model.get_decoder()
    chosen = reader._deepstack_process

    def added(hidden: Tensor, mask: Tensor | None, deeper: Tensor) -> Tensor:
        return hidden + deeper if mask is None else chosen(hidden, mask, deeper)

    def given(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        deeper = kwargs.pop("deepstack_features", None)
        return args, kwargs if deeper is None else {**kwargs, "deepstack_visual_embeds": list(deeper.unbind())}

    reader._deepstack_process = added
    reader.register_forward_pre_hook(given, with_kwargs=True)


# What takes the place of transformers' own functions while an encoder runs --------------------------------------------


@contextlib.contextmanager
def _followed(module: Any, patches: int) -> Iterator[None]:
    """Put functions that a trace can follow in place of those of a module of transformers that has an encoder of so
    many patches."""
    ours: dict[str, Any] = {**_Places(patches).functions(), **ATTENTION}
    with contextlib.ExitStack() as stack:
        for name in ours.keys() & vars(module).keys():
            stack.enter_context(mock.patch.object(module, name, ours[name]))
        yield


class _Places:
    """Where each of so many patches is. Every function takes what the one of its name in transformers' `vision_utils`
    does."""

    def __init__(self, patches: int) -> None:
        self._patches = patches

    def functions(self) -> dict[str, Callable[..., Any]]:
        return {
            "get_vision_position_ids": self.positions,
            "get_vision_cu_seqlens": self.ends,
            "get_vision_attention_seqlens": lambda grid_thw, *_, **__: (self.ends(grid_thw), 0),
            "get_vision_window_index": self.windows,
            "get_vision_interpolation_indices_and_weights": self.interpolated,
        }

    def ends(self, grid_thw: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return where pictures begin, and the end of the last: [pictures + 1]."""
        return nn.functional.pad(grid_thw.prod(1).cumsum(0), (1, 0))

    def positions(self, grid_thw: Tensor, spatial_merge_size: int, include_temporal: bool = False, **_: Any) -> Tensor:
        """Return the row and column of each patch, [patches, 2]; with a 0 for the frame before them if asked."""
        row, column = self._rows_and_columns(grid_thw, spatial_merge_size)[1:]
        return torch.stack([torch.zeros_like(row), row, column] if include_temporal else [row, column], -1)

    def windows(
        self, grid_thw: Tensor, spatial_merge_size: int, window_size: int, patch_size: int, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the order of tokens by windows, and of each the place in patches where its window begins, with the
        end after them: ends of windows, each as often as the window has tokens."""
        unit, side = spatial_merge_size**2, window_size // spatial_merge_size // patch_size
        tokens = torch.arange(self._patches // unit)
        begin = self.ends(grid_thw)[:-1] // unit
        owner = _segment(begin, tokens)
        within, columns = tokens - begin[owner], grid_thw[owner, 2] // spatial_merge_size
        row, column = within // columns, within % columns
        # As numbers that grow from window to window: a picture's own begin where those before it end.
        across = (columns + side - 1) // side
        window = (row // side) * across + column // side
        order = torch.argsort((begin[owner] + window) * self._patches + tokens)
        key = (begin[owner] + window)[order]
        starts = (key[None, :] < key[:, None]).sum(1) * unit
        return order, torch.cat([starts, torch.full((1,), self._patches)])

    def interpolated(
        self,
        grid_thw: Tensor,
        num_grid_per_side: int,
        mode: str = "bilinear",
        align_corners: bool = False,
        spatial_merge_size: int = 1,
        padding: str = "border",
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return which learned places, and how much of each, are a patch's: [patches, taps] both."""
        from transformers.vision_utils import _interpolation_axis_taps_weights as taps

        owner, row, column = self._rows_and_columns(grid_thw, spatial_merge_size)
        rows, of_rows = taps(row, grid_thw[owner, 1], num_grid_per_side, mode, align_corners, padding)
        columns, of_columns = taps(column, grid_thw[owner, 2], num_grid_per_side, mode, align_corners, padding)
        places = rows[:, :, None] * num_grid_per_side + columns[:, None, :]
        return places.flatten(1), (of_rows[:, :, None] * of_columns[:, None, :]).flatten(1)

    def _rows_and_columns(self, grid: Tensor, merged: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the picture, the row and the column of each patch, [patches] each: patches of one token come one
        after another."""
        patch, begin = torch.arange(self._patches), self.ends(grid)[:-1]
        owner = _segment(begin, patch)
        token, inner = (patch - begin[owner]) // merged**2, (patch - begin[owner]) % merged**2
        across = grid[owner, 2] // merged
        return owner, token // across * merged + inner // merged, token % across * merged + inner % merged


def _segment(begins: Tensor, places: Tensor) -> Tensor:
    """Return which segment each place is in, from where segments begin."""
    return (begins[None, :] <= places[:, None]).sum(1) - 1


def _by_mask(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **given: Any
) -> tuple[Tensor, None]:
    """Return attention within segments, whose ends are `cu_seq_lens_q`, over the whole sequence."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    torch._check(query.shape[2] > 1)
    segment = _segment(given["cu_seq_lens_q"], torch.arange(query.shape[2]))
    mask = (segment[:, None] == segment[None, :])[None, None]
    scaling = given.get("scaling")
    return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, is_causal=False)[0], None


ATTENTION = {
    "is_flash_attention_requested": lambda _: True,  # its way is one attention over the whole sequence
    "get_max_seqlen": lambda *_, **__: 0,
    "ALL_ATTENTION_FUNCTIONS": type("_Interface", (), {"get_interface": staticmethod(lambda *_: _by_mask)}),
}
