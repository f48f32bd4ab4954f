"""Lowering to start/wait pairs."""

import pytest
import torch
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.passes import CollectiveInfo, Lower, collectives, simulate, wire_bytes
from dtensor.passes.functional import inline
from dtensor.passes.functional.inline import traced
from dtensor.passes.graph import ir
from dtensor.torch_private.core import c10d

EVEN = {
    "all_gather 0": (lambda x, g: ops.all_gather(x, 0, 16, g), (4, 8)),
    "all_gather 1": (lambda x, g: ops.all_gather(x, 1, 32, g), (4, 8)),
    "all_gather uneven": (lambda x, g: ops.all_gather(x, 0, 16, g)[:13], (4, 8)),
    "all_gather of a transpose": (lambda x, g: ops.all_gather(x.t(), 0, 32, g), (4, 8)),
    "reduce_scatter 0": (lambda x, g: ops.reduce_scatter(x, "sum", 0, g), (4, 8)),
    "reduce_scatter 1": (lambda x, g: ops.reduce_scatter(x, "max", 1, g), (4, 8)),
    "all_reduce": (lambda x, g: ops.all_reduce(x, "avg", g), (4, 8)),
    "all_reduce of a transpose": (lambda x, g: ops.all_reduce(x.t(), "sum", g), (4, 8)),
    "all_to_all": (lambda x, g: ops.all_to_all(x, 0, 1, 16, g), (4, 8)),
    "all_to_all back": (lambda x, g: ops.all_to_all(x, 1, 0, 32, g), (4, 8)),
    "empty": (lambda x, g: ops.all_reduce(x, "sum", g), (0, 8)),
}


@pytest.mark.parametrize("case", EVEN)
@pytest.mark.parametrize("axis", ["tp", "world"])
def test_computes_the_same(bench, case, axis):
    f, shape = EVEN[case]
    scale = {"tp": 2, "world": 4}[axis]
    group = getattr(bench, axis)
    if "gather" in case or "to_all" in case:
        shape = (shape[0] * 4 // scale, shape[1])
        if case.endswith(("1", "transpose", "back")):
            shape = (4, 8) if scale == 4 else (4, 16)
    gm = bench.trace(lambda x: f(x, group) * 2, shape)
    want = collectives(gm)
    assert bench.apply(Lower(), gm) == 1
    assert not any(ir.is_collective(node) for node in gm.graph.nodes)
    assert collectives(gm) == want


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize(("shape", "dim"), [((4, 8), 0), ((4, 8), 1), ((1, 8), 1), ((8,), 0)])
@pytest.mark.parametrize("axis", ["tp", "world"])
def test_parts_are_exchanged_and_reduced(bench, reduce_op, shape, dim, axis):
    """Where the backend is gloo. Of the same bytes, and counted as what it is."""
    gm = bench.trace(lambda x: ops.reduce_scatter(x, reduce_op, dim, getattr(bench, axis)) * 2, shape)
    want = collectives(gm)
    with bench.exchanging():
        assert bench.apply(Lower(), gm) == 1
    assert [n.target for n in gm.graph.nodes if n.target in ir.STARTS] == [ops.all_to_all_start.default]
    assert collectives(gm) == want
    assert [c.reduce_op for c in want] == [reduce_op]


@pytest.mark.parametrize(("shape", "dim"), [((4, 8), 0), ((4, 8), 1), ((1, 8), 1), ((8,), 0)])
@pytest.mark.parametrize("axis", ["tp", "world"])
def test_gathers_of_our_own(bench, shape, dim, axis):
    n = {"tp": 2, "world": 4}[axis]
    gm = bench.trace(lambda x: ops.all_gather(x, dim, shape[dim] * n, getattr(bench, axis)) * 2, shape)
    want = collectives(gm)
    with bench.exchanging():
        assert bench.apply(Lower(), gm) == 1
    assert [n.target for n in gm.graph.nodes if n.target in ir.STARTS] == [ops.all_gather_start.default]
    assert collectives(gm) == want


def test_golden_exchange(bench):
    gm = bench.trace(lambda x: ops.reduce_scatter(x, "sum", 1, bench.tp), (4, 4))
    with bench.exchanging():
        bench.apply(Lower(), gm)
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,4] = placeholder
%split: (f32[4,2], f32[4,2]) = aten.split.Tensor(%x_1, 2, 1)
%getitem: f32[4,2] = getitem(%split, 0)
%getitem_1: f32[4,2] = getitem(%split, 1)
%cat: f32[8,2] = aten.cat([%getitem, %getitem_1])
%view: f32[2,4,2] = aten.view(%cat, [2, 4, 2])
%all_to_all_start: f32[2,4,2] = dtensor.all_to_all_start(%view, [1, 1], [1, 1], tp)
%wait_tensor: f32[2,4,2] = _c10d_functional.wait_tensor(%all_to_all_start)
%sum: f32[4,2] = aten.sum.dim_IntList(%wait_tensor, [0], dtype=f32)
return %sum""",
    )


def test_integers_stay_what_they_are(bench):
    """A sum of int32 would be int64."""
    gm = bench.trace(lambda x: ops.reduce_scatter(x, "sum", 0, bench.tp), (4,), dtype=torch.int32)
    with bench.exchanging():
        bench.apply(Lower(), gm)
    (out,) = [n for n in gm.graph.nodes if n.op == "output"]
    assert out.all_input_nodes[0].meta["val"].dtype is torch.int32


def test_golden_permutation(bench):
    """Which rank a permutation sends to differs from rank to rank, so its start looks that up when it runs."""
    gm = bench.trace(lambda x: ops.collective_permute(x * 2, [0, 2, 1, 3], bench.world) + 1, (4, 4))
    assert bench.apply(Lower(), gm) == 1
    assert collectives(gm) == [CollectiveInfo("collective_permute", bench.world, 4, 32)]
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,4] = placeholder
%mul: f32[4,4] = aten.mul.Tensor(%x_1, 2)
%collective_permute_start: f32[4,4] = dtensor.collective_permute_start(%mul, [0, 2, 1, 3], world)
%wait_tensor: f32[4,4] = _c10d_functional.wait_tensor(%collective_permute_start)
%add: f32[4,4] = aten.add.Tensor(%wait_tensor, 1)
return %add""",
    )


def test_golden(bench):
    gm = bench.trace(lambda x: ops.all_gather(x, 1, 8, bench.tp), (4, 4))
    bench.apply(Lower(), gm)
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,4] = placeholder
%all_gather_into_tensor: f32[8,4] = _c10d_functional.all_gather_into_tensor(%x_1, 2, tp)
%wait_tensor: f32[8,4] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
%view: f32[2,4,4] = aten.view(%wait_tensor, [2, 4, 4])
%unbind: (f32[4,4], f32[4,4]) = aten.unbind.int(%view)
%getitem: f32[4,4] = getitem(%unbind, 0)
%getitem_1: f32[4,4] = getitem(%unbind, 1)
%cat: f32[4,8] = aten.cat([%getitem, %getitem_1], 1)
return %cat""",
    )


def test_no_copy_where_the_dims_before_have_length_one(bench):
    """A batch of one, cut along the sequence."""

    def f(x):
        whole = ops.all_gather(x, 1, 8, bench.tp)
        return ops.reduce_scatter(whole * 2, "sum", 1, bench.tp)

    gm = bench.trace(f, (1, 4, 3))
    bench.apply(Lower(), gm)
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[1,4,3] = placeholder
%all_gather_into_tensor: f32[2,4,3] = _c10d_functional.all_gather_into_tensor(%x_1, 2, tp)
%wait_tensor: f32[2,4,3] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
%view: f32[1,8,3] = aten.view(%wait_tensor, [1, 8, 3])
%mul: f32[1,8,3] = aten.mul.Tensor(%view, 2)
%view_1: f32[8,3] = aten.view(%mul, [8, 3])
%reduce_scatter_tensor: f32[4,3] = _c10d_functional.reduce_scatter_tensor(%view_1, 'sum', 2, tp)
%wait_tensor_1: f32[4,3] = _c10d_functional.wait_tensor(%reduce_scatter_tensor)
%view_2: f32[1,4,3] = aten.view(%wait_tensor_1, [1, 4, 3])
return %view_2""",
    )


def test_start_carries_what_it_was(bench):
    gm = bench.trace(lambda x: ops.reduce_scatter(x, "sum", 1, bench.tp), (4, 8))
    node = next(n for n in gm.graph.nodes if ir.is_collective(n))
    node.meta["stack_trace"] = "model.py:3"
    Lower()(gm.graph)
    start = next(n for n in gm.graph.nodes if n.target is c10d.reduce_scatter_tensor.default)
    assert start.meta["dtensor_collective"] == CollectiveInfo(
        "reduce_scatter", bench.tp, 2, 4 * 8 * 4 // 2, "sum", None, 1
    )
    assert all(n.meta["stack_trace"] == "model.py:3" for n in gm.graph.nodes if n.op == "call_function")


def test_uneven_gather_pads(bench):
    gm = bench.trace(lambda x: ops.all_gather(x, 0, 7, bench.tp) + 1, (4, 2))
    Lower()(gm.graph)
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,2] = placeholder
%all_gather_into_tensor: f32[8,2] = _c10d_functional.all_gather_into_tensor(%x_1, 2, tp)
%wait_tensor: f32[8,2] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
%slice: f32[7,2] = aten.slice.Tensor(%wait_tensor, 0, 0, 7)
%add: f32[7,2] = aten.add.Tensor(%slice, 1)
return %add""",
    )


def test_shard_stays(bench):
    gm = bench.trace(lambda x: ops.shard(x, 0, bench.tp), (4, 8))
    assert bench.keeps(Lower(), gm)


def test_functional_collectives_stay(bench):
    gm = bench.trace(lambda x: c10d.wait_tensor(c10d.all_reduce(x, "sum", bench.tp)), (4, 8))
    assert bench.keeps(Lower(), gm)


@pytest.mark.parametrize("dim", [0, 1])
def test_symbolic_batch(bench, dim):
    def f(x, w):
        x = ops.all_gather(x, dim, x.shape[dim] * 2, bench.tp)
        y = ops.all_reduce(x, "sum", bench.tp)
        y = ops.all_to_all(y, dim, 1 - dim, y.shape[dim] * 2, bench.tp)
        return ops.reduce_scatter(y, "sum", dim, bench.tp) * 2, x.shape[0]

    gm = bench.trace(f, (4, 8), (8, 6), symbolic=True)
    want = wire_bytes(gm)
    assert bench.apply(Lower(), gm) == 4
    assert wire_bytes(gm) == want
    holder = next(iter(gm.graph.nodes)).meta["val"]
    assert all(isinstance(n, torch.SymInt) for n in holder.shape)


def test_symbolic_batch_is_not_specialised(bench):
    """Only the batch is symbolic, as torch.compile marks it: the lowered graph must run on another batch."""

    def f(x):
        x = ops.all_gather(x, 0, x.shape[0] * 2, bench.tp)
        return ops.reduce_scatter(torch.relu(x), "sum", 0, bench.tp)

    gm = bench.trace(f, (4, 8), symbolic=True)
    before = bench.trace(f, (4, 8), symbolic=True)
    Lower()(gm.graph)
    inputs = [[torch.randn(6, 8)] for _ in range(4)]
    want = simulate(before, inputs, bench.simulation.groups)
    got = simulate(gm, inputs, bench.simulation.groups)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_collectives_that_are_alike_are_traced_once(bench, monkeypatch):
    """Each has values of its own all the same, of which only those share memory that did; symbols are traced anew."""

    def f(x, y):
        return [ops.all_gather(v, 1, v.shape[1] * 2, bench.tp) for v in (x, x * 2, y)]

    for symbolic, expected in ((False, 2), (True, 3)):
        count = []
        monkeypatch.setattr(inline, "traced", lambda *args: count.append(args) or traced(*args))  # noqa: B023
        gm = bench.trace(f, (4, 6), (4, 8), symbolic=symbolic)
        assert bench.apply(Lower(), gm) == 3
        assert len(count) == expected
        values = [n.meta["val"] for n in gm.graph.nodes if n.target is torch.ops.aten.cat.default]
        assert len(values) == 3
        assert len({v.untyped_storage()._cdata for v in values}) == 3
