"""Raising others' functional collectives, and what has to stay."""

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import CheckpointPolicy

from dtensor.passes import CancelGatherShard, Lower, Raise, collectives, count, run, verify, wire_bytes
from dtensor.passes.graph import ir
from dtensor.passes.graph.copying import copy_graph
from dtensor.torch_private.core import c10d
from dtensor.torch_private.core import functional_collectives as funcol

SIZE = {"tp": 2, "world": 4}
QUIET = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def wait(x):
    return c10d.wait_tensor(x)


def chunks(x, n, dim=0, to=1):
    return torch.cat(torch.chunk(x, n, dim), to)


def raised(gm):
    """The operators of `dtensor` in a graph, by name."""
    return [node.target.overloadpacket.__name__ for node in gm.graph.nodes if ir.is_collective(node)]


def applied(bench, gm):
    """The number of rewrites of a graph, which computes the same when raised, and when lowered again."""
    before, sent = copy_graph(gm.graph), wire_bytes(gm)
    rewrites = bench.apply(Raise(), gm)
    assert wire_bytes(gm) == sent
    after = copy_graph(gm.graph)
    Lower()(after)
    verify(after, "lower")
    bench.simulation.check(before, after, exact=True)
    return rewrites


def test_golden(bench):
    def f(x, y):
        whole = funcol.all_gather_single(x, 1, bench.tp)
        return funcol.reduce_scatter_single(whole @ y, "sum", 1, bench.tp)

    gm = bench.trace(f, (4, 3), (6, 8))
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,3] = placeholder
%y_1: f32[6,8] = placeholder
%all_gather_into_tensor: f32[8,3] = _c10d_functional.all_gather_into_tensor(%x_1, 2, tp)
%wait_tensor: f32[8,3] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
%split: (f32[4,3], f32[4,3]) = aten.split.Tensor(%wait_tensor, 4)
%getitem: f32[4,3] = getitem(%split, 0)
%getitem_1: f32[4,3] = getitem(%split, 1)
%cat: f32[4,6] = aten.cat([%getitem, %getitem_1], 1)
%mm: f32[4,8] = aten.mm(%cat, %y_1)
%split_1: (f32[4,4], f32[4,4]) = aten.split.Tensor(%mm, 4, 1)
%getitem_2: f32[4,4] = getitem(%split_1, 0)
%getitem_3: f32[4,4] = getitem(%split_1, 1)
%cat_1: f32[8,4] = aten.cat([%getitem_2, %getitem_3])
%reduce_scatter_tensor: f32[4,4] = _c10d_functional.reduce_scatter_tensor(%cat_1, 'sum', 2, tp)
%wait_tensor_1: f32[4,4] = _c10d_functional.wait_tensor(%reduce_scatter_tensor)
return %wait_tensor_1""",
    )
    assert applied(bench, gm) == 2
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,3] = placeholder
%y_1: f32[6,8] = placeholder
%all_gather: f32[4,6] = dtensor.all_gather(%x_1, 1, 6, tp)
%mm: f32[4,8] = aten.mm(%all_gather, %y_1)
%reduce_scatter: f32[4,4] = dtensor.reduce_scatter(%mm, 'sum', 1, tp)
return %reduce_scatter""",
    )


@QUIET
@given(
    shape=st.lists(st.sampled_from((1, 2, 4, 8)), min_size=1, max_size=3),
    dim=st.integers(0, 2),
    axis=st.sampled_from(("tp", "world")),
)
def test_functional_collectives_of_every_dim(bench, shape, dim, axis):
    n, group, dim = SIZE[axis], getattr(bench, axis), dim % len(shape)

    def f(x):
        y = funcol.all_gather_single(x * 2, dim, group)
        y = funcol.all_reduce(y, "product", group)
        return funcol.reduce_scatter_single(y, "sum", dim, group) + 1

    gm = bench.trace(f, tuple(shape))
    assert applied(bench, gm) == 3
    # Torch joins single rows by a view, which stays.
    by_view = dim > 0 and shape[0] == 1 and all(length == 1 for length in shape[1:dim])
    gather, _, scatter = collectives(gm)
    assert (gather.gather_dim, scatter.scatter_dim) == (0 if by_view else dim, dim)
    assert not {"aten.split.Tensor", "aten.cat.default", "wait_tensor"} & {str(m.target) for m in gm.graph.nodes}
    assert n == scatter.group_size


def test_a_maximum_is_raised_where_it_is_sent_as_it_is(bench):
    """Backends differ on NaN, so that `lower` sends floating-point numbers as integers in the same order."""
    for dtype, raised in ((torch.int32, 1), (torch.float32, 0), (torch.bfloat16, 0)):
        gm = bench.trace(lambda x: funcol.all_reduce(x, "max", bench.tp) + 1, (4, 6), dtype=dtype)
        assert applied(bench, gm) == raised


CUTS = {
    "split": lambda y: torch.cat(torch.split(y, 4), 1),
    "split_with_sizes": lambda y: torch.cat(torch.split(y, [4, 4]), 1),
    "narrow": lambda y: torch.cat([y.narrow(0, 0, 4), y.narrow(0, 4, 4)], 1),
    "slice": lambda y: torch.cat([y[:4], y[4:]], -1),
}


@pytest.mark.parametrize("cut", CUTS)
def test_all_ways_to_cut(bench, cut):
    gm = bench.trace(lambda x: CUTS[cut](wait(c10d.all_gather_into_tensor(x, 2, bench.tp))) * 2, (4, 6))
    assert applied(bench, gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,6] = placeholder
%all_gather: f32[4,12] = dtensor.all_gather(%x_1, 1, 12, tp)
%mul: f32[4,12] = aten.mul.Tensor(%all_gather, 2)
return %mul""",
    )


EXCHANGES = {
    "gather rows, scatter columns": lambda x, go: go(chunks(x, 2, 1, 0)),
    "gather columns, scatter rows": lambda x, go: chunks(go(x), 2, 0, 1),
    "gather columns, scatter depth": lambda x, go: chunks(go(chunks(x, 2, 2, 0)), 2, 0, 1),
    "rows": lambda x, go: torch.cat(list(go(torch.cat([c.unsqueeze(0) for c in x.chunk(2, 1)])).unbind(0)), 2),
}


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("gather rows, scatter columns", (0, 1)),
        ("gather columns, scatter rows", (1, 0)),
        ("gather columns, scatter depth", (1, 2)),
        ("rows", (2, 1)),
    ],
)
def test_exchanges(bench, name, dims):
    def f(x):
        def go(y):
            half = y.shape[0] // 2
            return wait(c10d.all_to_all_single(y, [half, half], [half, half], bench.tp))

        return EXCHANGES[name](x, go) + 1

    gm = bench.trace(f, (4, 6, 2))
    assert applied(bench, gm) == 1
    (c,) = collectives(gm)
    assert (c.op, c.gather_dim, c.scatter_dim) == ("all_to_all", *dims)


def test_coalesced(bench):
    def f(x, y):
        a, b = funcol.all_reduce_coalesced([x, y], "sum", bench.tp)
        p, q = funcol.all_gather_single_coalesced([a * 1, b * 1], bench.tp)
        s, t = funcol.reduce_scatter_single_coalesced([x * 2, y * 2], "sum", [0, 1], bench.tp)
        return a, b, p, chunks(q, 2), s, t

    gm = bench.trace(f, (2, 3), (4, 6))
    assert applied(bench, gm) == 6
    assert raised(gm) == ["all_reduce"] * 2 + ["all_gather"] * 2 + ["reduce_scatter"] * 2
    assert [c.gather_dim for c in collectives(gm)[2:4]] == [0, 1]
    assert [c.scatter_dim for c in collectives(gm)[4:]] == [0, 1]
    assert not any(node.target in ir.STARTS for node in gm.graph.nodes)


def test_symbolic_sizes(bench):
    def f(x):
        y = funcol.all_gather_single(x, 1, bench.tp)
        return funcol.reduce_scatter_single(y, "sum", 1, bench.tp), x.shape[0]

    gm = bench.trace(f, (4, 6), symbolic=True)
    assert applied(bench, gm) == 2
    assert raised(gm) == ["all_gather", "reduce_scatter"]
    assert [(c.gather_dim, c.scatter_dim) for c in collectives(gm)] == [(1, None), (None, 1)]


def test_users_of_all_of_what_is_gathered_keep_it(bench):
    """A wait with several users: the gather is raised along dim 0, and the glue of one of them stays."""

    def f(x):
        y = wait(c10d.all_gather_into_tensor(x, 2, bench.tp))
        return chunks(y, 2), y + 1, y.view(-1)

    gm = bench.trace(f, (4, 6))
    assert applied(bench, gm) == 1
    assert [c.gather_dim for c in collectives(gm)] == [0]
    assert "aten.cat" in bench.text(gm)


def test_chunks_with_other_users_stay(bench):
    def f(x):
        y = torch.split(wait(c10d.all_gather_into_tensor(x, 2, bench.tp)), 4)
        return torch.cat(y, 1), y[1] * 2

    gm = bench.trace(f, (4, 6))
    assert applied(bench, gm) == 1
    assert [c.gather_dim for c in collectives(gm)] == [0]


OTHER_GLUE = {
    "in another order": lambda y: torch.cat([y[4:], y[:4]], 1),
    "one of them twice": lambda y: torch.cat([y[:4], y[:4]], 1),
    "of unequal length": lambda y: torch.cat([y[:2], y[2:]], 0).view(4, 12),
    "more than ranks": lambda y: torch.cat(torch.split(y, 2), 1),
    "of another dim": lambda y: torch.cat(torch.split(y, 3, 1), 0),
    "of rows": lambda y: torch.cat(list(y.unbind(0)), 0),
}


@pytest.mark.parametrize("other", OTHER_GLUE)
def test_other_glue_is_not_swallowed(bench, other):
    gm = bench.trace(lambda x: OTHER_GLUE[other](wait(c10d.all_gather_into_tensor(x, 2, bench.tp))) * 2, (4, 6))
    applied(bench, gm)
    assert all(c.gather_dim == 0 for c in collectives(gm))
    assert "aten.cat" in bench.text(gm)


def test_starts_side_by_side_are_not_far_from_their_waits(bench):
    def f(x, y):
        a, b = c10d.all_reduce(x, "sum", bench.tp), c10d.all_gather_into_tensor(y, 2, bench.tp)
        return wait(a), wait(b)

    gm = bench.trace(f, (4, 6), (4, 6))
    assert applied(bench, gm) == 2


def test_copies_made_for_a_start_go(bench):
    gm = bench.trace(lambda x: wait(c10d.all_reduce(x.t().contiguous(), "sum", bench.tp)), (4, 6))
    assert applied(bench, gm) == 1
    assert "clone" not in bench.text(gm)


STRIDED = {
    "all_reduce": lambda x, g: c10d.all_reduce(x, "sum", g),
    "all_gather": lambda x, g: c10d.all_gather_into_tensor(x, 2, g),
    "reduce_scatter": lambda x, g: c10d.reduce_scatter_tensor(x, "sum", 2, g),
}


@pytest.mark.parametrize("name", STRIDED)
def test_operands_of_any_strides(bench, name):
    gm = bench.trace(lambda x: wait(STRIDED[name](x.permute(2, 0, 1), bench.tp)) * 2, (4, 6, 2))
    strides = [node.meta["val"].stride() for node in gm.graph.nodes if node.target is ir.aten.mul.Tensor]
    assert applied(bench, gm) == 1
    assert [ir.propagate(node).stride() for node in gm.graph.nodes if node.target is ir.aten.mul.Tensor] == strides


def test_groups_that_are_inputs_of_the_graph_stay(bench):
    """Where one rank compiles for all, the group is not a name but a node."""
    gm = bench.trace(lambda x: wait(c10d.all_reduce(x, "sum", bench.tp)), (4, 6))
    first = next(iter(gm.graph.nodes))
    with gm.graph.inserting_before(first):
        group = gm.graph.placeholder("group")
    start = next(node for node in gm.graph.nodes if node.target in ir.STARTS)
    start.args = (*start.args[:-1], group)
    assert bench.keeps(Raise(), gm)
    assert collectives(gm) == []


def far(x, group):
    started = c10d.all_reduce(x, "sum", group)
    work = x @ x
    return wait(started) + work


def written_between(x, group):
    y = x * 2
    joined = chunks(y, 2, 1, 0)
    y.add_(1)
    return wait(c10d.reduce_scatter_tensor(joined, "sum", 2, group)), y


def viewed_before_wait(x, group):
    return wait(c10d.all_reduce(x, "sum", group).view(-1))


def in_place(x, group):
    return wait(c10d.all_reduce_(x * 2, "sum", group))


def into_out(x, group):
    return wait(c10d.all_gather_into_tensor_out(x, 2, group, out=x.new_empty(12, 6)))


def padded(x, group):
    return wait(c10d.reduce_scatter_tensor(torch.nn.functional.pad(x, (0, 0, 0, 2)), "sum", 2, group))


def padded_chunks(x, group):
    a, b = torch.split(x, [4, 2])
    return wait(c10d.reduce_scatter_tensor(torch.cat([a, torch.nn.functional.pad(b, (0, 0, 0, 2))]), "sum", 2, group))


STAYS = {
    "far": far,
    "viewed before it was waited for": viewed_before_wait,
    "average of the backend": lambda x, g: wait(c10d.all_reduce(x, "avg", g)),
    "average, scattered": lambda x, g: wait(c10d.reduce_scatter_tensor(x, "avg", 2, g)),
    "broadcast": lambda x, g: wait(c10d.broadcast(x, 0, g)),
    "rows sent as they lie": lambda x, g: wait(c10d.all_to_all_single(x, [3, 3], [3, 3], g)),
    "uneven splits": lambda x, g: chunks(wait(c10d.all_to_all_single(x, [2, 4], [2, 4], g)), 2),
    "in place": in_place,
    "into a buffer": into_out,
    "padding cut off": lambda x, g: wait(c10d.all_gather_into_tensor(x, 2, g))[:11],
    "padding cut off, columns": lambda x, g: chunks(wait(c10d.all_gather_into_tensor(x, 2, g)), 2)[:, :11],
    "padding cut off a chunk": lambda x, g: wait(c10d.all_gather_into_tensor(x, 2, g)).chunk(2, 1)[0].clone()[:11],
    "a slice, as one rank may take it": lambda x, g: wait(c10d.all_gather_into_tensor(x, 2, g))[6:],
    "padded": padded,
    "padded and gathered": lambda x, g: wait(c10d.all_gather_into_tensor(torch.nn.functional.pad(x, (0, 2)), 2, g)),
    "padded chunks": padded_chunks,
    "nothing starts": lambda x, g: torch.relu(x),
}


@pytest.mark.parametrize("name", STAYS)
def test_stays(bench, name):
    assert bench.keeps(Raise(), bench.trace(lambda x: STAYS[name](x, bench.tp), (6, 6)))


@pytest.mark.parametrize(("dtype", "by"), [(torch.int16, "sum"), (torch.complex64, "sum"), (torch.int64, "bor")])
def test_what_lower_would_send_otherwise_stays(bench, dtype, by):
    gm = bench.trace(lambda x: wait(c10d.all_reduce(x, by, bench.tp)), (4, 6), dtype=dtype)
    assert bench.keeps(Raise(), gm)


def test_one_of_a_coalesced_start_keeps_the_others(bench):
    def f(x, y):
        a, b = c10d.all_gather_into_tensor_coalesced([x, y], 2, bench.tp)
        return wait(a), wait(b)[:7]

    assert bench.keeps(Raise(), bench.trace(f, (4, 6), (4, 6)))


def test_chunks_taken_before_a_write_are_sent(bench):
    gm = bench.trace(lambda x: written_between(x, bench.tp), (4, 6))
    assert applied(bench, gm) == 1
    assert "aten.cat" in bench.text(gm)


def test_glue_that_is_recomputed_alone_stays(bench):
    gm = bench.trace(lambda x: funcol.all_gather_single(x, 1, bench.tp) + 1, (4, 6))
    (join,) = [node for node in gm.graph.nodes if node.target is torch.ops.aten.cat.default]
    join.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    assert applied(bench, gm) == 1
    assert [c.gather_dim for c in collectives(gm)] == [0]


def test_what_is_recomputed_stays_so_and_the_rest_is_saved(bench):
    """What torch's partitioner does with functional collectives, which it knows by their namespace."""
    gm = bench.trace(lambda x: funcol.all_reduce(funcol.all_gather_single(x, 1, bench.tp), "sum", bench.tp), (4, 6))
    for node in gm.graph.nodes:
        if node.op == "call_function" and "all_reduce" not in str((node.target, node.args)):
            node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 3}
    assert applied(bench, gm) == 2
    gather, reduce = [node for node in gm.graph.nodes if ir.is_collective(node)]
    assert (gather.meta["recompute"], gather.meta["ac_graph_id"]) == (CheckpointPolicy.MUST_RECOMPUTE, 3)
    assert (reduce.meta["recompute"], reduce.meta.get("ac_graph_id")) == (CheckpointPolicy.MUST_SAVE, None)


def test_a_pair_that_is_recomputed_by_half_stays(bench):
    gm = bench.trace(lambda x: funcol.all_reduce(x, "sum", bench.tp) + 1, (4, 6))
    next(node for node in gm.graph.nodes if node.target is ir.WAIT).meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    assert bench.keeps(Raise(), gm)


def test_the_chunk_of_this_rank_stays_a_chunk(bench):
    """Rank 0 sees a first chunk, which on all ranks may be the first: that it is the rank's own cannot be known."""

    def f(x):
        whole = funcol.all_gather_single(x, 0, bench.tp)
        return torch.chunk(whole, 2, 1)[0].contiguous() + 1

    gm = bench.trace(f, (4, 6))
    assert applied(bench, gm) == 1
    assert bench.keeps(CancelGatherShard(), gm)
    assert raised(gm) == ["all_gather"]


def test_pipeline_merges_what_others_emitted(bench):
    def f(x, y, z):
        total = funcol.all_reduce(x, "sum", bench.tp) + funcol.all_reduce(y, "sum", bench.tp)
        a = funcol.all_gather_single(z, 1, bench.tp)
        b = funcol.all_gather_single(z, 1, bench.tp)
        return total, a * b

    gm = bench.trace(f, (4, 6), (4, 6), (4, 3))
    assert count(gm) == {"all_reduce": 2, "all_gather": 2}
    run(gm, simulate=bench.simulation)
    assert count(gm) == {"all_reduce": 1, "all_gather": 1}
    assert raised(gm) == []
