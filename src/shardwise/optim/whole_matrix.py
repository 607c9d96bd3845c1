"""Optimizers that need whole matrices (Muon, Adafactor, ...) over sharded parameters.

Each hidden matrix has an owner among the ranks. In a step the owners receive the pieces of their matrices and of the
gradients, in one exchange per unit, run the unchanged torch optimizer on whole matrices, and send the pieces back. So
an owner computes bit for bit what an unsharded run computes. AdamW updates all other parameters, on pieces.

docs/design/whole-matrix.md gives the reasons.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from shardwise.errors import UsageError, one_line
from shardwise.fsdp.collectives import Collectives
from shardwise.fsdp.engine import Engine
from shardwise.fsdp.mesh import Mesh
from shardwise.fsdp.sharded_parameter import Placement, ShardedParameter, same_cut
from shardwise.fsdp.unit import Unit
from shardwise.optim.matrices.hidden_matrices import Hidden, NamedParamGroup, hidden_matrices, named_groups
from shardwise.optim.matrices.lane import AHEAD, Arrivals
from shardwise.optim.matrices.owned_state import OwnedState
from shardwise.optim.matrices.ownership import Balance, Cost, OwnerRank, product_cost
from shardwise.optim.matrices.unit_matrices import Lanes, UnitMatrices, Wholes, axis_of, parts_of, pieces_of
from shardwise.sharded.extensions.optimizer_state import cut_state


def whole_matrix(
    kind: Callable[..., Optimizer],
    params: nn.Module | Iterable[Any],
    *,
    adamw: Mapping[str, Any] | None = None,
    hidden: Hidden | None = None,
    cost: Cost = product_cost,
    **options: Any,
) -> WholeMatrixOptimizer:
    """Return an optimizer that updates whole hidden matrices with `kind`, and all else with AdamW.

    Does not communicate.

    Args:
        kind: a torch optimizer class, such as `torch.optim.Muon`, that updates each matrix from its own gradient and
            state.
        params: the model, or its parameters as a torch optimizer takes them, sharded or not: parameters, (name,
            parameter) pairs, or groups of either, whose options go to both optimizers. Parameters that are not sharded
            need names.
        adamw: options of `torch.optim.AdamW`.
        hidden: tells from fqn and parameter which parameters are hidden matrices. By default, those of 2 dimensions
            that are neither an embedding (`nn.Embedding`, or tied to one) nor a head (as many rows as an embedding, or
            a module with a name in `optim.matrices.hidden_matrices.HEADS`).
        cost: cost of a step on a matrix of a given shape, by which matrices are spread over ranks. Default: the cost of
            matrix products.
        options: options of `kind`: lr, weight_decay, ...

    Returns:
        A `torch.optim.Optimizer`: `kind`'s groups, then AdamW's. Learning rates, schedulers, clipping, `state_dict` and
        `sw.checkpoint` work as with any other. Every rank must call `step`.

    Raises:
        UsageError: there is no hidden matrix, or an unsharded parameter has no name.
    """
    return WholeMatrixOptimizer(kind, params, dict(adamw or {}), hidden, cost, options)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A hidden matrix: the model's parameter, and its stand-in in the inner optimizer."""

    number: int
    """Position among all hidden matrices; the same on every rank."""
    parameter: Tensor
    full: nn.Parameter
    """Stand-in of the global shape. Has memory only while it is updated."""
    placeholder: Tensor
    """Data of `full` at all other times: one element, expanded."""


@dataclass(frozen=True, slots=True)
class _UnitStep:
    """One unit in one step."""

    unit: UnitMatrices
    lanes: Lanes
    present: frozenset[int]
    """Indices of the unit's matrices that have a gradient: the same on every rank."""


class WholeMatrixOptimizer(Optimizer):
    """The optimizer that `whole_matrix` returns."""

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
                "whole_matrix found no hidden matrix among these parameters: use torch.optim.AdamW, or choose them "
                "with hidden=lambda fqn, parameter: ..."
            )
        self._cost = cost
        self._matrices: dict[Tensor, _Matrix] = {}
        groups = [self._matrix_group(part) for part in _parts(named, lambda p: id(p) in chosen)]
        self._inner = kind([{**g, "params": [self._matrices[p].full for p in g["params"]]} for g in groups], **options)
        rest = [_group(part) for part in _parts(named, lambda p: id(p) not in chosen)]
        self._adamw = AdamW(rest, **adamw) if rest else None
        self._matrix_groups = len(groups)
        for group, inner in zip(groups, self._inner.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})
        super().__init__([*groups, *(self._adamw.param_groups if self._adamw else [])], {})
        self.class_name = f"{type(self._inner).__name__}+AdamW"
        """Name under which checkpoints record the optimizer's class."""
        self._jobs: list[tuple[UnitMatrices, Lanes]] | None = None
        self._owners: dict[Tensor, OwnerRank] = {}
        self._states: dict[Mesh, OwnedState] = {}

    def _matrix_group(self, part: NamedParamGroup) -> dict[str, Any]:
        for _, parameter in part.members:
            kept = parameter.local if isinstance(parameter, ShardedParameter) else parameter
            placeholder = torch.zeros((), dtype=kept.dtype, device=kept.device).expand(parameter.shape)
            full = nn.Parameter(placeholder, requires_grad=parameter.requires_grad)
            self._matrices[parameter] = _Matrix(len(self._matrices), parameter, full, placeholder)
        return _group(part)

    # A step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of both optimizers. Every rank must call this. Returns what the closure returns."""
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
        except BaseException as error:
            for state in self._states.values():  # peers would wait for this rank's pieces
                for group in state.groups:
                    group.abandon(one_line(error, with_type=True))
            raise
        return loss

    def _follow_groups(self) -> None:
        """Give both inner optimizers this optimizer's options, which schedules change, and AdamW its state, which loads
        replace."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=False):
            inner.update({key: value for key, value in group.items() if key != "params"})
        if self._adamw is not None:
            self._adamw.param_groups = self.param_groups[self._matrix_groups :]
            self._adamw.state = self.state

    def _update_plain(self) -> None:
        """Update matrices that are not sharded. Each rank has all of them."""
        plain = [parameter for parameter in self._matrices if not isinstance(parameter, ShardedParameter)]
        wholes = {p: (p.detach(), p.grad) for p in plain if p.grad is not None}
        for parameter, values in self._run(wholes).items():
            self.state[parameter] = values

    def _update_units(self) -> None:
        """Update sharded matrices unit by unit, with the exchanges of up to `AHEAD` units under way."""
        jobs = [
            _UnitStep(unit, lanes, present)
            for unit, lanes in self._jobs or ()
            if (present := frozenset(i for i, matrix in enumerate(unit.matrices) if matrix.grad is not None))
        ]
        gathering = deque(self._gather(job) for job in jobs[:AHEAD])
        scattering: deque[tuple[_UnitStep, Arrivals | None]] = deque()
        replicating: deque[tuple[_UnitStep, Arrivals | None]] = deque()
        changed: dict[Mesh, dict[int, Any]] = {mesh: {} for mesh in self._states}
        for index, job in enumerate(jobs):
            gathered = job.unit.assemble(gathering.popleft(), job.present)
            if index + AHEAD < len(jobs):
                gathering.append(self._gather(jobs[index + AHEAD]))
            wholes = job.unit.join(job.lanes, gathered, job.present)
            changed[job.unit.mesh] |= self._update(job.unit, wholes)
            job.unit.part(job.lanes, wholes, gathered, job.present)
            scattering.append((job, job.unit.scatter(job.lanes.from_owners, gathered, job.present)))
            if len(scattering) == AHEAD:
                self._finish(scattering, replicating)
        while scattering:
            self._finish(scattering, replicating)
        while replicating:
            done, arrivals = replicating.popleft()
            done.unit.receive(arrivals)
        self._exchange_descriptions(changed)

    @staticmethod
    def _gather(job: _UnitStep) -> Arrivals | None:
        return job.unit.gather(job.lanes.to_owners, job.present)

    @staticmethod
    def _finish(
        scattering: deque[tuple[_UnitStep, Arrivals | None]], replicating: deque[tuple[_UnitStep, Arrivals | None]]
    ) -> None:
        """Write the updated pieces of the oldest unit in `scattering`, and begin to send them to the replicas."""
        job, arrivals = scattering.popleft()
        job.unit.receive(arrivals)
        if len(replicating) == AHEAD:
            done, pieces = replicating.popleft()
            done.unit.receive(pieces)
        replicating.append((job, job.unit.replicate(job.lanes.to_replicas, job.present)))

    def _update(self, unit: UnitMatrices, wholes: Wholes) -> dict[int, Any]:
        """Step this rank's matrices of one unit.

        Returns, by number, the new description of each matrix's state that differs from the one before the step, which
        other ranks still hold.
        """
        mine: dict[Tensor, tuple[Tensor, Tensor]] = {unit.matrices[index]: whole for index, whole in wholes.items()}
        state = self._states[unit.mesh]
        before = {parameter: state.describe(self.state.get(parameter, {})) for parameter in mine}
        changed: dict[int, Any] = {}
        for parameter, values in self._run(mine).items():
            assert isinstance(parameter, ShardedParameter)
            owner = self._owners[parameter]
            self.state[parameter] = {name: state.wrap(parameter, owner, value) for name, value in values.items()}
            described = state.describe(self.state[parameter])
            if described != before[parameter]:
                changed[self._matrices[parameter].number] = described
        return changed

    def _run(self, wholes: Mapping[Tensor, tuple[Tensor, Tensor]]) -> dict[Tensor, dict[str, Any]]:
        """Update whole matrices in place from their gradients with the inner optimizer. Returns their state."""
        if not wholes:
            return {}
        for parameter, (whole, gradient) in wholes.items():
            full = self._matrices[parameter].full
            full.data, full.grad = whole, gradient
            kept = self.state.get(parameter)
            if kept:
                self._inner.state[full] = {name: _unwrapped(value) for name, value in kept.items()}
        try:
            self._inner.step()
            return {parameter: dict(self._inner.state[self._matrices[parameter].full]) for parameter in wholes}
        finally:
            self._inner.state.clear()
            for parameter in wholes:
                matrix = self._matrices[parameter]
                matrix.full.data, matrix.full.grad = matrix.placeholder, None

    def _exchange_descriptions(self, changed: Mapping[Mesh, Mapping[int, Any]]) -> None:
        """Exchange changed descriptions of matrices' state between hosts. Every rank must call this."""
        every = list(self._matrices)
        for mesh, state in self._states.items():
            for number, described in state.exchange(changed[mesh]).items():
                parameter = every[number]
                assert isinstance(parameter, ShardedParameter)
                if number not in changed[mesh]:
                    self.state[parameter] = state.mirror(parameter, self._owners[parameter], described)

    # Who owns what ------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Assign owners and allocate lanes in the first step; later, check placements. Every rank must call this."""
        if self._jobs is not None:
            self._check_placements()
            return
        self._assign()
        every = self._units()
        units = {mesh: [unit for unit in every if unit.mesh is mesh] for mesh in self._states}
        lanes = {mesh: Lanes(mesh, self._axis, of_mesh) for mesh, of_mesh in units.items()}
        self._jobs = [(unit, lanes[mesh]) for mesh, of_mesh in units.items() for unit in of_mesh]
        self._placements = {p: p.placement for p in self._owners if isinstance(p, ShardedParameter)}

    def _by_unit(self) -> dict[Unit, list[ShardedParameter]]:
        found: dict[Unit, list[ShardedParameter]] = {}
        for parameter in self._matrices:
            if isinstance(parameter, ShardedParameter):
                assert isinstance(parameter.unit, Unit)
                if parameter.unit.mesh is not _mesh_of(parameter.unit):
                    raise UsageError(
                        f"{parameter.fqn!r} is a matrix of experts over ranks of their own (sw.mesh(ep=...)), which is "
                        "not supported: use an elementwise optimizer such as AdamW for it"
                    )
                found.setdefault(parameter.unit, []).append(parameter)
        return found

    @property
    def _axis(self) -> Collectives | None:
        """The tensor axis along which some matrices are cut. Raises UsageError if there are several axes."""
        by_axes = {group.axes: group.fqns[0] for unit in self._by_unit() for group in unit.groups if group.axes}
        if len({axis for axes in by_axes for axis in axes}) > 1:
            raise UsageError(
                f"{', '.join(map(repr, by_axes.values()))}: DTensors over more than one tensor axis are not supported: "
                "use an elementwise optimizer such as AdamW"
            )
        return next(iter(by_axes), (None,))[0]

    def _units(self) -> list[UnitMatrices]:
        """Return the matrices by unit. Does not communicate."""
        axis = self._axis
        return [
            UnitMatrices(
                _mesh_of(unit), matrices, [self._owners[m] for m in matrices], axis, [*map(parts_of, matrices)]
            )
            for unit, matrices in self._by_unit().items()
        ]

    def _assign(self) -> None:
        """Assign an owner to every sharded matrix, the same on every rank. Does not communicate.

        Ranks of a tensor axis may hold parts of different sizes, so what is cut along it is assigned without regard to
        who holds it.
        """
        if self._owners:
            return
        axis = self._axis
        balances: dict[tuple[Mesh, bool], Balance] = {}
        for unit, matrices in self._by_unit().items():
            mesh = _mesh_of(unit)
            self._states.setdefault(mesh, OwnedState(mesh, axis))
            for is_cut in (False, True):
                those = [matrix for matrix in matrices if (axis_of(matrix) is not None) is is_cut]
                over_axis = axis.world_size if axis is not None and is_cut else 1
                candidates = mesh.shard.world_size * over_axis
                balance = balances.setdefault((mesh, is_cut), Balance(mesh.replicate.world_size, candidates))
                held = [[0] * candidates for _ in those]
                for matrix, by_rank in zip(those, held, strict=True):
                    for rank, start, stop in pieces_of(matrix.placement) if matrix.placement.part is None else ():
                        by_rank[rank] = stop - start
                costs = [self._cost(tuple(matrix.shape)) if matrix.requires_grad else 0 for matrix in those]
                for matrix, owner in zip(those, balance.owners(costs, held), strict=True):
                    rank, tensor = divmod(owner.rank, over_axis)
                    self._owners[matrix] = OwnerRank(owner.replica, rank, tensor if is_cut else None)

    def _check_placements(self) -> None:
        for parameter, placement in self._placements.items():
            if parameter.placement is not placement:
                raise UsageError(
                    f"{parameter.fqn!r} was sharded again after this optimizer's first step: build the optimizer after "
                    "the last sw.shard"
                )

    @property
    def exchange_bytes(self) -> int:
        """Bytes of the exchange buffers, which are kept from the first step on. Does not communicate."""
        return sum({lanes: lanes.nbytes for _, lanes in self._jobs or ()}.values())

    def state_placement(self, parameter: Tensor, shape: tuple[int, ...]) -> Placement | None:
        """Return how state of that shape of a parameter is cut, or None if like the parameter. Does not communicate."""
        if not isinstance(parameter, ShardedParameter) or parameter not in self._matrices:
            return None
        self._assign()
        assert isinstance(parameter.unit, Unit)
        state = self._states[_mesh_of(parameter.unit)]
        return state.placement(parameter.fqn, shape, self._owners[parameter])

    # State from elsewhere -----------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this optimizer's own state_dict, or an unsharded model's with full tensors.

        Of full tensors each rank keeps those of the matrices that it owns. Every rank must be given equal numbers. Does
        not communicate. Raises UsageError for pieces that were cut differently.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        given = dict(state_dict["state"])
        matrices = {i: p for i, p in enumerate(parameters) if p in self._matrices}
        of_matrices = {matrices[i]: given.pop(i) for i in matrices if i in given}
        placed = {p: self.cut_state(p, values) for p, values in of_matrices.items()}
        super().load_state_dict({**state_dict, "state": given})
        self.state.update(placed)

    def cut_state(self, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of one parameter as this rank keeps it: the owner of a matrix keeps full tensors, other
        ranks none of their elements.

        Every rank must be given equal numbers. Does not communicate. Raises as `load_state_dict`.
        """
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
        return ShardedParameter(placement.piece(value).to(parameter.device, copy=True), placement)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UsageError once the optimizer is built."""
        if hasattr(self, "class_name"):
            self._no_more_groups()
        super().add_param_group(param_group)

    @staticmethod
    def _no_more_groups() -> NoReturn:
        raise UsageError("matrices are already assigned to ranks: build a new optimizer with all parameters")


def _parts(named: list[NamedParamGroup], wanted: Callable[[Tensor], bool]) -> list[NamedParamGroup]:
    """Return the groups narrowed to the wanted members, without empty ones."""
    parts = [replace(group, members=[member for member in group.members if wanted(member[1])]) for group in named]
    return [part for part in parts if part.members]


def _group(part: NamedParamGroup) -> dict[str, Any]:
    return {**part.options, "params": [parameter for _, parameter in part.members]}


def _unwrapped(value: Any) -> Any:
    return value.local.view(value.shape) if isinstance(value, ShardedParameter) else value


def _mesh_of(unit: Unit) -> Mesh:
    assert isinstance(unit.listener, Engine)
    return unit.listener.mesh
