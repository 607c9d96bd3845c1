"""Optimizers that need whole matrices (Muon, Adafactor, ...) over sharded parameters.

Each hidden matrix has an owner among the ranks. In a step the owners get the pieces of the matrices and of their
gradients, one exchange a unit, run the torch optimizer on the whole, unchanged, and send the pieces back. So the owner
computes what an unsharded run computes, bit for bit. Everything else is AdamW's, on pieces.

docs/design/whole-matrix.md tells why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from shardwise.engine.engine import Engine
from shardwise.engine.mesh import Mesh
from shardwise.engine.units.unit import Unit
from shardwise.errors import UsageError
from shardwise.optim.matrices.hidden import Hidden, NamedParamGroup, hidden_matrices, named_groups
from shardwise.optim.matrices.lane import AHEAD, Arrivals
from shardwise.optim.matrices.owned_state import OwnedState
from shardwise.optim.matrices.ownership import Balance, Cost, OwnerRank, product_cost
from shardwise.optim.matrices.unit_matrices import Lanes, UnitMatrices, pieces_of
from shardwise.sharded.optimizer_state import cut_state
from shardwise.sharded.parameter import ShardedParameter
from shardwise.sharded.placement import Placement, same_cut


def whole_matrix(
    kind: Callable[..., Optimizer],
    params: nn.Module | Iterable[Any],
    *,
    adamw: Mapping[str, Any] | None = None,
    hidden: Hidden | None = None,
    cost: Cost = product_cost,
    **options: Any,
) -> WholeMatrixOptimizer:
    """An optimizer that gives each hidden matrix, whole, to `kind`, and everything else to AdamW. No communication.

    Args:
        kind: a torch optimizer's class, `torch.optim.Muon` for example: anything that updates each matrix from its own
            gradient and state.
        params: the model's parameters, sharded or not, as a torch optimizer takes them: parameters, (name, parameter)
            or groups of them, whose options go to both optimizers; or the model itself. Parameters that are not sharded
            need names.
        adamw: options of `torch.optim.AdamW`.
        hidden: which parameters are hidden matrices, by fqn and parameter, instead of the rule: those of 2 dimensions
            that are no embedding (`nn.Embedding`, or tied to one) and no head (as many rows as an embedding has, or a
            module's name as in `optim.matrices.hidden.HEADS`).
        cost: of a step on a matrix of a shape, by which matrices are spread over ranks. Default: of matrix products.
        options: of `kind`: lr, weight_decay, ...

    Returns:
        A `torch.optim.Optimizer`: `kind`'s groups, then AdamW's. Learning rates, schedulers, clipping, `state_dict` and
        `sw.checkpoint` work as with any other. Every rank must call `step`.

    Raises:
        UsageError: there is no hidden matrix, or a parameter has no name.
    """
    return WholeMatrixOptimizer(kind, params, dict(adamw or {}), hidden, cost, options)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A hidden matrix: the model's parameter, and what stands for it in the inner optimizer."""

    number: int
    """Position among all of them; the same on every rank."""
    parameter: Tensor
    inner: nn.Parameter
    """Of the global shape; without memory, but while it is updated."""
    nothing: Tensor
    """What the inner one holds the rest of the time."""


@dataclass(frozen=True, slots=True)
class _UnitStep:
    """What a step does to one unit."""

    unit: UnitMatrices
    lanes: Lanes
    present: frozenset[int]
    """Its matrices that have a gradient: the same on every rank."""


class WholeMatrixOptimizer(Optimizer):
    """What `whole_matrix` returns."""

    def __init__(
        self,
        kind: Callable[..., Optimizer],
        params: nn.Module | Iterable[Any],
        adamw: dict[str, Any],
        hidden: Hidden | None,
        cost: Cost,
        options: dict[str, Any],
    ) -> None:
        model = params if isinstance(params, nn.Module) else None
        named = named_groups(params)
        chosen = hidden_matrices(model, named, hidden)
        if not chosen:
            raise UsageError(
                "whole_matrix found no hidden matrix among these parameters: use torch.optim.AdamW, or say which they "
                "are with hidden=lambda fqn, parameter: ..."
            )
        self._cost = cost
        self._matrices: dict[Tensor, _Matrix] = {}
        groups = [self._matrix_group(part) for part in _parts(named, lambda p: id(p) in chosen)]
        self._inner = kind([{**g, "params": [self._matrices[p].inner for p in g["params"]]} for g in groups], **options)
        rest = [_group(part) for part in _parts(named, lambda p: id(p) not in chosen)]
        self._adamw = AdamW(rest, **adamw) if rest else None
        self._matrix_groups = len(groups)
        for group, inner in zip(groups, self._inner.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})
        super().__init__([*groups, *(self._adamw.param_groups if self._adamw else [])], {})
        self.class_name = f"{type(self._inner).__name__}+AdamW"
        """Of the state that it keeps: the class in checkpoints."""
        self._jobs: list[tuple[UnitMatrices, Lanes]] | None = None
        self._owners: dict[Tensor, OwnerRank] = {}
        self._states: dict[Mesh, OwnedState] = {}

    def _matrix_group(self, part: NamedParamGroup) -> dict[str, Any]:
        for _, parameter in part.members:
            kept = parameter.local if isinstance(parameter, ShardedParameter) else parameter
            nothing = torch.zeros((), dtype=kept.dtype, device=kept.device).expand(parameter.shape)
            inner = nn.Parameter(nothing, requires_grad=parameter.requires_grad)
            self._matrices[parameter] = _Matrix(len(self._matrices), parameter, inner, nothing)
        return _group(part)

    # A step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both optimizers. Every rank must call this. Returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_groups()
        if self._adamw is not None:
            self._adamw.step()
        self._plan()
        self._update_plain()
        try:
            self._update_units()
        except BaseException:
            for state in self._states:  # peers would wait for this rank's pieces
                state.shard.abandon()
                state.replicate.abandon()
            raise
        return loss

    def _follow_groups(self) -> None:
        """Options that schedules have changed, and state that was loaded, are this optimizer's; the two inside have
        them from here."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=False):
            inner.update({key: value for key, value in group.items() if key != "params"})
        if self._adamw is not None:
            self._adamw.param_groups = self.param_groups[self._matrix_groups :]
            self._adamw.state = self.state

    def _update_plain(self) -> None:
        """Matrices that are not sharded: each rank has all of them."""
        plain = [parameter for parameter in self._matrices if not isinstance(parameter, ShardedParameter)]
        wholes = {p: (p.detach(), p.grad) for p in plain if p.grad is not None}
        for parameter, values in self._run(wholes).items():
            self.state[parameter] = values

    def _update_units(self) -> None:
        """Unit by unit; the exchanges of `AHEAD` units are under way at once."""
        jobs = [
            _UnitStep(unit, lanes, present)
            for unit, lanes in self._jobs or ()
            if (present := frozenset(i for i, face in enumerate(unit.faces) if face.grad is not None))
        ]
        coming = deque(self._gather(job) for job in jobs[:AHEAD])
        leaving: deque[tuple[_UnitStep, Arrivals | None]] = deque()
        across: deque[tuple[_UnitStep, Arrivals | None]] = deque()
        news: dict[Mesh, dict[int, Any]] = {mesh: {} for mesh in self._states}
        for index, job in enumerate(jobs):
            wholes = job.unit.assemble(coming.popleft(), job.present)
            if index + AHEAD < len(jobs):
                coming.append(self._gather(jobs[index + AHEAD]))
            news[job.unit.mesh] |= self._update(job.unit, wholes)
            leaving.append((job, job.unit.scatter(job.lanes.from_owners, wholes, job.present)))
            if len(leaving) == AHEAD:
                self._finish(leaving, across)
        while leaving:
            self._finish(leaving, across)
        while across:
            done, arrivals = across.popleft()
            done.unit.receive(arrivals)
        self._tell(news)

    @staticmethod
    def _gather(job: _UnitStep) -> Arrivals | None:
        return job.unit.gather(job.lanes.to_owners, job.present)

    @staticmethod
    def _finish(
        leaving: deque[tuple[_UnitStep, Arrivals | None]], across: deque[tuple[_UnitStep, Arrivals | None]]
    ) -> None:
        """The oldest unit's pieces are written, and go on to the replicas."""
        job, arrivals = leaving.popleft()
        job.unit.receive(arrivals)
        if len(across) == AHEAD:
            done, pieces = across.popleft()
            done.unit.receive(pieces)
        across.append((job, job.unit.replicate(job.lanes.to_replicas, job.present)))

    def _update(self, unit: UnitMatrices, wholes: dict[int, tuple[Tensor, Tensor]]) -> dict[int, Any]:
        """Step this rank's matrices. Returns what their state looks like now, by number, where that is not what it
        looked like before, here and so on other ranks."""
        mine: dict[Tensor, tuple[Tensor, Tensor]] = {unit.faces[index]: whole for index, whole in wholes.items()}
        state = self._states[unit.mesh]
        before = {parameter: state.describe(self.state.get(parameter, {})) for parameter in mine}
        news: dict[int, Any] = {}
        for parameter, values in self._run(mine).items():
            assert isinstance(parameter, ShardedParameter)
            owner = self._owners[parameter]
            self.state[parameter] = {name: state.wrap(parameter, owner, value) for name, value in values.items()}
            described = state.describe(self.state[parameter])
            if described != before[parameter]:
                news[self._matrices[parameter].number] = described
        return news

    def _run(self, wholes: Mapping[Tensor, tuple[Tensor, Tensor]]) -> dict[Tensor, dict[str, Any]]:
        """Have the inner optimizer update whole matrices in place, from their gradients. Returns their state."""
        if not wholes:
            return {}
        for parameter, (whole, gradient) in wholes.items():
            inner = self._matrices[parameter].inner
            inner.data, inner.grad = whole, gradient
            kept = self.state.get(parameter)
            if kept:
                self._inner.state[inner] = {name: _unwrapped(value) for name, value in kept.items()}
        try:
            self._inner.step()
            return {parameter: dict(self._inner.state[self._matrices[parameter].inner]) for parameter in wholes}
        finally:
            self._inner.state.clear()
            for parameter in wholes:
                matrix = self._matrices[parameter]
                matrix.inner.data, matrix.inner.grad = matrix.nothing, None

    def _tell(self, news: Mapping[Mesh, Mapping[int, Any]]) -> None:
        """Ranks tell one another what the state of their matrices looks like now: a short message between hosts."""
        every = list(self._matrices)
        for mesh, state in self._states.items():
            for number, described in state.tell(news[mesh]).items():
                parameter = every[number]
                assert isinstance(parameter, ShardedParameter)
                if number not in news[mesh]:
                    self.state[parameter] = state.mirror(parameter, self._owners[parameter], described)

    # Who owns what ------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Give every matrix an owner. The same on every rank; collective only in that it allocates."""
        if self._jobs is not None:
            self._check_placements()
            return
        self._assign()
        units = {mesh: [unit for unit in self._units() if unit.mesh is mesh] for mesh in self._states}
        lanes = {mesh: Lanes(mesh, of_mesh) for mesh, of_mesh in units.items()}
        self._jobs = [(unit, lanes[mesh]) for mesh, of_mesh in units.items() for unit in of_mesh]
        self._placements = {p: p.placement for p in self._owners if isinstance(p, ShardedParameter)}

    def _by_unit(self) -> dict[Unit, list[ShardedParameter]]:
        found: dict[Unit, list[ShardedParameter]] = {}
        for parameter in self._matrices:
            if isinstance(parameter, ShardedParameter):
                assert isinstance(parameter.unit, Unit)
                found.setdefault(parameter.unit, []).append(parameter)
        return found

    def _units(self) -> list[UnitMatrices]:
        return [
            UnitMatrices(_mesh_of(unit), faces, [self._owners[face] for face in faces])
            for unit, faces in self._by_unit().items()
        ]

    def _assign(self) -> None:
        """No communication."""
        if self._owners:
            return
        balances: dict[Mesh, Balance] = {}
        for unit, faces in self._by_unit().items():
            mesh = _mesh_of(unit)
            shards = mesh.shard.world_size
            balance = balances.setdefault(mesh, Balance(mesh.replicate.world_size, shards))
            self._states.setdefault(mesh, OwnedState(mesh))
            held = []
            for face in faces:
                held.append([0] * shards)
                for rank, start, stop in pieces_of(face.placement):
                    held[-1][rank] = stop - start
            costs = [self._cost(tuple(face.shape)) if face.requires_grad else 0 for face in faces]
            self._owners.update(zip(faces, balance.owners(costs, held), strict=True))

    def _check_placements(self) -> None:
        for parameter, placement in self._placements.items():
            if parameter.placement is not placement:
                raise UsageError(
                    f"{parameter.fqn!r} was sharded anew after this optimizer's first step: build the optimizer after "
                    "the last sw.shard"
                )

    @property
    def exchange_bytes(self) -> int:
        """Of memory that it keeps for exchanges, from the first step on. No communication."""
        return sum({lanes: lanes.nbytes for _, lanes in self._jobs or ()}.values())

    def state_placement(self, parameter: Tensor, shape: tuple[int, ...]) -> Placement | None:
        """Where state of that shape of a parameter is to lie; None where as the parameter does. No communication."""
        if not isinstance(parameter, ShardedParameter) or parameter not in self._matrices:
            return None
        self._assign()
        assert isinstance(parameter.unit, Unit)
        state = self._states[_mesh_of(parameter.unit)]
        return state.placement(parameter.fqn, shape, self._owners[parameter])

    # State from elsewhere -----------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's: of this optimizer's own state_dict, or of one of an unsharded model with full tensors, of which
        each rank keeps those of the matrices that it owns. Every rank must be given equal numbers. No communication.

        Raises UsageError for pieces that were cut otherwise.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        given = dict(state_dict["state"])
        matrices = {i: p for i, p in enumerate(parameters) if p in self._matrices}
        of_matrices = {matrices[i]: given.pop(i) for i in matrices if i in given}
        placed = {p: self.cut_state(p, values) for p, values in of_matrices.items()}
        super().load_state_dict({**state_dict, "state": given})
        self.state.update(placed)

    def cut_state(self, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of one of its parameters as this rank keeps it: of full tensors the owner's are all, others none.
        Every rank must be given equal numbers. No communication. Raises as `load_state_dict`."""
        if parameter in self._matrices:
            return {name: self._place(parameter, name, value) for name, value in state.items()}
        return cut_state(parameter, state) if isinstance(parameter, ShardedParameter) else dict(state)

    def _place(self, parameter: Tensor, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.numel() == 1:
            return value.clone() if isinstance(value, Tensor) else value
        placement = self.state_placement(parameter, tuple(value.shape))
        if placement is None:
            return value.to(parameter.device, copy=True)
        if isinstance(value, ShardedParameter):
            if same_cut(value.placement, placement):
                return value
            raise UsageError(
                f"the optimizer's state {name!r} of {placement.fqn!r} has another owner, or was cut into pieces: save "
                "and load with sw.checkpoint"
            )
        whole = value.reshape(-1)[placement.fragment.start : placement.fragment.stop]
        return ShardedParameter(whole.to(parameter.device, copy=True), placement)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UsageError once the optimizer is built."""
        if hasattr(self, "class_name"):
            self._no_more_groups()
        super().add_param_group(param_group)

    @staticmethod
    def _no_more_groups() -> NoReturn:
        raise UsageError("matrices were given to ranks already: build a new optimizer with all parameters")


def _parts(named: list[NamedParamGroup], wanted: Callable[[Tensor], bool]) -> list[NamedParamGroup]:
    """The groups with the members that are wanted; none that is empty."""
    parts = [replace(group, members=[member for member in group.members if wanted(member[1])]) for group in named]
    return [part for part in parts if part.members]


def _group(part: NamedParamGroup) -> dict[str, Any]:
    return {**part.options, "params": [parameter for _, parameter in part.members]}


def _unwrapped(value: Any) -> Any:
    return value.local.view(value.shape) if isinstance(value, ShardedParameter) else value


def _mesh_of(unit: Unit) -> Mesh:
    assert isinstance(unit.listener, Engine)
    return unit.listener.mesh
