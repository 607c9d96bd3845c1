"""Mixed precision as data: which dtype computes, travels and is kept."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase

from shardwise.errors import ConfigError

SHORT_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
"""Short names of dtypes, by torch's names."""
FEW_BITS = ("nf4", "int8")
"""Kinds of blocks that frozen weights can be kept in."""
_ALIASES = {"half": "float16"} | {alias: name for name, short in SHORT_NAMES.items() for alias in (name, short)}


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of what one call of `sw.shard` makes units of.

    Every field but the last three takes a name ("bf16", "fp32", "fp16", "fp64") or a torch dtype. After construction
    each is a torch name ("bfloat16") or None.
    """

    param: str | None = None
    """Gathered parameters and compute. None: the dtype in which each parameter is stored."""
    reduce: str | None = None
    """Gradients while they travel. None: the compute dtype."""
    master: str | None = None
    """The shards that the optimizer updates. None: each parameter's stored dtype. Frozen ones are never upcast."""
    output: str | None = None
    """Floating-point outputs of the module given to `sw.shard` are cast to it. None: left alone."""
    buffers: str | None = None
    """Floating-point buffers are cast to it when the model is sharded. None: left alone."""
    cast_inputs: bool = True
    """Cast floating-point inputs of the module given to `sw.shard` to `param`."""
    frozen: str | None = None
    """"nf4" or "int8": frozen weights of linear layers are kept and gathered in blocks of 64 such codes with a scale
    (0.53 and 1.03 bytes an element), and computed with in `param`. Embeddings and heads stay as they are. None: all
    frozen ones stay in their stored dtype."""
    keep: tuple[str, ...] = ()
    """Names of parameters in the module given to `sw.shard`, or patterns of names ("*.router.weight"), that are
    computed with in the dtype of their master, whatever `param` says: the module that uses them casts around them."""

    def __post_init__(self) -> None:
        given: object = self.keep
        if not isinstance(given, tuple | list) or not all(isinstance(pattern, str) for pattern in given):
            raise ConfigError(f"precision.keep = {self.keep!r} is not a tuple of parameters' names or patterns of them")
        object.__setattr__(self, "keep", tuple(self.keep))
        if self.frozen is not None and self.frozen not in FEW_BITS:
            near = difflib.get_close_matches(str(self.frozen), FEW_BITS, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"precision.frozen = {self.frozen!r} is none of {', '.join(FEW_BITS)}{hint}")
        for field in fields(self):
            if field.name not in {"cast_inputs", "frozen", "keep"}:
                object.__setattr__(self, field.name, dtype_name(getattr(self, field.name), f"precision.{field.name}"))

    def keeps(self, name: str) -> bool:
        """Whether the parameter of this name is computed with in the dtype of its master."""
        return any(fnmatchcase(name, pattern) for pattern in self.keep)


def dtype_name(value: object, where: str) -> str | None:
    """The torch name of a dtype given by name or as a torch dtype; None stays None. Raises ConfigError."""
    if value is None:
        return None
    text = str(value).removeprefix("torch.")
    if text in _ALIASES:
        return _ALIASES[text]
    near = difflib.get_close_matches(text, _ALIASES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{where} = {value!r} is none of the dtypes fp32, bf16, fp16, fp64{hint}")


def short_dtype_name(dtype: object) -> str | None:
    """The short name ("bf16", "fp8") of a torch dtype or of its name; None for any other, such as integers and None."""
    name = str(dtype).removeprefix("torch.")
    return "fp8" if name.startswith("float8_") else SHORT_NAMES.get(name)
