"""Programs and groups of devices, from the text that XLA prints."""

from __future__ import annotations

import pytest

swj = pytest.importorskip("shardwise.jax", reason="the extra jax is not installed")

from types import SimpleNamespace  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

from shardwise.jax.report.hlo import HloShape, axes_of_group, group_in, parse  # noqa: E402

TEXT = """HloModule jit_step, input_output_alias={ {0}: (1, {}, may-alias), {2}: (0, {}, must-alias) }

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %one = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %sum = f32[8,4]{1,0} all-reduce(%one), replica_groups=[4,2]<=[8], metadata={op_name="jit(step)/a(b) \\'c\\'"}
  ROOT %t = (s32[], /*index=1*/f32[8,4]{1,0}) tuple(%p, %sum)
}

ENTRY %main (x: bf16[16]) -> f32[8,4] {
  %x = bf16[16]{0} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %in = (s32[], f32[8,4]{1,0}) tuple(%x, %x)
  %loop = (s32[], f32[8,4]{1,0}) while(%in), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %out = f32[8,4]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_instructions() -> None:
    program = parse(TEXT)
    line = program.computations["body"]["sum"]
    assert (line.opcode, line.operands, line.shapes) == ("all-reduce", ("one",), (HloShape("f32", (8, 4)),))
    assert program.computations["body"]["t"].shapes == (HloShape("s32", ()), HloShape("f32", (8, 4)))
    assert line.op_name == "jit(step)/a(b) 'c'"
    assert program.computations["main"]["loop"].attribute("body") == "body"
    assert program.runs() == {"main": 1, "body": 3}
    with pytest.raises(ValueError, match="not a compiled XLA program"):
        parse("module {}")


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [("pred", 6), ("bf16", 12), ("f32", 24), ("s4", 3), ("f8e4m3fn", 6), ("c64", 48)],
)
def test_sizes(dtype: str, nbytes: int) -> None:
    assert HloShape(dtype, (2, 3)).nbytes == nbytes


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, x", "dp_shard"),
        ("replica_groups=[2,4]<=[8], x", "dp_shard"),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", "dp_replicate"),
        ("replica_groups={}, x", "dp_replicate x dp_shard"),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_2'}, x", "dp_shard"),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, x", "dp_replicate"),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}, x", "dp_shard"),
        (
            "replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_2'}, x",
            "dp_replicate",
        ),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0}}, x", "dp_shard"),
        ("replica_groups={{0,5},{1,4}}, x", "dp_replicate x dp_shard"),
    ],
)
def test_groups_are_axes(text: str, axes: str) -> None:
    mesh = jax.make_mesh((2, 4), ("dp_replicate", "dp_shard"), (AxisType.Auto,) * 2)
    assert axes_of_group(group_in(text, 8), mesh) == axes


ASYNCHRONOUS = """HloModule jit_step, input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }

%wrapped (g: f32[64]) -> f32[8] {
  %g = f32[64]{0} parameter(0)
  ROOT %rs = f32[8]{0} reduce-scatter(%g), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}

%update (a: f32[8], b: f32[8]) -> (f32[8], f32[8]) {
  %a = f32[8]{0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %c = f32[8]{0} subtract(%a, %b)
  ROOT %both = (f32[8]{0}, f32[8]{0}) tuple(%c, %b)
}

ENTRY %main (p: f32[8], q: f32[8]) -> (f32[8], f32[8]) {
  %p = f32[8]{0} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %q = f32[8]{0} parameter(1), metadata={op_name="state.params[\\'v\\']"}
  %half = bf16[8]{0} convert(%p)
  %gather-start = (bf16[8]{0}, bf16[64]{0}) all-gather-start(%half), replica_groups=[1,8]<=[8], dimensions={0}
  %gather-done = bf16[64]{0} all-gather-done(%gather-start)
  %gradient = f32[64]{0} dot(%gather-done, %gather-done)
  %rs-start = ((f32[64]{0}), f32[8]{0}) async-start(%gradient), calls=%wrapped
  %rs-done = f32[8]{0} async-done(%rs-start), calls=%wrapped
  %new = (f32[8]{0}, f32[8]{0}) fusion(%p, %rs-done), kind=kLoop, calls=%update
  %new-p = f32[8]{0} get-tuple-element(%new), index=0
  %sums-start = (f32[64]{0}, f32[8]{0}) all-reduce-start(%gradient, %q), replica_groups=[1,8]<=[8], to_apply=%add
  %sums-done = (f32[64]{0}, f32[8]{0}) all-reduce-done(%sums-start)
  %new-q = f32[8]{0} get-tuple-element(%sums-done), index=1
  ROOT %out = (f32[8]{0}, f32[8]{0}) tuple(%new-p, %new-q)
}
"""


def program(text: str, params: dict[str, int]) -> Any:
    """A program of that text whose state has these parameters, of so many numbers, cut over dp_shard."""
    spec = NamedSharding(swj.mesh(), PartitionSpec("dp_shard"))
    return SimpleNamespace(
        as_text=lambda: text,
        args_info=(({name: jax.ShapeDtypeStruct((size,), "float32") for name, size in params.items()},), {}),
        input_shardings=((dict.fromkeys(params, spec),), {}),
    )


def test_collectives_that_start_and_end_apart_as_on_gpus() -> None:
    found = swj.collectives(program(ASYNCHRONOUS, {"w": 64}))
    assert [(part.operation, part.what, part.parameter, part.dtype, part.nbytes) for part in found.parts] == [
        ("all-gather", "w", True, "bf16", 128),
        ("all-reduce", "w", True, "f32", 256),
        ("all-reduce", "w", True, "f32", 32),
        ("reduce-scatter", "w", True, "f32", 256),
    ]
    assert found.counts() == {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 1}


OVERLAPPED = """HloModule jit_step, input_output_alias={ {0}: (0, {}, may-alias) }

%begin (c: f32[8]) -> (f32[8], f32[64]) {
  %c = f32[8]{0} parameter(0)
  %g1 = f32[64]{0} all-gather(%c), channel_id=7, replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %s = (f32[8]{0}, f32[64]{0}) custom-call(%g1), custom_call_target="AsyncCollectiveStart"
}

%beside (d: f32[8]) -> f32[64] {
  %d = f32[8]{0} parameter(0)
  ROOT %g2 = f32[64]{0} all-gather(%d), channel_id=7, replica_groups=[1,8]<=[8], dimensions={0}
}

%all-reduce-scatter (e: f32[64]) -> f32[8] {
  %e = f32[64]{0} parameter(0)
  %ar = f32[64]{0} all-reduce(%e), channel_id=8, replica_groups=[1,8]<=[8], to_apply=%add
  %id = u32[] partition-id()
  ROOT %mine = f32[8]{0} dynamic-slice(%ar, %id), dynamic_slice_sizes={8}
}

%condition (t: (s32[], f32[8], f32[8])) -> pred[] {
  %t = (s32[], f32[8]{0}, f32[8]{0}) parameter(0)
  %limit = s32[] constant(5)
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%body (b: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {
  %b = (s32[], f32[8]{0}, f32[8]{0}) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %w = f32[8]{0} get-tuple-element(%b), index=1
  %started = (f32[8]{0}, f32[64]{0}) fusion(%w), kind=kCustom, calls=%begin
  %piece = f32[8]{0} get-tuple-element(%started), index=0
  %product = f32[64]{0} fusion(%piece), kind=kOutput, calls=%beside
  %gradient = f32[64]{0} dot(%product, %product)
  %sum = f32[8]{0} fusion(%gradient), kind=kCustom, calls=%all-reduce-scatter
  ROOT %next = (s32[], f32[8]{0}, f32[8]{0}) tuple(%j, %w, %sum)
}

%update (p0: f32[8], p1: f32[8]) -> (f32[8], f32[]) {
  %p0 = f32[8]{0} parameter(0)
  %p1 = f32[8]{0} parameter(1)
  %new = f32[8]{0} subtract(%p0, %p1)
  %norm = f32[] reduce(%p1, %p1), dimensions={0}, to_apply=%add
  ROOT %both = (f32[8]{0}, f32[]) tuple(%new, %norm)
}

ENTRY %main (w: f32[8]) -> (f32[8]) {
  %w.0 = f32[8]{0} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %half = bf16[8]{0} convert(%w.0)
  %wide = f32[8]{0} convert(%half)
  %zero = s32[] constant(0)
  %in = (s32[], f32[8]{0}, f32[8]{0}) tuple(%zero, %wide, %wide)
  %loop = (s32[], f32[8]{0}, f32[8]{0}) while(%in), condition=%condition, body=%body
  %summed = f32[8]{0} get-tuple-element(%loop), index=2
  %updated = (f32[8]{0}, f32[]) fusion(%w.0, %summed), kind=kLoop, calls=%update
  %out = f32[8]{0} get-tuple-element(%updated), index=0
  ROOT %all = (f32[8]{0}) tuple(%out)
}
"""


def test_collectives_that_run_beside_products_as_on_tpus() -> None:
    """A gather is there again in what runs beside it; a reduce-scatter is a sum and a slice in one fusion; how often a
    loop goes round stands in its condition."""
    parts = swj.collectives(program(OVERLAPPED, {"w": 64})).parts
    found = [(part.operation, part.what, part.times, part.nbytes) for part in parts]
    assert found == [("all-gather", "w", 5, 256), ("reduce-scatter", "w", 5, 256)]


def test_what_has_no_parameters_shape_is_told_by_its_operation() -> None:
    text = ASYNCHRONOUS.replace("dimensions={0}", 'dimensions={0}, metadata={op_name="jit(step)/jvp()/dot_general"}', 2)
    parts = swj.collectives(program(text, {"w": 40})).parts
    assert [(part.what, part.parameter, part.is_cut) for part in parts if part.operation == "all-gather"] == [
        ("(jvp()/dot_general)", False, False)
    ]
