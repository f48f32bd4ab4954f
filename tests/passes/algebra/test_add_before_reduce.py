"""Sums of reductions."""

import pytest
import torch
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.passes import AddBeforeReduce, collectives, count


def reducer(bench):
    return lambda x, op="sum", group=bench.tp: ops.all_reduce(x, op, group)


def test_fires(bench):
    r = reducer(bench)
    gm = bench.trace(lambda a, b: r(a) + r(b), (2, 4), (2, 4))
    assert_expected_inline(
        bench.text(gm),
        """\
%a_1: f32[2,4] = placeholder
%b_1: f32[2,4] = placeholder
%all_reduce: f32[2,4] = dtensor.all_reduce(%a_1, 'sum', tp)
%all_reduce_1: f32[2,4] = dtensor.all_reduce(%b_1, 'sum', tp)
%add: f32[2,4] = aten.add.Tensor(%all_reduce, %all_reduce_1)
return %add""",
    )
    assert bench.apply(AddBeforeReduce(), gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%a_1: f32[2,4] = placeholder
%b_1: f32[2,4] = placeholder
%add: f32[2,4] = aten.add.Tensor(%a_1, %b_1)
%all_reduce: f32[2,4] = dtensor.all_reduce(%add, 'sum', tp)
return %all_reduce""",
    )


def test_an_alpha_that_may_be_this_ranks_stays(bench):
    r = reducer(bench)
    gm = bench.trace(lambda a, b: torch.add(r(a), r(b), alpha=3), (2, 4), (2, 4), by_hand=True)
    assert bench.keeps(AddBeforeReduce(), gm)


def test_sub_and_alpha_stay(bench):
    r = reducer(bench)
    gm = bench.trace(lambda a, b, c: torch.add(r(a) - r(b), r(c), alpha=3), (2, 4), (2, 4), (2, 4))
    assert bench.apply(AddBeforeReduce(), gm) == 2
    assert_expected_inline(
        bench.text(gm),
        """\
%a_1: f32[2,4] = placeholder
%b_1: f32[2,4] = placeholder
%c_1: f32[2,4] = placeholder
%sub: f32[2,4] = aten.sub.Tensor(%a_1, %b_1)
%add: f32[2,4] = aten.add.Tensor(%sub, %c_1, alpha=3)
%all_reduce: f32[2,4] = dtensor.all_reduce(%add, 'sum', tp)
return %all_reduce""",
    )


def test_broadcast_position_embedding(bench):
    r = reducer(bench)
    gm = bench.trace(lambda tok, pos: r(tok) + r(pos), (3, 2, 4), (2, 4))
    assert bench.apply(AddBeforeReduce(), gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%tok_1: f32[3,2,4] = placeholder
%pos_1: f32[2,4] = placeholder
%add: f32[3,2,4] = aten.add.Tensor(%tok_1, %pos_1)
%all_reduce: f32[3,2,4] = dtensor.all_reduce(%add, 'sum', tp)
return %all_reduce""",
    )


def test_chain_is_one_all_reduce(bench):
    r = reducer(bench)
    gm = bench.trace(lambda a, b, c, d: r(a) + r(b) + (r(c) + r(d)), *[(2, 4)] * 4)
    assert bench.apply(AddBeforeReduce(), gm) == 3
    assert count(gm) == {"all_reduce": 1}


def test_residual_stays_local(bench):
    r = reducer(bench)
    gm = bench.trace(lambda x, a, y, b: ((x + r(a)) + y) + r(b), *[(2, 4)] * 4)
    assert bench.apply(AddBeforeReduce(), gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[2,4] = placeholder
%a_1: f32[2,4] = placeholder
%y_1: f32[2,4] = placeholder
%b_1: f32[2,4] = placeholder
%add: f32[2,4] = aten.add.Tensor(%x_1, %y_1)
%add_1: f32[2,4] = aten.add.Tensor(%a_1, %b_1)
%all_reduce: f32[2,4] = dtensor.all_reduce(%add_1, 'sum', tp)
%add_2: f32[2,4] = aten.add.Tensor(%add, %all_reduce)
return %add_2""",
    )


def test_residual_of_two_kinds(bench):
    r = reducer(bench)

    def f(x, a, b, c, d):
        return x + r(a) + r(b, group=bench.dp) + r(c) + r(d, group=bench.dp)

    gm = bench.trace(f, *[(2, 4)] * 5)
    assert bench.apply(AddBeforeReduce(), gm) == 2
    assert count(gm) == {"all_reduce": 2}


def test_root_itself_is_dropped(bench):
    r = reducer(bench)
    gm = bench.trace(lambda x, a, b: r(a) + (x + r(b)), *[(2, 4)] * 3)
    assert bench.apply(AddBeforeReduce(), gm) == 1
    assert count(gm) == {"all_reduce": 1}


def test_what_is_reduced_later_stays_after_what_it_is_computed_from(bench):
    """The term that comes first in the graph moves to the other, whichever sum it is a term of."""
    r = reducer(bench)
    gm = bench.trace(lambda x, a, b: r(a) + (x + r(b * 2)), *[(2, 4)] * 3)
    assert bench.apply(AddBeforeReduce(), gm) == 1
    assert count(gm) == {"all_reduce": 1}


def test_reduce_scatters(bench):
    def f(a, b, c):
        x, y, z = (ops.reduce_scatter(t, "avg", 1, bench.tp) for t in (a, b, c))
        return x + y + z

    gm = bench.trace(f, *[(2, 4)] * 3)
    assert bench.apply(AddBeforeReduce(), gm) == 2
    assert_expected_inline(
        bench.text(gm),
        """\
%a_1: f32[2,4] = placeholder
%b_1: f32[2,4] = placeholder
%c_1: f32[2,4] = placeholder
%add: f32[2,4] = aten.add.Tensor(%a_1, %b_1)
%add_1: f32[2,4] = aten.add.Tensor(%add, %c_1)
%reduce_scatter: f32[2,2] = dtensor.reduce_scatter(%add_1, 'avg', 1, tp)
return %reduce_scatter""",
    )


def test_a_reduce_scatter_that_broadcasts(bench):
    """As embeddings of positions are to those of tokens; whichever comes first."""

    def scatter(x, dim):
        return ops.reduce_scatter(x, "sum", dim, bench.tp)

    for f in (lambda a, b: scatter(a, 1) + scatter(b, 0), lambda a, b: scatter(b, 0) - scatter(a, 1)):
        gm = bench.trace(f, (3, 4, 6), (4, 6))
        assert bench.apply(AddBeforeReduce(), gm) == 1
        (c,) = collectives(gm)
        assert (c.op, c.scatter_dim) == ("reduce_scatter", 1)


def test_symbolic_batch(bench):
    r = reducer(bench)
    gm = bench.trace(lambda x, w, v: r(x @ w) + r(x @ v), (4, 2), (2, 3), (2, 3), symbolic=True)
    assert bench.apply(AddBeforeReduce(), gm) == 1


REFUSED = {
    "other group": lambda r, b: lambda x, y: r(x) + r(y, group=b.dp),
    "other reduction": lambda r, b: lambda x, y: r(x) + r(y, op="avg"),
    "not linear": lambda r, b: lambda x, y: r(x, op="max") + r(y, op="max"),
    "second user": lambda r, b: lambda x, y: (r(x) + (s := r(y)), s * 2),
    "same operand": lambda r, b: lambda x, y: (s := r(x)) + s,
    "product": lambda r, b: lambda x, y: r(x) * r(y),
    "number": lambda r, b: lambda x, y: r(x) + 1,
    "other dtype": lambda r, b: lambda x, y: r(x) + r(y.double()),
    "larger result": lambda r, b: lambda x, y: r(x[:1]) + r(y[:, :1]),
    "terms that are rounded more": lambda r, b: lambda x, y: (x + r(x.to(torch.bfloat16))) + r(y.to(torch.bfloat16)),
    "shared inner sum": lambda r, b: lambda x, y: (t := x + r(y)) + t,
    "inner sum used twice": lambda r, b: lambda x, y: ((t := x + r(y)) + r(x), t * 2),
    "scaled residual": lambda r, b: lambda x, y: torch.add(x + r(y), r(x), alpha=2),
    "broadcast along the scattered dim": lambda r, b: (
        lambda x, y: ops.reduce_scatter(torch.cat([x, x]), "sum", 0, b.tp) + ops.reduce_scatter(y, "sum", 0, b.tp)
    ),
    "other dim": lambda r, b: (
        lambda x, y: (
            ops.reduce_scatter(x, "sum", 0, b.tp) + ops.reduce_scatter(y.view(2, 4), "sum", 1, b.tp).reshape(1, 4)
        )
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_must_not_fire(bench, case):
    gm = bench.trace(REFUSED[case](reducer(bench), bench), (2, 4), (2, 4))
    assert bench.keeps(AddBeforeReduce(), gm)


def test_integers_stay(bench):
    r = reducer(bench)
    assert bench.keeps(AddBeforeReduce(), bench.trace(lambda a, b: r(a) + r(b), (2,), (2,), dtype=torch.int64))
