"""Data flow in a compiled program: which argument a value comes from, and which argument's next value it affects."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.jax.report.hlo import Computation, Instruction, Program

_MOVES = frozenset(
    (
        *("copy", "copy-start", "copy-done", "bitcast", "bitcast-convert", "convert", "transpose", "reshape"),
        *("slice", "dynamic-slice", "broadcast", "optimization-barrier"),
    )
)
"""Operations that move, repeat or drop elements of their first operand, or cast them, but compute nothing."""
_WHOLE_MOVES = _MOVES - {"slice", "dynamic-slice", "broadcast"}
_CALLS = ("fusion", "call")
Value = tuple[Computation, str]
"""The computation that a value is in, and the name of the instruction that makes it."""
_MIXES = frozenset(
    (
        *("dot", "convolution", "scatter", "gather", "reduce", "reduce-window", "sort", "custom-call"),
        *("while", "conditional", "tuple"),
    )
)
"""Operations whose result no longer belongs to one parameter."""


def argument_behind(program: Program, computation: Computation, name: str) -> str | None:
    """Return the name of the argument that a value is, or is a piece or cast of; None for a computed value."""
    *_, (at, first) = _history(program, computation, name)
    origin = at.instructions[first]
    return origin.op_name or None if origin.opcode == "parameter" and at is program.entry else None


def narrowest_bits(program: Program, computation: Computation, name: str) -> int:
    """Return the fewest bits that an element of a value has had since it was computed: as many as a platform that does
    not widen the value would send."""
    own = computation.instructions[name].shapes[0]
    if not own.is_float:
        return own.bits
    shapes = (at.instructions[value].shapes[:1] for at, value in _history(program, computation, name))
    return min(shape.bits for found in shapes for shape in found if shape.is_float)


def _history(program: Program, computation: Computation, name: str) -> Iterator[Value]:
    """Yield a value, the value before its last move or cast, and so on, back to an argument or a computed value."""
    value: Value | None = (computation, name)
    while value is not None:
        yield value
        value = _before(program, *value)


def _before(program: Program, at: Computation, name: str) -> Value | None:
    """Return the value that this one is a piece, cast or rearrangement of; None for an argument or a computed value."""
    one = at.instructions[name]
    if one.opcode in _MOVES:
        return at, one.operands[0]
    if one.opcode in _CALLS:
        inner = program.called(one)
        return None if inner is None else (inner, inner.root)
    if one.opcode == "get-tuple-element":
        return _element(program, at, one.operands[0], one.index)
    if one.opcode == "parameter":
        calls = (call for call in program.callers.get(at.name, ()) if call[1].opcode in _CALLS)
        return next(((outer, call.operands[one.index]) for outer, call in calls), None)
    return None


def _element(program: Program, at: Computation, name: str, index: int) -> Value | None:
    """Return an element of a tuple that is built here, or that loops carry with this element unchanged; else None."""
    source = at.instructions[name]
    if source.opcode == "tuple":
        return at, source.operands[index]
    if source.opcode == "optimization-barrier" or (source.opcode == "while" and _unchanged(program, source, index)):
        return _element(program, at, source.operands[0], index)
    if source.opcode in _CALLS:
        inner = program.called(source)
        return None if inner is None else _element(program, inner, inner.root, index)
    if source.opcode == "parameter":
        for outer, loop in program.callers.get(at.name, ()):
            if loop.opcode == "while" and _unchanged(program, loop, index):
                return _element(program, outer, loop.operands[0], index)
    return None


def _unchanged(program: Program, loop: Instruction, index: int) -> bool:
    """Whether a loop's body passes an element of its tuple on unchanged."""
    body = program.computations[loop.attribute("body") or ""]
    root = body.instructions[body.root]
    if root.opcode != "tuple":
        return False
    handed_on = body.instructions[root.operands[index]]
    while handed_on.opcode in ("copy", "bitcast"):
        handed_on = body.instructions[handed_on.operands[0]]
    return handed_on.opcode == "get-tuple-element" and handed_on.index == index


def is_cut(program: Program, at: Computation, name: str, pieces: int) -> bool:
    """Whether a value is used, and only one of `pieces` equal pieces of it."""
    users = at.users.get(name, ())
    outside = [call for call in program.callers.get(at.name, ()) if name == at.root]
    if not users and not outside:
        return False
    return all(_cuts(program, at, user, name, pieces) for user in users) and all(
        is_cut(program, outer, call.name, pieces) for outer, call in outside
    )


def _cuts(program: Program, at: Computation, user: Instruction, name: str, pieces: int) -> bool:
    """Whether an operation takes only a piece of a value, directly or through the users of its result."""
    if user.opcode == "dynamic-slice":
        return user.shapes[0].numel * pieces == at.instructions[name].shapes[0].numel
    if user.opcode in _CALLS:
        inner = program.called(user)
        places = [place for place, operand in enumerate(user.operands) if operand == name]
        return inner is not None and all(is_cut(program, inner, inner.parameter(place), pieces) for place in places)
    return user.opcode in _WHOLE_MOVES and is_cut(program, at, user.name, pieces)


def arguments_ahead(program: Program, computation: Computation, name: str) -> set[str]:
    """Return the names of the arguments whose next values a value affects through elementwise operations."""
    found: set[str] = set()
    seen = {(computation.name, name)}
    open_ends = [(computation, name)]
    while open_ends:
        at, value = open_ends.pop()
        if value == at.root and at is program.entry and at.instructions[value].opcode != "tuple":
            found |= _taken_over(program, 0)
        for where, reached in _next(program, at, value, found):
            if (where.name, reached) not in seen:
                seen.add((where.name, reached))
                open_ends.append((where, reached))
    return found


def _next(program: Program, at: Computation, value: str, found: set[str]) -> Iterator[Value]:
    """Yield the values that a value goes into. Adds the arguments whose next value it is to `found`."""
    for user in at.users.get(value, ()):
        places = [place for place, operand in enumerate(user.operands) if operand == value]
        inner = program.called(user) if user.opcode in _CALLS else None
        if inner is not None:
            yield from ((inner, inner.parameter(place)) for place in places)
        elif user.name == at.root and user.opcode == "tuple":
            for place in places:
                yield from _out_of(program, at, place, found)
        elif user.collective is not None:
            yield from ((at, result) for place in places for result in at.results(user, place))
        elif user.opcode not in _MIXES and any(shape.dims for shape in user.shapes):
            yield at, user.name
    if value == at.root:
        calls = program.callers.get(at.name, ())
        yield from ((outer, call.name) for outer, call in calls if call.opcode in _CALLS)


def _out_of(program: Program, at: Computation, place: int, found: set[str]) -> Iterator[Value]:
    """Yield the values that an element of a computation's result tuple goes into. Adds to `found` as `_next` does."""
    if at is program.entry:
        found |= _taken_over(program, place)
    for outer, call in program.callers.get(at.name, ()):
        if call.name == outer.root:
            yield from _out_of(program, outer, place, found)
        yield from ((outer, one.name) for one in outer.users.get(call.name, ()) if one.takes(place))


def _taken_over(program: Program, output: int) -> set[str]:
    """Return the name of the donated argument whose memory an output of the program reuses, in a set; empty if none."""
    if output not in program.aliases:
        return set()
    number = program.aliases[output]
    parameters = (one for one in program.entry.instructions.values() if one.opcode == "parameter")
    return {one.op_name for one in parameters if one.index == number and one.op_name}
