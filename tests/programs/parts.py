"""The modules that programs are made of, each from (width,) to (width,) per row, and what they share.

| kind | does with x | option |
|---|---|---|
| dense | tanh of a Linear | dtype of its own: "bf16", "fp64"; or "" |
| wide | a Linear up and one down | |
| norm | LayerNorm | |
| lookup | adds an Embedding's rows | |
| odd | a 0-d gain, an empty parameter, a buffer | |
| stat | divides by a running mean, a buffer | |
| dropout | Dropout | |
| chain | its children, one after another | |
| residual | x + its children | |
| twice | its child, twice | |
| experts | x + one of three heads | "rank", "step" or "all"; "list" or "raw", as in "rank-list" |
| depth | its children, or x in some actions | "step"; "rank": other ranks skip than run |
| checkpoint | its children under torch.utils.checkpoint | "reentrant" or "non-reentrant" |
| pack | its children's output in a container | one of `PACKS` |
| aux | its children; a head's loss goes to a list on the side | |
| method | a helper module's method `encode` | |
| bump | its children on a fresh x that they change in place | |
| stash | a matrix product whose backward keeps a view of the weight by itself | |
| hooked | its children under saved-tensor hooks of the user's own | |
| cut | x + its children, without gradients | "detach" or "no_grad" |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from tests.programs.cutting import cut_part, styles
from tests.programs.program import Node, Program

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
PACKS = ("tuple", "dict", "dataclass", "list", "namedtuple")
INPUTS, OUTPUTS, VOCABULARY, EXPERTS = 4, 3, 5, 3


class OnPurpose(Exception):
    """What programs raise."""


@dataclass
class Moment:
    """What a model's modules know beside their input: one object a model."""

    rank: int = 0
    """Whose batch this is."""
    action: int = 0
    ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    aux: list[Tensor] = field(default_factory=list)
    where: str = ""
    """"forward" or "backward": raise there, at module `at` (counted when entered)."""
    at: int = 0
    entered: int = 0


class Part(nn.Module):
    """A node's module."""

    def __init__(self, node: Node, width: int, moment: Moment) -> None:
        super().__init__()
        self.marked = node.unit
        self.option = node.option
        self.moment = moment
        self.parts = nn.ModuleList(part_of(child, width, moment) for child in node.children)
        self.make(width)

    def make(self, width: int) -> None:
        """Parameters and buffers of its own."""

    def forward(self, x: Tensor) -> Any:
        moment = self.moment
        here = moment.entered == moment.at
        moment.entered += 1
        if here and moment.where == "forward":
            raise OnPurpose
        if here and moment.where == "backward" and x.requires_grad and torch.is_grad_enabled():
            x = x * 1.0
            x.register_hook(_raise)
        return self.compute(x)

    def compute(self, x: Tensor) -> Any:
        return self.children_of(x)

    def children_of(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = unpacked(part(x))
        return x


def _raise(grad: Tensor) -> Tensor:
    raise OnPurpose


class Chain(Part):
    pass


class Dense(Part):
    def make(self, width: int) -> None:
        self.linear = nn.Linear(width, width, dtype=DTYPES.get(self.option))

    def compute(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.to(self.linear.weight.dtype)).to(x.dtype))


class Wide(Part):
    def make(self, width: int) -> None:
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def compute(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Norm(Part):
    def make(self, width: int) -> None:
        self.norm = nn.LayerNorm(width)

    def compute(self, x: Tensor) -> Tensor:
        return self.norm(x)  # type: ignore[no-any-return]


class Lookup(Part):
    def make(self, width: int) -> None:
        self.table = nn.Embedding(VOCABULARY, width)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.table(self.moment.ids)


class Odd(Part):
    def make(self, width: int) -> None:
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.zeros(0, width))
        self.register_buffer("offset", torch.linspace(-1, 1, width))

    def compute(self, x: Tensor) -> Tensor:
        return x * self.gain + self.nothing.sum(0) + self.offset.to(x.dtype)


class Stat(Part):
    def make(self, width: int) -> None:
        self.register_buffer("mean", torch.ones(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.bias = nn.Parameter(torch.zeros(width))

    def compute(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.mean.lerp_(x.detach().abs().mean(0).to(self.mean.dtype), 0.25)
        return x / (1.0 + self.mean.to(x.dtype)) + self.bias


class Dropout(Part):
    def make(self, width: int) -> None:
        self.dropout = nn.Dropout(0.3)

    def compute(self, x: Tensor) -> Tensor:
        return self.dropout(x)  # type: ignore[no-any-return]


class Residual(Part):
    def compute(self, x: Tensor) -> Tensor:
        return x + self.children_of(x)


class Twice(Part):
    def compute(self, x: Tensor) -> Tensor:
        return self.children_of(self.children_of(x))


class Experts(Part):
    def make(self, width: int) -> None:
        self.routing, self.storing = self.option.split("-")
        if self.storing == "list":
            self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(EXPERTS))
        else:
            for number in range(EXPERTS):
                self.register_parameter(f"expert{number}", nn.Parameter(torch.randn(width, width) / width))

    def compute(self, x: Tensor) -> Tensor:
        if self.routing == "all":
            return x + sum((self.expert(number, x) for number in range(EXPERTS)), torch.zeros_like(x))
        by_rank = self.moment.rank if self.routing == "rank" else 0
        return x + self.expert((by_rank + self.moment.action) % EXPERTS, x)

    def expert(self, number: int, x: Tensor) -> Tensor:
        if self.storing == "list":
            return self.experts[number](x)  # type: ignore[no-any-return]
        return x @ getattr(self, f"expert{number}")  # type: ignore[no-any-return]


class Depth(Part):
    def compute(self, x: Tensor) -> Tensor:
        by_rank = self.moment.rank if self.option == "rank" else 0
        return x if (by_rank + self.moment.action) % 2 else self.children_of(x)


class Checkpoint(Part):
    def compute(self, x: Tensor) -> Tensor:
        return checkpoint(self.children_of, x, use_reentrant=self.option == "reentrant")  # type: ignore[no-any-return]


@dataclass
class Boxed:
    """What "dataclass" packs into."""

    value: Tensor
    note: str = ""


class Named(NamedTuple):
    """What "namedtuple" packs into."""

    value: Tensor
    length: int


class Pack(Part):
    def compute(self, x: Tensor) -> Any:
        return packed(self.children_of(x), self.option)


def packed(x: Tensor, how: str) -> Any:
    packs: dict[str, Callable[[], Any]] = {
        "": lambda: x,
        "tuple": lambda: (x, None),
        "dict": lambda: {"value": x, "length": len(x)},
        "dataclass": lambda: Boxed(x),
        "list": lambda: [x],
        "namedtuple": lambda: Named(x, len(x)),
    }
    return packs[how]()


def unpacked(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        return output["value"]  # type: ignore[no-any-return]
    return output.value if dataclasses.is_dataclass(output) else output[0]  # type: ignore[no-any-return, union-attr]


class Aux(Part):
    def make(self, width: int) -> None:
        self.head = nn.Linear(width, 1)

    def compute(self, x: Tensor) -> Tensor:
        x = self.children_of(x)
        self.moment.aux.append(self.head(x).square().mean())
        return x


class Helper(nn.Module):
    """Never called, but for its method."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def encode(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Method(Part):
    def make(self, width: int) -> None:
        self.helper = Helper(width)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.helper.encode(x)


class Bump(Part):
    def compute(self, x: Tensor) -> Tensor:
        return unpacked(self.inner(x + 0.0))

    def make(self, width: int) -> None:
        self.inner = Bumped(self.parts, self.marked)
        self.marked = False
        del self.parts


class Bumped(nn.Module):
    """Changes what it is given."""

    def __init__(self, parts: nn.ModuleList, marked: bool) -> None:
        super().__init__()
        self.parts, self.marked = parts, marked

    def forward(self, x: Tensor) -> Tensor:
        x.add_(0.5)
        for part in self.parts:
            x = unpacked(part(x))
        return x


class _Product(torch.autograd.Function):
    """x @ w, keeping w where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.transposed = weight.t()
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0] @ ctx.transposed, ctx.saved_tensors[0].t() @ grads[0]


class Stash(Part):
    def make(self, width: int) -> None:
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def compute(self, x: Tensor) -> Tensor:
        return x + _Product.apply(x, self.weight)  # type: ignore[no-any-return]


class Hooked(Part):
    def compute(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copy: copy):
            return self.children_of(x)


class Cut(Part):
    def compute(self, x: Tensor) -> Tensor:
        if self.option == "detach":
            return x + self.children_of(x).detach()
        with torch.no_grad():
            y = self.children_of(x)
        return x + y


PARTS: dict[str, type[Part]] = {
    kind.__name__.lower(): kind
    for kind in (
        Dense, Wide, Norm, Lookup, Odd, Stat, Dropout, Chain, Residual, Twice, Experts, Depth, Checkpoint, Pack, Aux,
        Method, Bump, Stash, Hooked, Cut,
    )
}  # fmt: skip


def part_of(node: Node, width: int, moment: Moment) -> Part:
    part = PARTS[node.kind](node, width, moment)
    if node.frozen:
        part.requires_grad_(False)
    return part


class Model(nn.Module):
    """A program's model: rows of INPUTS numbers to rows of OUTPUTS. Its last layer is never frozen."""

    def __init__(self, program: Program, moment: Moment) -> None:
        super().__init__()
        self.moment = moment
        self.output = program.output
        self.enter = nn.Linear(INPUTS, program.width)
        self.body = part_of(program.model, program.width, moment)
        self.leave = nn.Linear(program.width, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        return packed(self.leave(unpacked(self.body(self.enter(x)))), self.output)


def build(program: Program, tensor_mesh: DeviceMesh | None = None) -> Model:
    """The model, the same whoever builds it. Changes torch's default random state.

    tensor_mesh: what cuts some of its parts, if it is not None; every rank of it must call this.
    """
    torch.manual_seed(program.seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[program.dtype])
    try:
        model = Model(program, Moment())
    finally:
        torch.set_default_dtype(before)
    if tensor_mesh is not None:
        for node, part in _parts(program, model):
            if node.cut:
                cut_part(part, node.kind, node.cut, tensor_mesh)
    _tie(program, model)
    if program.lora:
        _adapt(program, model)
    return model


_LINEARS = {"dense": ("linear",), "wide": ("up", "down")}
_FOLLOWED = ("", "column", "row", "pair")
"""How a linear layer may be cut beside an adapter."""


def _adapt(program: Program, model: Model) -> None:
    """Add adapters, both of whose matrices are random, and freeze all else but the last layer."""
    import peft

    names = {module: name for name, module in model.named_modules()}
    targets = [
        f"{names[part]}.{own}"
        for node, part in _parts(program, model)
        if node.cut in _FOLLOWED
        for own in _LINEARS.get(node.kind, ())
    ]
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, lora_alpha=1, target_modules=["enter", *targets], init_lora_weights=False), model
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name.startswith("leave."))


def plan_of(program: Program, model: Model) -> dict[str, Any]:
    """What cuts the model, as `tp_plan` takes it."""
    names = {module: name for name, module in model.named_modules()}
    return {
        f"{names[part]}.{own}": style
        for node, part in _parts(program, model)
        if node.cut
        for own, style in styles(node.kind, node.cut).items()
    }


def _parts(program: Program, model: Model) -> Iterator[tuple[Node, Part]]:
    parts = [module for module in model.modules() if isinstance(module, Part)]
    return zip(program.model.walk(), parts, strict=True)


def _tie(program: Program, model: Model) -> None:
    first: dict[int, nn.Parameter] = {}
    for node, part in _parts(program, model):
        if node.tie:
            assert isinstance(part, Dense)
            part.linear.weight = first.setdefault(node.tie, part.linear.weight)
