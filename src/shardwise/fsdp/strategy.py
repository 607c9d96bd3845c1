"""What is sharded and in which dtypes, as data: strategies (which of parameters, gradients and optimizer state), and
mixed precision (dtypes of compute, of communication and of what is stored)."""

from __future__ import annotations

import difflib
import enum
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import overload

from shardwise.errors import ConfigError

# Strategies -----------------------------------------------------------------------------------------------------------

LEAST_SLOTS = 2
"""Fewest arena slots per size class: one unit computes while the next one is gathered."""


@dataclass(frozen=True, slots=True)
class _Traits:
    sharded: bool
    replicated: bool
    reshards_after_forward: bool
    has_full_gradients: bool


class Strategy(enum.Enum):
    """How model state is spread over the ranks (ZeRO stages: arXiv:1910.02054; hybrid: arXiv:2304.11277).

    The value is the lower-case name used in configurations. Each member's traits tell the engine what to do.
    """

    NO_SHARD = "no_shard"
    """Everything replicated (DDP)."""
    SHARD_OPTIMIZER = "shard_optimizer"
    """ZeRO-1: gathered parameters and full-size gradient buffers stay; masters and optimizer state are sharded."""
    SHARD_GRAD_OP = "shard_grad_op"
    """ZeRO-2: gathered parameters stay until the optimizer steps; gradients and optimizer state are sharded."""
    FULL_SHARD = "full_shard"
    """ZeRO-3: a unit's parameters are gathered while it runs."""
    HYBRID_SHARD = "hybrid_shard"
    """FULL_SHARD inside a shard group, replicated across groups."""
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"
    """SHARD_GRAD_OP inside a shard group, replicated across groups."""

    @property
    def sharded(self) -> bool:
        """Whether the shard group has more than one rank."""
        return _TRAITS[self].sharded

    @property
    def replicated(self) -> bool:
        """Whether there is a replicate group."""
        return _TRAITS[self].replicated

    @property
    def reshards_after_forward(self) -> bool:
        """Whether gathered parameters are freed after forward and gathered again in backward. Otherwise they stay until
        the weights change, in a slot per unit instead of a few per size class."""
        return _TRAITS[self].reshards_after_forward

    @property
    def has_full_gradients(self) -> bool:
        """Whether every unit has a full-size gradient buffer of its own."""
        return _TRAITS[self].has_full_gradients


_TRAITS = {
    # sharded, replicated, reshards_after_forward, has_full_gradients
    Strategy.NO_SHARD: _Traits(False, True, False, False),
    Strategy.SHARD_OPTIMIZER: _Traits(True, False, False, True),
    Strategy.SHARD_GRAD_OP: _Traits(True, False, False, False),
    Strategy.FULL_SHARD: _Traits(True, False, True, False),
    Strategy.HYBRID_SHARD: _Traits(True, True, True, False),
    Strategy.HYBRID_SHARD_ZERO2: _Traits(True, True, False, False),
}

# Precision ------------------------------------------------------------------------------------------------------------

SHORT_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
"""Short names of dtypes, by torch's names."""
FEW_BITS = ("nf4", "int8")
"""Block formats that frozen weights can be kept in."""
_ALIASES = {"half": "float16"} | {alias: name for name, short in SHORT_NAMES.items() for alias in (name, short)}


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of the units that one `sw.shard` call makes.

    Every field but the last three takes a name ("bf16", "fp32", "fp16", "fp64") or a torch dtype. After construction
    each is a torch name ("bfloat16") or None.
    """

    param: str | None = None
    """Dtype of gathered parameters and of compute. None: each parameter's stored dtype."""
    reduce: str | None = None
    """Dtype in which gradients are reduced. None: the compute dtype."""
    master: str | None = None
    """Dtype of the shards that the optimizer updates. None: each parameter's stored dtype. Frozen parameters are never
    upcast."""
    output: str | None = None
    """Dtype to which floating-point outputs of the module given to `sw.shard` are cast. None: they are not cast."""
    buffers: str | None = None
    """Dtype to which floating-point buffers are cast when the model is sharded. None: they are not cast."""
    cast_inputs: bool = True
    """Whether floating-point inputs of the module given to `sw.shard` are cast to `param`."""
    frozen: str | None = None
    """"nf4" or "int8": frozen weights of linear layers are kept and gathered as blocks of 64 such codes with a scale
    (0.53 and 1.03 bytes an element) and decoded to `param` for compute. Embeddings and heads stay as they are. None:
    all frozen parameters stay in their stored dtype."""
    keep: tuple[str, ...] = ()
    """Names of parameters in the module given to `sw.shard`, or patterns of names ("*.router.weight"). These are
    computed with in the dtype of their master, whatever `param` says; the module that uses them casts around them."""

    def __post_init__(self) -> None:
        given: object = self.keep
        if not isinstance(given, tuple | list) or not all(isinstance(pattern, str) for pattern in given):
            raise ConfigError(
                f"precision.keep = {self.keep!r}: must be a tuple of parameter names or patterns of names"
            )
        object.__setattr__(self, "keep", tuple(self.keep))
        if self.frozen is not None and self.frozen not in FEW_BITS:
            near = difflib.get_close_matches(str(self.frozen), FEW_BITS, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"precision.frozen = {self.frozen!r}: must be one of {', '.join(FEW_BITS)}{hint}")
        for field in fields(self):
            if field.name not in {"cast_inputs", "frozen", "keep"}:
                object.__setattr__(self, field.name, dtype_name(getattr(self, field.name), f"precision.{field.name}"))

    def keeps(self, name: str) -> bool:
        """Whether `keep` names this parameter, so that it is computed with in the dtype of its master."""
        return any(fnmatchcase(name, pattern) for pattern in self.keep)


@overload
def dtype_name(value: str, where: str) -> str: ...
@overload
def dtype_name(value: object, where: str) -> str | None: ...
def dtype_name(value: object, where: str) -> str | None:
    """Return the torch name of a dtype given by name or as a torch dtype; None stays None. Raises ConfigError."""
    if value is None:
        return None
    text = str(value).removeprefix("torch.")
    if text in _ALIASES:
        return _ALIASES[text]
    near = difflib.get_close_matches(text, _ALIASES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{where} = {value!r}: must be one of the dtypes fp32, bf16, fp16, fp64{hint}")
