"""Context parallelism: every rank of the axis "cp" has a slice of each sequence, and attention is over whole ones.

All of a transformer but its attention works on tokens one by one, so a rank computes it for its slice. In front of
attention one all_to_all trades slices for heads: each rank then has all tokens of some heads, attends as ever, and a
second all_to_all trades back. Nothing but attention knows of the axis, whose ranks are data ranks to the engine.
Source: DeepSpeed Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from shardwise.engine.setup.generation import is_generating
from shardwise.engine.setup.mesh_axes import CONTEXT
from shardwise.errors import ConfigError, UsageError

IGNORED = -100
"""The label of a token that the loss leaves out."""


def sequence_slice(batch: Mapping[str, Any], mesh: DeviceMesh, shift_labels: bool = True) -> dict[str, Any]:
    """Return this rank's slice of a batch's sequences. No communication.

    Args:
        batch: the same on all ranks of one "cp" group: "input_ids" (rows, length) or "inputs_embeds" (rows, length,
            width), and what else the model takes. Tensors of the shape (rows, length, ...) are sliced along dim 1,
            others stay. "cp" must divide the length.
        mesh: with an axis "cp", as `sw.mesh` makes it.
        shift_labels: "labels" (rows, length) are the tokens themselves, as causal language models take them. The slice
            then has "shift_labels", each token's next one, since the last token's is in the next slice; and
            "num_items_in_batch", the number of targets in the whole batch by "cp": transformers' models then return a
            loss whose mean over the "cp" ranks is the whole batch's. False: labels belong to the tokens where they are.

    Raises ConfigError if the mesh has no such axis, or the length cannot be divided.
    """
    if CONTEXT not in (mesh.mesh_dim_names or ()):
        raise ConfigError("sw.sequence_slice needs a mesh with an axis 'cp': pass sw.mesh(cp=...)")
    ranks, own = mesh[CONTEXT].size(), mesh.get_local_rank(CONTEXT)
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise ConfigError("sw.sequence_slice: the batch has no input_ids or inputs_embeds of (rows, length)")
    rows, length = tokens.shape[:2]
    if length % ranks:
        raise ConfigError(f"sequences of {length} tokens cannot be divided by cp={ranks}: pad them to a multiple of it")
    given = dict(batch)
    labels = given.get("labels")
    if shift_labels and isinstance(labels, Tensor):
        given["shift_labels"] = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        targets = (given["shift_labels"] != IGNORED).sum()
        given["num_items_in_batch"] = targets.clamp(min=1) / ranks
    where = slice(own * (length // ranks), (own + 1) * (length // ranks))
    return {
        name: value[:, where].contiguous() if isinstance(value, Tensor) and value.shape[:2] == (rows, length) else value
        for name, value in given.items()
    }


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mesh: DeviceMesh,
    attention: Callable[..., Tensor] = F.scaled_dot_product_attention,
    **options: Any,
) -> Tensor:
    """Attend over whole sequences of which each rank has a slice. Every rank of the mesh must call this.

    Args:
        query, key, value: (rows, heads, length / ranks, head size): this rank's slice, all heads. Key and value may
            have fewer heads, which must divide the query's (grouped queries); they are repeated where they are fewer
            than ranks.
        mesh: the axis "cp" alone: `mesh["cp"]`.
        attention: torch's, or one with its first three arguments. It gets all tokens of this rank's heads.
        options: passed on, such as is_causal=True. A mask is over whole sequences.

    Returns (rows, heads, length / ranks, head size).

    Raises ConfigError if the axis does not divide the heads.
    """
    query, key, value = _whole_sequences(query, key, value, mesh)
    if query.shape[1] != key.shape[1]:
        options["enable_gqa"] = True
    return _own_tokens(attention(query, key, value, **options).transpose(1, 2), mesh).transpose(1, 2)


def _whole_sequences(query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh) -> Iterator[Tensor]:
    """Trade slices of all heads for all tokens of some heads, in one collective."""
    ranks, heads, kv_heads = mesh.size(), query.shape[1], key.shape[1]
    repeats = ranks // math.gcd(kv_heads, ranks)
    if heads % ranks or (heads // kv_heads) % repeats:
        raise ConfigError(f"cp={ranks} does not divide {heads} heads of attention, {kv_heads} of keys and values")
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    given = (query, key, value)
    parts = [tensor.unflatten(1, (ranks, -1)).movedim(1, 0).reshape(ranks, -1) for tensor in given]
    traded = _all_to_all(torch.cat(parts, dim=1), mesh).split([part.shape[1] for part in parts], dim=1)
    for tensor, flat in zip(given, traded, strict=True):
        rows, all_heads, length, size = tensor.shape
        yield flat.reshape(ranks, rows, all_heads // ranks, length, size).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _own_tokens(attended: Tensor, mesh: DeviceMesh) -> Tensor:
    """Trade back. attended: (rows, length, own heads, head size); the result: (rows, own length, heads, head size)."""
    traded = _all_to_all(attended.unflatten(1, (mesh.size(), -1)).movedim(1, 0).contiguous(), mesh)
    return traded.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _all_to_all(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    traded: Tensor = functional.wait_tensor(functional.all_to_all_single_autograd(tensor, None, None, mesh.get_group()))
    return traded


# transformers ---------------------------------------------------------------------------------------------------------


def attend_across(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let the transformers models in `model` attend across the axis `mesh`. Other modules call `context_attention`.

    Raises ConfigError for a model that mixes tokens in other ways than by attention that goes through transformers'
    interface, or whose heads cannot be divided.
    """
    found: list[nn.Module] = []
    for module in model.modules():
        if hasattr(module, "set_attn_implementation") and not any(module in outer.modules() for outer in found):
            found.append(module)
            ContextParallel(module, mesh)


class ContextParallel:
    """Attention of one transformers model, and the masks for it.

    Layers are given, as their attention mask, either one over whole sequences, or the lengths of the documents of each
    row (rows, most documents), int64 in host memory, zeros behind: attention is then within each. Calls that use a
    cache (`generate`) have whole sequences on each rank and are left as they are.
    """

    _numbers = itertools.count()

    def __init__(self, model: Any, mesh: DeviceMesh) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        check_model(model, mesh.size())
        self._mesh = mesh
        self._is_sliced = False
        self._lengths = torch.zeros(0)
        self._documents: Tensor | None = None
        self._padding: Tensor | None = None
        name = f"sdpa-over-cp-{next(self._numbers)}"
        AttentionInterface.register(name, self.attend)
        AttentionMaskInterface.register(name, self.mask)
        model.set_attn_implementation(name)
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Number the tokens by where they are in the whole sequences, and learn those."""
        has_cache = kwargs.get("use_cache") or kwargs.get("past_key_values") is not None
        self._is_sliced = not has_cache and not is_generating(model)
        if not self._is_sliced:
            return None
        tokens = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        assert isinstance(tokens, Tensor)
        rows, length = tokens.shape[:2]
        positions, padding = kwargs.get("position_ids"), kwargs.get("attention_mask")
        if padding is not None and padding.ndim != 2:
            raise UsageError(f"attention_mask is {tuple(padding.shape)}: with a 'cp' axis pass (rows, length) or none")
        self._lengths = torch.full((rows, 1), length * self._mesh.size())
        self._documents, self._padding = None, None
        if padding is not None:
            self._padding = self._gathered(padding.bool())
        elif positions is not None:
            self._find_documents(self._gathered(positions.expand(rows, length)))
        if positions is None:
            first = length * self._mesh.get_local_rank()
            positions = torch.arange(first, first + length, device=tokens.device)[None]
        # With a mask for padding, transformers does not look for documents in what it takes for whole sequences.
        here = padding if padding is not None else torch.ones(rows, length, dtype=torch.bool, device=tokens.device)
        return args, {**kwargs, "position_ids": positions, "attention_mask": here, "use_cache": False}

    def _find_documents(self, positions: Tensor) -> None:
        """positions: (rows, whole length). Documents begin where they do not go on by one."""
        begins = positions.diff(prepend=positions[:, :1] - 1) != 1
        if not bool(begins.any()):
            return
        self._documents = begins.cumsum(1)
        counts = [torch.bincount(row) for row in self._documents.cpu()]
        self._lengths = nn.utils.rnn.pad_sequence([count[count > 0] for count in counts], batch_first=True)

    def _gathered(self, own: Tensor) -> Tensor:
        """Put slices (rows, own length) of all ranks together."""
        parts = [torch.empty_like(own) for _ in range(self._mesh.size())]
        dist.all_gather(parts, own.contiguous(), group=self._mesh.get_group())
        return torch.cat(parts, dim=1)

    def mask(self, batch_size: int, q_length: int, mask_function: Any, **options: Any) -> Tensor | None:
        """Return what layers are given as their attention mask."""
        from transformers import masking_utils

        if not self._is_sliced:
            return masking_utils.sdpa_mask(batch_size, q_length, mask_function=mask_function, **options)
        plain = (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
        if self._documents is not None and mask_function not in plain:
            within = masking_utils.packed_sequence_mask_function(self._documents)
            mask_function = masking_utils.and_masks(mask_function, within)
            options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        length = q_length * self._mesh.size()
        options |= {"kv_length": length, "q_offset": 0, "kv_offset": 0, "attention_mask": self._padding}
        mask = masking_utils.sdpa_mask(batch_size, length, mask_function=mask_function, **options)
        return self._lengths if mask is None else mask

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """query, key, value: (rows, heads, own length, head size). Returns (rows, own length, heads, head size)."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if not self._is_sliced:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        if attention_mask is None or options.get("position_bias") is not None:
            raise UsageError(f"{type(module).__name__} attends in a way of its own: it cannot be run with cp > 1")
        query, key, value = _whole_sequences(query, key, value, self._mesh)
        heads: Any = SimpleNamespace(
            num_key_value_groups=query.shape[1] // key.shape[1], is_causal=getattr(module, "is_causal", True)
        )

        def within(mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return sdpa_attention_forward(heads, query, key, value, mask, **options)[0]

        if attention_mask.dtype != torch.int64:
            attended = within(attention_mask, query, key, value)
        elif attention_mask.shape[1] == 1:
            attended = within(None, query, key, value)
        else:
            rows = []
            for row, lengths in enumerate(attention_mask.tolist()):
                sizes = [length for length in lengths if length]
                documents = zip(*(t[row : row + 1].split(sizes, dim=2) for t in (query, key, value)), strict=True)
                rows.append(torch.cat([within(None, *document) for document in documents], dim=1))
            attended = torch.cat(rows)
        return _own_tokens(attended, self._mesh), None


def check_model(model: Any, ranks: int) -> None:
    """Raise ConfigError if a transformers model cannot be run with slices of sequences on so many ranks."""
    config, name = model.config, type(model).__name__
    text = config.get_text_config()
    if config.is_encoder_decoder or text is not config:
        raise ConfigError(f"cp={ranks}: {name} has more than one sequence in a batch; models of one text are divided")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or any(isinstance(module, nn.Conv1d) for module in model.modules()):
        why = f"layers of {', '.join(sorted(kinds))}" if kinds else "convolutions over tokens"
        raise ConfigError(f"cp={ranks}: {name} has {why}, which would need the tokens of other ranks")
    if config._attn_implementation != "sdpa":
        raise ConfigError(
            f"cp={ranks}: {name} attends through {config._attn_implementation!r}: build it with "
            "attn_implementation='sdpa' if it has that"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(f"cp={ranks}: attention of {name} does not go through transformers' attention interface")
    heads = config.num_attention_heads // (getattr(model, "_tp_size", None) or 1)
    if heads % ranks:
        raise ConfigError(f"cp={ranks} does not divide the model's {heads} heads of attention on a rank")
