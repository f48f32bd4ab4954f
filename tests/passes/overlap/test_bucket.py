"""Small collectives that travel together."""

import operator

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from dtensor.comm.collectives import ops
from dtensor.mesh.provenance import RECORD
from dtensor.passes import Bucket, Lower, count, run, wire_bytes
from dtensor.passes.graph import ir
from dtensor.passes.graph.count import describe
from dtensor.passes.graph.node_order import dependencies
from dtensor.prices.links import Link
from dtensor.torch_private.core import c10d


def lowered(bench, f, *shapes, **kwargs):
    gm = bench.trace(f, *shapes, **kwargs)
    Lower()(gm.graph)
    return gm


def reduced(bench, *xs, op="sum", group=None):
    return [ops.all_reduce(x, op, group or bench.tp) for x in xs]


def test_fires(bench):
    gm = lowered(bench, lambda x, y: reduced(bench, x, y), (4, 2), (4,))
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,2] = placeholder
%y_1: f32[4] = placeholder
%all_reduce: f32[4,2] = _c10d_functional.all_reduce(%x_1, 'sum', tp)
%wait_tensor: f32[4,2] = _c10d_functional.wait_tensor(%all_reduce)
%all_reduce_1: f32[4] = _c10d_functional.all_reduce(%y_1, 'sum', tp)
%wait_tensor_1: f32[4] = _c10d_functional.wait_tensor(%all_reduce_1)
return %wait_tensor, %wait_tensor_1""",
    )
    before = wire_bytes(gm)
    assert bench.apply(Bucket(), gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,2] = placeholder
%y_1: f32[4] = placeholder
%view: f32[8] = aten.view(%x_1, [8])
%view_1: f32[4] = aten.view(%y_1, [4])
%cat: f32[12] = aten.cat([%view, %view_1])
%all_reduce: f32[12] = _c10d_functional.all_reduce(%cat, 'sum', tp)
%wait_tensor: f32[12] = _c10d_functional.wait_tensor(%all_reduce)
%split_with_sizes: (f32[8], f32[4]) = aten.split_with_sizes(%wait_tensor, [8, 4], 0)
%getitem: f32[8] = getitem(%split_with_sizes, 0)
%getitem_1: f32[4] = getitem(%split_with_sizes, 1)
%clone: f32[8] = aten.clone(%getitem, memory_format=contiguous_format)
%view_2: f32[4,2] = aten.view(%clone, [4, 2])
%clone_1: f32[4] = aten.clone(%getitem_1, memory_format=contiguous_format)
%view_3: f32[4] = aten.view(%clone_1, [4])
return %view_2, %view_3""",
    )
    assert (count(gm), wire_bytes(gm)) == ({"all_reduce": 1}, before)


def test_gathers_and_scatters(bench):
    def f(x, y, z):
        gathered = [ops.all_gather(a, 0, 2 * a.shape[0], bench.tp) for a in (x, y, z)]
        return [t + 1 for t in gathered], [ops.reduce_scatter(a.exp(), "avg", 0, bench.dp) for a in (x, y, z)]

    gm = lowered(bench, f, (4, 2), (2,), (6, 3))
    assert bench.apply(Bucket(), gm) == 2
    assert count(gm) == {"all_gather": 1, "reduce_scatter": 1}


def test_exchanges(bench):
    """Rows for each rank lie side by side; what is reduced by other reductions is apart, for its count."""

    def f(x, y, z):
        scattered = [ops.reduce_scatter(a.exp(), "avg", 0, bench.tp) for a in (x, y)]
        return scattered, [ops.reduce_scatter(a.exp(), "product", 0, bench.tp) for a in (y, z)]

    with bench.exchanging():
        gm = lowered(bench, f, (4, 2), (2,), (6, 3))
    before = wire_bytes(gm)
    assert bench.apply(Bucket(), gm) == 2
    assert (count(gm), wire_bytes(gm)) == ({"reduce_scatter": 2}, before)
    gm = lowered(bench, lambda x, y: [ops.all_to_all(a.exp(), 0, 1, 4, bench.tp) for a in (x, y)], (2, 4), (2, 6))
    before = wire_bytes(gm)
    assert bench.apply(Bucket(), gm) == 1
    assert (count(gm), wire_bytes(gm)) == ({"all_to_all": 1}, before)


def test_uneven_exchanges_of_others_stay_apart(bench):
    def f(x, y):
        return [c10d.wait_tensor(c10d.all_to_all_single(a, [1, 3], [3, 1], bench.tp)) for a in (x, y)]

    gm = bench.trace(f, (4, 2), (4,))
    for node in gm.graph.nodes:
        if node.target is c10d.all_to_all_single.default:
            node.meta[RECORD] = describe(node)  # as if lowered, but for the splits
    assert bench.keeps(Bucket(), gm)


def test_dims_other_than_the_first(bench):
    gm = lowered(bench, lambda x, y: [ops.all_gather(a, 1, 8, bench.tp) + 1 for a in (x, y)], (3, 4), (5, 4))
    assert bench.apply(Bucket(), gm) == 1
    assert count(gm) == {"all_gather": 1}


def chain(bench):
    def f(x, y):
        a = ops.all_reduce(x, "sum", bench.tp)
        return a, ops.all_reduce(a + y, "sum", bench.tp)

    return f


def glued(bench):
    """The second waits for the first though nothing is computed in between."""

    def f(x):
        a = ops.all_reduce(x, "sum", bench.tp)
        return a, ops.all_reduce(a.view(8), "sum", bench.tp)

    return f


def used_before(bench):
    """The first result is needed before the second operand is there."""

    def f(x, y):
        a = ops.all_reduce(x, "sum", bench.tp).relu()
        return a, ops.all_reduce(y.exp(), "sum", bench.tp)

    return f


KEPT_APART = {
    "one needs the other": (chain, (2, 4), (2, 4)),
    "one needs the other, by views": (glued, (2, 4)),
    "the first is needed early": (used_before, (2, 4), (2, 4)),
    "other groups": (
        lambda b: lambda x, y: (ops.all_reduce(x, "sum", b.tp), ops.all_reduce(y, "sum", b.dp)),
        *((4,), (4,)),
    ),
    "other reductions": (
        lambda b: lambda x, y: (ops.all_reduce(x, "sum", b.tp), ops.all_reduce(y, "max", b.tp)),
        *((4,), (4,)),
    ),
    "other dtypes": (
        lambda b: lambda x, y: (ops.all_reduce(x, "sum", b.tp), ops.all_reduce(y.double(), "sum", b.tp)),
        *((4,), (4,)),
    ),
}


@pytest.mark.parametrize("case", KEPT_APART)
def test_must_not_fire(bench, case):
    f, *shapes = KEPT_APART[case]
    assert bench.keeps(Bucket(), lowered(bench, f(bench), *shapes))


def test_two_buckets_do_not_wait_for_each_other(bench):
    """a -> c and d -> b, by views: {a, b} and {c, d} would be a circle, though no two of them depend on each other."""

    def f(x, y):
        a = ops.all_reduce(x, "sum", bench.tp)
        d = ops.all_reduce(y, "max", bench.tp)
        return a, d, ops.all_reduce(a.view(8), "max", bench.tp), ops.all_reduce(d.view(8), "sum", bench.tp)

    gm = lowered(bench, f, (2, 4), (2, 4))
    assert bench.apply(Bucket(), gm) == 1


def test_what_is_large_travels_alone(bench):
    # A start and a round cost 2 s, a byte 1 s: a bucket holds 20 bytes on the wire.
    with bench.links(*[Link(alpha=1, bandwidth=1, memory=1e9, launch=0, start=1)] * 2):
        gm = lowered(bench, lambda *xs: reduced(bench, *xs), *[(2,)] * 7)
        assert bench.apply(Bucket(), gm) == 2
    # all_reduce: two rounds, so 3 s without bytes, and 8 bytes of 8 are sent: 30 bytes, three tensors.
    assert count(gm) == {"all_reduce": 3}


def above(node):
    """Names of what `node` is computed from."""
    found, todo = set(), [node]
    while todo:
        for x in todo.pop().all_input_nodes:
            if x.name not in found:
                found.add(x.name)
                todo.append(x)
    return found


def test_what_is_ready_early_does_not_travel_with_what_waits_for_a_late_bucket(bench):
    """As in hybrid sharding: small gradients are scattered together when the last is there, large ones one by one, and
    the sums over replicas of these do not wait for it."""

    def f(x, y, z):
        gradients = [x.exp(), y.exp(), z.sin(), y.sin()]
        scattered = [ops.reduce_scatter(g, "sum", 0, bench.tp) for g in gradients]
        return [ops.all_reduce(s, "sum", bench.dp) for s in scattered]

    # What is scattered is worth a copy if it has less than 40 bytes; a bucket of sums holds 84 bytes, and 33 wait.
    replicas = Link(alpha=1, bandwidth=2.8, memory=1e9, launch=0, start=1)
    shards = Link(alpha=1, bandwidth=1e9, memory=40, launch=0, start=1)
    with bench.links(replicas, shards):
        gm = lowered(bench, f, (4, 4), (2, 2), (6, 4))
        assert bench.apply(Bucket(), gm) == 3
    assert count(gm) == {"reduce_scatter": 3, "all_reduce": 2}
    sums = [node for node in gm.graph.nodes if node.target is c10d.all_reduce.default]
    computed = [above(node) & {"exp", "exp_1", "sin", "sin_1"} for node in sums]
    assert sorted(computed, key=sorted) == [{"exp", "sin"}, {"exp_1", "sin_1"}]


@pytest.mark.parametrize(("size", "is_late", "buckets"), [(4, True, 1), (5, True, 0), (5, False, 1)])
def test_much_does_not_wait_for_what_is_ready_later(bench, size, is_late, buckets):
    """Nothing needs the sum of a gradient, and yet a long one goes at once: later there may be nothing to compute."""

    def f(x, y):
        return reduced(bench, x.exp(), x.sin()) if is_late else reduced(bench, x, y)

    # Not to start another saves 3 s: 12 s, or 18 bytes, may wait, and a bucket holds 45 bytes.
    with bench.links(*[Link(alpha=1, bandwidth=1.5, memory=1e9, launch=0, start=1)] * 2):
        gm = lowered(bench, f, (size,), (size,))
        assert Bucket()(gm.graph) == buckets


def test_what_takes_longer_to_copy_than_to_start_travels_alone(bench):
    with bench.links(*[Link(alpha=1, bandwidth=1e9, memory=1, launch=0, start=1)] * 2):
        assert bench.keeps(Bucket(), lowered(bench, lambda x, y: reduced(bench, x, y), (4,), (4,)))


def test_symbolic_sizes_travel_alone(bench):
    assert bench.keeps(Bucket(), lowered(bench, lambda x, y: reduced(bench, x, y), (4, 3), (4, 3), symbolic=True))


def test_memory_that_is_written_to_stays_apart(bench):
    def f(x, y):
        a, b = reduced(bench, x, y)
        x.copy_(a)
        return a, b, x + 1

    assert bench.keeps(Bucket(), lowered(bench, f, (4,), (4,)))


def test_what_a_graph_writes_to_its_inputs_at_its_end_nothing_reads(bench):
    def f(x, y):
        a, b = reduced(bench, x, y)
        total = a + b
        x.copy_(total)
        return total

    def returned(x, y):
        a, b = reduced(bench, x, y)
        return a + b, x.copy_(a + b)

    def read_by_another(x, y):
        a, b = reduced(bench, x, y)
        x.copy_(a + b)
        y.copy_(x)
        return a + b

    assert bench.apply(Bucket(), lowered(bench, f, (4,), (4,))) == 1
    assert bench.apply(Bucket(), lowered(bench, returned, (4,), (4,))) == 1
    assert bench.keeps(Bucket(), lowered(bench, read_by_another, (4,), (4,)))


def test_a_write_waits_until_what_is_sent_has_left(bench):
    """Of a graph that then reads nothing of it, the write keeps its place behind the wait, however it is sorted."""
    gm = bench.trace(lambda x, y: (c10d.wait_tensor(c10d.all_reduce(x, "sum", bench.tp)), x.copy_(y))[0], (4,), (4,))
    wait, write = (next(n for n in gm.graph.nodes if n.name.startswith(name)) for name in ("wait_tensor", "copy_"))
    assert wait in dependencies(gm.graph)[write]


def test_results_that_leave_share_no_memory(bench):
    gm = lowered(bench, lambda x, y: reduced(bench, x, y), (4,), (4,))
    Bucket()(gm.graph)
    gm.recompile()
    copies = [n for n in gm.graph.nodes if n.target is torch.ops.aten.clone.default]
    assert len(copies) == 2


def test_a_start_that_is_not_waited_for_once_is_left_alone(bench):
    def f(x, y):
        a, b = (c10d.all_reduce(t, "sum", bench.tp) for t in (x, y))
        return a.view(2, 2), c10d.wait_tensor(a), c10d.wait_tensor(b)

    assert Bucket()(bench.trace(f, (4,), (4,)).graph) == 0


def test_runs_in_the_pipeline(bench):
    gm = bench.trace(lambda x, y: [ops.all_reduce(t, "sum", bench.tp).relu() for t in (x, y)], (4,), (4,))
    run(gm, simulate=bench.simulation, meshes=bench.meshes)
    assert count(gm) == {"all_reduce": 1}
    gm = bench.trace(lambda x, y: [ops.all_reduce(t, "sum", bench.tp).relu() for t in (x, y)], (4,), (4,))
    run(gm, disable=["bucket"])
    assert count(gm) == {"all_reduce": 2}


@pytest.mark.parametrize("sizes", [[], [3]])
def test_sizes_among_the_results_do_not_count_as_gradients(sizes):
    """A rank on which a size became a number returns it no more: what its collectives are for was called otherwise."""
    graph = fx.Graph()
    tangent = graph.placeholder("tangents_1")
    made = graph.call_function(torch.ops.aten.neg.default, (tangent,))
    returned = [graph.call_function(operator.add, (1, n)) for n in sizes]
    for node in (tangent, made):
        node.meta["val"] = torch.empty(2, device="meta")
    for node in returned:
        node.meta["val"] = 4
    graph.output((*returned, made))
    assert ir.gradients(graph) == {made: 0, tangent: 0}


def test_what_the_backward_gathers_again_travels_for_itself(bench):
    """In a whole step it would be held from the forward on."""

    def f(x, w, again):
        a = x @ ops.all_gather(w, 0, 8, bench.tp)
        return a, x.exp() @ ops.all_gather(again, 0, 8, bench.tp)

    gm = lowered(bench, f, (8, 8), (4, 8), (4, 8))
    for node in list(gm.graph.nodes)[-4:]:
        node.meta["partitioner_tag"] = "is_backward"
    assert bench.keeps(Bucket(), gm)
    assert bench.apply(Bucket(), lowered(bench, f, (8, 8), (4, 8), (4, 8))) == 1


def test_a_bucket_stands_where_its_first_member_stood(bench):
    """Otherwise what needs nothing of it moved before what does, and was held longer."""

    def f(x, w, late):
        a = x @ ops.all_gather(w, 0, 8, bench.tp)
        again = x.exp()
        return a, again @ ops.all_gather(late, 0, 8, bench.tp)

    gm = lowered(bench, f, (8, 8), (4, 8), (4, 8))
    assert bench.apply(Bucket(), gm) == 1
    place = {node.name: k for k, node in enumerate(gm.graph.nodes)}
    assert place["mm"] < place["exp"]
