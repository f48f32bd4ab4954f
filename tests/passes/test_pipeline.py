"""The pipeline and what it records."""

import subprocess
import sys

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx.experimental.proxy_tensor import make_fx

from dtensor.comm.collectives import ops
from dtensor.errors import PassError
from dtensor.passes import EXACTNESS, PIPELINE, PREPARE, REGISTERED, SIMPLIFY, STAGES, Pass, count, run, text
from dtensor.passes.graph import ir
from dtensor.passes.graph.sizes import settle
from dtensor.torch_private.symbolic_sizes import stand_in, symbolic_mode


def program(bench):
    def f(x, a, b):
        c = ops.all_reduce(a, "sum", bench.tp)
        d = ops.all_reduce(b, "sum", bench.tp).view(4, 6)
        ops.all_gather(x, 0, 8, bench.tp)
        return ops.shard(c + d, 0, bench.tp), ops.shard(ops.all_gather(x, 0, 8, bench.tp), 1, bench.tp)

    return bench.trace(f, (4, 6), (4, 6), (24,))


def test_simplifies_and_lowers(bench):
    gm = program(bench)
    seen = []
    records = run(gm, simulate=bench.simulation, observe=lambda k, name, graph: seen.append((k, name, count(graph))))
    assert [(k, name) for k, name, _ in seen] == [
        (0, "input"),
        (1, "common_subexpressions"),
        (2, "cancel_gather_shard"),
        (3, "reduce_after_view"),
        (4, "add_before_reduce"),
        (5, "fuse_reduce_scatter"),
        (6, "lower"),
        (7, "schedule"),
    ]
    assert (records[0].before, records[-1].after) == (
        {"all_reduce": 2, "all_gather": 2},
        {"reduce_scatter": 1, "all_to_all": 1},
    )
    assert sum(r.rewrites for r in records if r.name != "schedule") == 7
    assert all(r.seconds >= 0 and r.exactness in EXACTNESS for r in records)
    assert {r.round for r in records} == {0, 1}
    assert not any(ir.is_collective(n) for n in gm.graph.nodes)


def test_golden(bench):
    gm = program(bench)
    run(gm, disable=["lower"])
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,6] = placeholder
%a_1: f32[4,6] = placeholder
%b_1: f32[24] = placeholder
%view: f32[4,6] = aten.view(%b_1, [4, 6])
%add: f32[4,6] = aten.add.Tensor(%a_1, %view)
%reduce_scatter: f32[2,6] = dtensor.reduce_scatter(%add, 'sum', 0, tp)
%all_to_all: f32[8,3] = dtensor.all_to_all(%x_1, 0, 1, 8, tp)
return %reduce_scatter, %all_to_all""",
    )


def test_a_second_run_leaves_the_graph_as_it_is(bench):
    gm = program(bench)
    run(gm)
    before = bench.text(gm)
    assert {r.name for r in run(gm) if r.rewrites} == {"raise", "lower"}
    assert bench.text(gm) == before


def test_runs_on_a_bare_graph(bench):
    gm = program(bench)
    run(gm.graph)
    assert count(gm) == {"reduce_scatter": 1, "all_to_all": 1}


def test_only_some_passes(bench):
    gm = program(bench)
    assert [r.name for r in run(gm, passes=["dead_code"])] == ["dead_code", "dead_code"]
    assert count(gm) == {"all_reduce": 2, "all_gather": 1}


def test_unknown_names(bench):
    with pytest.raises(ValueError, match="no pass 'fuse_reduce_scater'; did you mean 'fuse_reduce_scatter'"):
        run(program(bench), disable=["fuse_reduce_scater"])
    with pytest.raises(ValueError, match="no pass 'xyz'; write one of raise, common_subexpressions, dead_code"):
        run(program(bench), passes=["xyz"])


def test_the_lists_are_parts_of_the_table():
    assert PIPELINE[: len(PREPARE) + len(SIMPLIFY)] == PREPARE + SIMPLIFY
    assert [p.name for p in PIPELINE] == [p.name for p in REGISTERED if not p.when]
    assert {p for stage in STAGES for p in stage.passes} == set(REGISTERED)


class Wrong(Pass):
    """A pass that computes something else, and says otherwise."""

    name = "wrong"
    stage = "overlap"
    exactness = "bitwise"

    def __call__(self, graph):
        node = next((n for n in graph.nodes if n.target is torch.ops.aten.add.Tensor), None)
        if node is None:
            return 0
        node.target = torch.ops.aten.sub.Tensor
        return 1


class Restless(Pass):
    """A pass that always finds something to do."""

    name = "dead_code"
    stage = "simplify"
    exactness = "bitwise"

    def __call__(self, graph):
        return 1


class Breaks(Pass):
    """A pass that leaves an invalid graph."""

    name = "breaks"
    stage = "overlap"
    exactness = "bitwise"

    def __call__(self, graph):
        node = next(n for n in graph.nodes if n.target is torch.ops.aten.add.Tensor)
        node.meta["val"] = node.meta["val"].to(torch.float64)
        return 1


def test_a_pass_that_computes_something_else_is_caught(bench):
    with pytest.raises(PassError, match="pass 'wrong', declared bitwise: computes other values"):
        run(program(bench), passes=[Wrong()], simulate=bench.simulation)


def test_a_pass_that_breaks_the_graph_is_caught(bench):
    with pytest.raises(PassError, match="after pass 'breaks' the graph is not valid"):
        run(program(bench), passes=[Breaks()])
    run(program(bench), passes=[Breaks()], verify=False)


def test_simplification_must_come_to_rest(bench):
    with pytest.raises(PassError, match="did not reach a fixpoint in 32 rounds; still active: dead_code"):
        run(program(bench), passes=[Restless()])


def test_invalid_input_is_told_from_an_invalid_pass(bench):
    gm = program(bench)
    next(n for n in gm.graph.nodes if n.target is torch.ops.aten.add.Tensor).meta.clear()
    with pytest.raises(PassError, match="after pass 'input'"):
        run(gm)


def test_text_does_not_depend_on_names(bench):
    gm, other = program(bench), program(bench)
    for k, node in enumerate(other.graph.nodes):
        if node.op == "call_function":
            node.name = f"other_{k}"
    assert bench.text(gm) == bench.text(other)


def test_text_of_all_kinds_of_values(bench):
    def f(x):
        values, index = torch.max(x, 1)
        constant = torch.tensor([1.0, 2.0])
        y = torch.empty(x.shape[0], 2, dtype=torch.bfloat16)
        return values, index, constant, y.to(torch.bool), None

    assert_expected_inline(
        bench.text(bench.trace(f, (4, 3), symbolic=True)),
        """\
%x_1: f32[s75,s96] = placeholder
%max: (f32[s75], i64[s75]) = aten.max.dim(%x_1, 1)
%getitem: f32[s75] = getitem(%max, 0)
%getitem_1: i64[s75] = getitem(%max, 1)
%_tensor_constant0: f32[2] = get_attr('_tensor_constant0')
%lift_fresh_copy: f32[2] = aten.lift_fresh_copy(%_tensor_constant0)
%sym_size: sym[s75] = aten.sym_size.int(%x_1, 0)
%empty: bf16[s75,2] = aten.empty.memory_format([%sym_size, 2], dtype=bf16, device=cpu, pin_memory=False)
%to_copy: b8[s75,2] = aten._to_copy(%empty, dtype=b8)
return %getitem, %getitem_1, %lift_fresh_copy, %to_copy, None""",
    )
    assert text(bench.trace(lambda x: x, (2,))) == "%x_1: f32[2] = placeholder\nreturn %x_1"


def test_the_folder_is_not_a_package_of_its_own():
    code = "import passes"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "write: import dtensor.passes" in found.stderr


def test_values_say_numbers_and_stay_views_of_each_other():
    """Where the trace learns at its end that a length is a number."""
    mode = symbolic_mode()
    x = stand_in(mode, torch.empty(6, 2), "x", True)

    with mode:
        graph = make_fx(lambda x: x.t()[1:] * 2)(x).graph
    assert x.shape[0] == 6  # a guard
    settle(graph)
    values = {node.name: node.meta["val"] for node in graph.nodes if "val" in node.meta}
    assert all(type(n) is int for value in values.values() for n in (*value.shape, *value.stride()))
    assert values["t"].untyped_storage()._cdata == values["slice_1"].untyped_storage()._cdata
    assert values["slice_1"].storage_offset() == 1
