"""Context parallelism: every rank of the axis "cp" has a slice of each sequence, and attention is over whole ones.

All of a transformer but its attention works on tokens one by one, so a rank computes it for its slice. In front of
attention one all_to_all trades slices for heads: each rank then has all tokens of some heads, attends as ever, and a
second all_to_all trades back. Nothing but attention knows of the axis, whose ranks are data ranks to the engine.
Source: DeepSpeed Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

import inspect
import math
import sys
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
_ATTENDS = "_shardwise_attends_across"
"""Attribute of a model that attends across slices."""
_NAME = "sdpa-over-cp-"
"""Beginning of the name that the attention of a group of ranks has in transformers."""
_KNOWN: dict[str, ContextParallel] = {}
"""By name of a process group."""


def sequence_slice(batch: Mapping[str, Any], mesh: DeviceMesh, shift_labels: bool = True) -> dict[str, Any]:
    """Return this rank's slice of a batch's sequences. No communication.

    Args:
        batch: the same on all ranks of one "cp" group: "input_ids" (rows, length) or "inputs_embeds" (rows, length,
            width), and what else the model takes. Tensors of the shape (rows, length, ...), or of one row, are sliced
            along dim 1, others stay. "cp" must divide the length.
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
    tokens = batch.get("inputs_embeds") if batch.get("input_ids") is None else batch["input_ids"]
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
    where, whole = slice(own * (length // ranks), (own + 1) * (length // ranks)), {(rows, length), (1, length)}
    return {
        name: value[:, where].contiguous() if isinstance(value, Tensor) and tuple(value.shape[:2]) in whole else value
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
    """Attend over whole sequences, of which each rank has a slice. Every rank of the mesh must call this.

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
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module not in inside:
            inside.update(module.modules())
            if not hasattr(module, _ATTENDS):
                check_model(module, mesh.size())
                _over(mesh).attach(module)


def _over(mesh: DeviceMesh) -> ContextParallel:
    name: str = mesh.get_group().group_name
    if name not in _KNOWN or _KNOWN[name].mesh != mesh:
        _KNOWN[name] = ContextParallel(mesh, f"{_NAME}{name}")
    return _KNOWN[name]


class ContextParallel:
    """Attention across the slices of one group of ranks, and the masks for it, of all models that are divided so.

    Layers are given, as their attention mask, either one over whole sequences, or the lengths of the documents of each
    row (rows, most documents), int64 in host memory, zeros behind: attention is then within each. So a layer that is
    computed again, in backward, sees what its own forward saw. Calls that use a cache (`generate`) have whole sequences
    on each rank and are left as they are.
    """

    def __init__(self, mesh: DeviceMesh, name: str) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        self.mesh = mesh  # not the group: held to the end of the process, it would make torch abort
        self._name = name
        self._is_sliced = False
        """Whether a forward of slices is in progress. What follows is about that."""
        self._length = 0
        """Of whole sequences, in tokens."""
        self._documents: Tensor | None = None
        """Numbers of the documents that the tokens of whole sequences belong to, (rows, length); None: one each."""
        self._document_lengths = torch.zeros(0)
        self._padding: Tensor | None = None
        """Which tokens of whole sequences are there, (rows, length); None: all."""
        AttentionInterface.register(name, self.attend)
        AttentionMaskInterface.register(name, self.mask)

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """Return this one: a model's copy finds it by the same name."""
        return self

    def attach(self, model: Any) -> None:
        """Let a model attend so."""
        model.set_attn_implementation(self._name)
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        model.register_forward_hook(self._after_forward, always_call=True)
        setattr(model, _ATTENDS, True)

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Number the tokens by where they are in the whole sequences, and learn those."""
        names = inspect.signature(model.forward).parameters
        given = dict(zip(names, args, strict=False)) | kwargs
        has_cache = given.get("use_cache") or given.get("past_key_values") is not None
        self._is_sliced = not has_cache and not is_generating(model)
        tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        if not self._is_sliced or not isinstance(tokens, Tensor):
            return None
        rows, length = tokens.shape[:2]
        positions, padding = given.get("position_ids"), given.get("attention_mask")
        if padding is not None and padding.ndim != 2:
            raise UsageError(f"attention_mask is {tuple(padding.shape)}: with a 'cp' axis pass (rows, length) or none")
        self._length = length * self.mesh.size()
        self._documents, self._padding = None, None
        if padding is not None:
            self._padding = self._gathered(padding.bool())
        elif positions is not None:
            self._find_documents(self._gathered(positions.expand(rows, length)))
        if positions is None:
            first = length * self.mesh.get_local_rank()
            positions = torch.arange(first, first + length, device=tokens.device)[None]
        # With a mask for padding, transformers does not look for documents in what it takes for whole sequences.
        here = padding if padding is not None else torch.ones(rows, length, dtype=torch.bool, device=tokens.device)
        return (), {**given, "position_ids": positions, "attention_mask": here, "use_cache": False}

    def _after_forward(self, *_: object) -> None:
        self._is_sliced = False

    def _find_documents(self, positions: Tensor) -> None:
        """positions: (rows, whole length). Documents begin where they do not go on by one."""
        begins = positions.diff(prepend=positions[:, :1] - 1) != 1
        if bool(begins.any()):
            self._documents = begins.cumsum(1)
            counts = [torch.bincount(row) for row in self._documents.cpu()]
            found = [count[count > 0] for count in counts]
            self._document_lengths = nn.utils.rnn.pad_sequence(found, batch_first=True)

    def _gathered(self, own: Tensor) -> Tensor:
        """Put slices (rows, own length) of all ranks together."""
        parts = [torch.empty_like(own) for _ in range(self.mesh.size())]
        dist.all_gather(parts, own.contiguous(), group=self.mesh.get_group())
        return torch.cat(parts, dim=1)

    def mask(self, batch_size: int, q_length: int, mask_function: Any, **options: Any) -> Tensor | None:
        """Return what layers are given as their attention mask."""
        from transformers import masking_utils

        if not self._is_sliced:
            return masking_utils.sdpa_mask(batch_size, q_length, mask_function=mask_function, **options)
        of_encoder = "allow_is_bidirectional_skip" in options  # transformers has no documents there
        documents = None if of_encoder else self._documents
        options |= {"kv_length": self._length, "q_offset": 0, "kv_offset": 0, "attention_mask": self._padding}
        mask = None
        if documents is None or mask_function is not masking_utils.causal_mask_function:
            if documents is not None:
                within = masking_utils.packed_sequence_mask_function(documents)
                mask_function = masking_utils.and_masks(mask_function, within)
                options["allow_is_causal_skip"] = False
            mask = masking_utils.sdpa_mask(batch_size, self._length, mask_function=mask_function, **options)
        if mask is not None:
            return mask
        return torch.full((batch_size, 1), self._length) if documents is None else self._document_lengths

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """query, key, value: (rows, heads, own length, head size). Returns (rows, own length, heads, head size)."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if self._is_sliced and (attention_mask is None or options.get("position_bias") is not None):
            raise UsageError(f"{type(module).__name__} attends in a way of its own: it cannot be run with cp > 1")
        has_lengths = attention_mask is not None and attention_mask.dtype == torch.int64
        if attention_mask is None or not (has_lengths or attention_mask.shape[-1] == key.shape[2] * self.mesh.size()):
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        query, key, value = _whole_sequences(query, key, value, self.mesh)
        heads: Any = SimpleNamespace(
            num_key_value_groups=query.shape[1] // key.shape[1], is_causal=getattr(module, "is_causal", True)
        )

        def within(mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return sdpa_attention_forward(heads, query, key, value, mask, **options)[0]

        if not has_lengths:
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
        return _own_tokens(attended, self.mesh), None


_OF_A_WHOLE_ROW = ("ForSequenceClassification", "ForMultipleChoice", "ForQuestionAnswering")


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
    if name.endswith(_OF_A_WHOLE_ROW) or any(type(m).__name__.endswith("Pooler") for m in model.modules()):
        raise ConfigError(f"cp={ranks}: {name} picks tokens of the whole sequence, which would be on other ranks")
    if (
        any(map(_numbers_positions, model.modules()))
        or "position_ids" not in inspect.signature(model.forward).parameters
    ):
        raise ConfigError(f"cp={ranks}: {name} numbers positions itself, and would do so by slice")
    implementation = str(config._attn_implementation)
    if implementation != "sdpa" and not implementation.startswith(_NAME):
        raise ConfigError(
            f"cp={ranks}: {name} attends through {implementation!r}: build it with attn_implementation='sdpa', if it "
            "has that"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(f"cp={ranks}: attention of {name} does not go through transformers' attention interface")
    if heads_on_a_rank(model) % ranks:
        raise ConfigError(
            f"cp={ranks} does not divide the model's {heads_on_a_rank(model)} heads of attention on a rank"
        )


def heads_on_a_rank(model: Any) -> int:
    """Return how many heads of attention a rank of a transformers model has, of those that a tensor axis divides."""
    heads: int = model.config.num_attention_heads // (getattr(model, "_tp_size", None) or 1)
    return heads


def _numbers_positions(module: nn.Module) -> bool:
    """Whether the module makes positions from tokens or from their mask, as RoBERTa's and OPT's embeddings do."""
    embeddings = getattr(module, "position_embeddings", None)
    return getattr(embeddings, "padding_idx", None) is not None or "LearnedPositional" in type(module).__name__
