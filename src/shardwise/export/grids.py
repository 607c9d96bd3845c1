"""Pictures of any size: their patches one after another, and how many rows and columns of them each picture has.

An encoder of such pictures (Qwen2-VL, arXiv:2409.12191) computes places, windows and lengths from the numbers in
`grid_thw`. A trace knows the shapes of tensors and no numbers, so while it runs, the functions of transformers that
compute these are replaced by ones whose results have shapes that follow from those of the inputs, and each attention
over pieces of the sequence by one attention with a mask.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


class SeeingPatches(nn.Module):
    """Patches of pictures to the features that stand in place of their tokens."""

    def __init__(self, model: Any, last: str) -> None:
        """
        Args:
            model: a transformers model.
            last: the name, in its base model, of the module that returns the features; "" = they are its encoder's
                `pooler_output`.
        """
        super().__init__()
        self._model = model
        self._encoder = encoder = model.get_encoder(modality="image")
        self._last = last
        attend_whole(encoder)

    def forward(self, pixel_values: Tensor, image_grid_thw: Tensor) -> dict[str, Tensor]:
        """Return `image_features` [tokens, width], and `deepstack_features` [layers, tokens, width] if there are any.

        Args:
            pixel_values: [patches, ...], of all pictures.
            image_grid_thw: [pictures, 3] int64: 1, and rows and columns of patches.
        """
        with _followed(sys.modules[type(self._encoder).__module__], pixel_values.shape[0]):
            if self._last:
                base = self._model.base_model
                given = {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw}
                features = _until(base, self._last, lambda: base.get_image_features(**given))
                return {"image_features": features.flatten(0, -2)}
            seen = self._encoder(pixel_values, grid_thw=image_grid_thw, return_dict=True)
        made = {"image_features": seen.pooler_output}
        deeper = getattr(seen, "deepstack_features", None)
        return {**made, "deepstack_features": torch.stack(list(deeper))} if deeper else made


def _until(base: nn.Module, last: str, run: Callable[[], object]) -> Tensor:
    """Return what a part of a base model returns while `run` runs, and go no further: models then separate pictures, by
    numbers that a trace does not have."""
    part = base.get_submodule(last)

    def end(*args: Any, **kwargs: Any) -> None:
        raise _Ended(part(*args, **kwargs))

    try:
        with mock.patch.dict(vars(base), {last: end}):  # it is found before the module of that name
            run()
    except _Ended as ended:
        return ended.returned
    raise ValueError(f"{last} was not called")


class _Ended(BaseException):
    """Carries features past what a model does with them."""

    def __init__(self, returned: Tensor) -> None:
        self.returned = returned


def seen_by(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, str | None, int]:
    """Return the features of pictures [tokens, width], the part of the base model that returns them, as `SeeingPatches`
    takes it (None if no part does), and for how many deeper layers there are others."""
    base, layers = model.base_model, 0
    returned: dict[str, Any] = {}

    def note(name: str, made: Any) -> None:
        nonlocal layers
        returned[name] = made if name else made.pooler_output
        layers = layers or len(getattr(made, "deepstack_features", None) or ())

    parts = {**dict(base.named_children()), "": model.get_encoder(modality="image")}
    with contextlib.ExitStack() as stack:
        for name, part in parts.items():
            stack.callback(part.register_forward_hook(lambda *called, name=name: note(name, called[-1])).remove)
        features = torch.cat(list(base.get_image_features(**given).pooler_output))
    tensors = {name: one.flatten(0, -2) for name, one in returned.items() if isinstance(one, Tensor)}
    same = [name for name, one in tensors.items() if torch.equal(one, features)]
    if "" in same:
        return features, "", layers
    return features, None if layers else next(iter(same), None), 0


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
        if hasattr(module, "PaddleOCRProjector"):
            forward = functools.partialmethod(_merged, _Places(patches))
            stack.enter_context(mock.patch.object(module.PaddleOCRProjector, "forward", forward))
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
        row, column = self.rows_and_columns(grid_thw, spatial_merge_size)[1:]
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

        owner, row, column = self.rows_and_columns(grid_thw, spatial_merge_size)
        rows, of_rows = taps(row, grid_thw[owner, 1], num_grid_per_side, mode, align_corners, padding)
        columns, of_columns = taps(column, grid_thw[owner, 2], num_grid_per_side, mode, align_corners, padding)
        places = rows[:, :, None] * num_grid_per_side + columns[:, None, :]
        return places.flatten(1), (of_rows[:, :, None] * of_columns[:, None, :]).flatten(1)

    def rows_and_columns(self, grid: Tensor, merged: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the picture, the row and the column of each patch, [patches] each: patches of one token come one
        after another."""
        patch, begin = torch.arange(self._patches), self.ends(grid)[:-1]
        owner = _segment(begin, patch)
        token, inner = (patch - begin[owner]) // merged**2, (patch - begin[owner]) % merged**2
        across = grid[owner, 2] // merged
        return owner, token // across * merged + inner // merged, token % across * merged + inner % merged


def _merged(projector: Any, places: _Places, features: Tensor, grid_thw: Tensor) -> Any:
    """Do what PaddleOCR-VL's projector does: patches come row by row, and those of a token are put side by side."""
    side = projector.merge_kernel_size[0]
    owner, row, column = places.rows_and_columns(grid_thw, side)
    order = places.ends(grid_thw)[owner] + row * grid_thw[owner, 2] + column
    together = projector.pre_norm(features)[order].reshape(-1, side**2 * features.shape[-1])
    return projector.linear_2(projector.act(projector.linear_1(together)))


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
