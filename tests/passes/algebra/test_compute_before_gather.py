"""Gathers and what is computed of their results."""

import pytest
import torch
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.passes import CommonSubexpressions, ComputeBeforeGather, count, run, wire_bytes
from dtensor.passes.algebra.compute_before_gather import REDUCTIONS
from dtensor.passes.graph import ir

ONE_DIM = (torch.ops.aten.any.dim, torch.ops.aten.all.dim)


def gather(bench, x, dim=0, group=None):
    return ops.all_gather(x, dim, x.shape[dim] * 2, group or bench.tp)


def test_fires(bench):
    gm = bench.trace(lambda x, y: gather(bench, x) * gather(bench, y), (4, 6), (4, 6))
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,6] = placeholder
%y_1: f32[4,6] = placeholder
%all_gather: f32[8,6] = dtensor.all_gather(%x_1, 0, 8, tp)
%all_gather_1: f32[8,6] = dtensor.all_gather(%y_1, 0, 8, tp)
%mul: f32[8,6] = aten.mul.Tensor(%all_gather, %all_gather_1)
return %mul""",
    )
    before = wire_bytes(gm)
    assert bench.apply(ComputeBeforeGather(), gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,6] = placeholder
%y_1: f32[4,6] = placeholder
%mul: f32[4,6] = aten.mul.Tensor(%x_1, %y_1)
%all_gather: f32[8,6] = dtensor.all_gather(%mul, 0, 8, tp)
return %all_gather""",
    )
    assert wire_bytes(gm) == before // 2


def test_a_broadcast_goes_last(bench):
    gm = bench.trace(lambda x: gather(bench, x.expand(3, 4, 6), 1) + 1, (4, 1))
    before = wire_bytes(gm)
    assert bench.apply(ComputeBeforeGather(), gm) == 1
    assert wire_bytes(gm) == before // 18
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,1] = placeholder
%all_gather: f32[8,1] = dtensor.all_gather(%x_1, 0, 8, tp)
%expand: f32[3,8,6] = aten.expand(%all_gather, [3, -1, 6])
%clone: f32[3,8,6] = aten.clone(%expand, memory_format=contiguous_format)
%add: f32[3,8,6] = aten.add.Tensor(%clone, 1)
return %add""",
    )


def test_a_broadcast_of_a_later_dim_goes_last(bench):
    """Along the first dim, which both have."""
    gm = bench.trace(lambda x: gather(bench, x.expand(4, 6)) + 1, (4, 1))
    before = wire_bytes(gm)
    assert bench.apply(ComputeBeforeGather(), gm) == 1
    assert wire_bytes(gm) == before // 6


def cut_and_gathered(bench, x):
    return ops.all_gather(ops.shard(x[:, :3], 1, bench.tp) + 1, 1, 3, bench.tp)


FIRES = {
    "three": (lambda b: lambda x, y: torch.where(gather(b, x) > 0, gather(b, x), gather(b, y)), 3),
    "narrower": (lambda b: lambda x, y: (gather(b, x) > 0.5, y), 4),
    "with a number": (lambda b: lambda x, y: torch.add(gather(b, x), gather(b, y), alpha=3), 2),
    "of lower rank": (lambda b: lambda x, y: gather(b, x, 1) * gather(b, y[0]), 5 / 4),
    "beside what is alike": (
        lambda b: lambda x, y: torch.lerp(gather(b, x), gather(b, y), ops.all_reduce(x[0], "sum", b.tp)),
        None,
    ),
    "sum": (lambda b: lambda x, y: (gather(b, x).sum(1), y), 6),
    "sum before the gathered dim": (lambda b: lambda x, y: (gather(b, x, 1).amax(0), y), 4),
    "mean that keeps the dim": (lambda b: lambda x, y: (gather(b, x, 1).mean(-2, keepdim=True), y), 4),
    "slice": (lambda b: lambda x, y: (gather(b, x, 1)[1:3], y), 2),
    "selection": (lambda b: lambda x, y: (gather(b, x, 1)[2], y), 4),
    "slice of the second dim": (lambda b: lambda x, y: (gather(b, x[None], 2)[:, 1:3], y), 2),
    "sum over two": (lambda b: lambda x, y: (gather(b, x.view(2, 2, 6), 1).sum(0), y), 2),
    "sum on both sides": (lambda b: lambda x, y: (gather(b, x.view(2, 2, 6), 1).sum((0, 2)), y), 12),
    "selection by name": (lambda b: lambda x, y: (torch.select(gather(b, x, 1), dim=0, index=2), y), 4),
    "last of a slice of two": (lambda b: lambda x, y: (gather(b, x[:2], 1)[1], y), 2),
    "of shards of sums": (
        lambda b: (
            lambda x, y: (
                gather(b, ops.reduce_scatter(x, "sum", 0, b.tp)) * gather(b, ops.reduce_scatter(y, "sum", 0, b.tp))
            )
        ),
        4 / 3,
    ),
    "uneven": (
        lambda b: lambda x, y: cut_and_gathered(b, x) - cut_and_gathered(b, y),
        None,
    ),
}


@pytest.mark.parametrize("case", FIRES)
def test_fewer_bytes(bench, case):
    f, ratio = FIRES[case]
    gm = bench.trace(f(bench), (4, 6), (4, 6))
    before = wire_bytes(gm)
    assert bench.apply(ComputeBeforeGather(), gm) > 0
    run(gm, simulate=bench.simulation, meshes=bench.meshes, disable=["lower"])
    after = wire_bytes(gm)
    assert after < before
    if ratio is not None:
        assert before / after == pytest.approx(ratio)


def test_a_sum_of_gathered_shards_is_reduced_once(bench):
    def f(x, y):
        a, b = (ops.reduce_scatter(v, "sum", 0, bench.tp) for v in (x, y))
        return gather(bench, a) + gather(bench, b)

    gm = bench.trace(f, (4, 6), (4, 6))
    run(gm, simulate=bench.simulation)
    assert count(gm) == {"all_reduce": 1}


def test_symbolic_batch(bench):
    gm = bench.trace(lambda x: gather(bench, x) * gather(bench, x.relu()), (4, 6), symbolic=True)
    CommonSubexpressions()(gm.graph)  # each gather has a node of its own for its length
    assert bench.apply(ComputeBeforeGather(), gm) == 1


REFUSED = {
    "one of one dtype": lambda b: lambda x, y: gather(b, x).relu(),
    "used twice": lambda b: lambda x, y: ((v := gather(b, x)) * gather(b, y), v),
    "leaves": lambda b: lambda x, y: (gather(b, x) * (v := gather(b, y)), v),
    "other dims": lambda b: lambda x, y: gather(b, x) * gather(b, y.view(8, 3), 1),
    "other groups": lambda b: lambda x, y: gather(b, x) * gather(b, y, 0, b.dp),
    "beside an input": lambda b: lambda x, y: torch.lerp(gather(b, x), gather(b, y), y.repeat(2, 1)),
    "beside what extends along the dim": lambda b: (
        lambda x, y: torch.lerp(gather(b, x), gather(b, y), ops.all_reduce(x.repeat(2, 1), "sum", b.tp))
    ),
    "wider": lambda b: lambda x, y: gather(b, x).double(),
    "wider by a byte": lambda b: (
        lambda x, y: gather(b, x > 0.5) * ops.all_reduce(y.sum().to(torch.bfloat16), "sum", b.tp)
    ),
    "sum of the dim": lambda b: lambda x, y: gather(b, x).sum(0),
    "sum of both": lambda b: lambda x, y: gather(b, x).sum((0, 1)),
    "sum over one": lambda b: lambda x, y: gather(b, x[None], 1).sum(0),
    "sum in a wider dtype": lambda b: lambda x, y: gather(b, x).sum(1, dtype=torch.float64),
    "selection of the dim": lambda b: lambda x, y: gather(b, x)[1],
    "selection of the only one": lambda b: lambda x, y: gather(b, x[None], 1)[0],
    "slice that leaves gaps": lambda b: lambda x, y: gather(b, x)[:, 1:3],
    "slice of the dim": lambda b: lambda x, y: gather(b, x)[1:3],
    "slice that is all": lambda b: lambda x, y: torch.ops.aten.slice.Tensor(gather(b, x), 1, 0, 6),
    "slice that is told nothing": lambda b: lambda x, y: torch.ops.aten.slice.Tensor(gather(b, x)),
    "selection that is all": lambda b: lambda x, y: gather(b, x[:1], 1)[0],
    "not pointwise": lambda b: lambda x, y: gather(b, x).cumsum(1),
    "random": lambda b: lambda x, y: torch.bernoulli(gather(b, x).sigmoid()) * gather(b, y),
    "written to": lambda b: lambda x, y: (gather(b, x) * gather(b, y), x.add_(1))[0],
    "broadcast of the gathered dim": lambda b: lambda x, y: gather(b, x[:1].expand(4, 6)),
    "broadcast of a new dim": lambda b: lambda x, y: gather(b, x.expand(4, 4, 6)),
    "broadcast used twice": lambda b: lambda x, y: (gather(b, v := x.expand(2, 4, 6), 1), v + 1),
}


@pytest.mark.parametrize("case", REFUSED)
def test_must_not_fire(bench, case):
    gm = bench.trace(REFUSED[case](bench), (4, 6), (4, 6))
    assert bench.keeps(ComputeBeforeGather(), gm)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
def test_every_reduction(bench, reduction, keepdim):
    """Over a dim before the gathered one; `any` and `all` take one dim, the others a list."""
    one, boolean = (0, True) if reduction in ONE_DIM else ([0], False)

    def f(x):
        return reduction(gather(bench, x > 0.5 if boolean else x, 1), one, keepdim)

    gm = bench.trace(f, (4, 6))
    assert bench.apply(ComputeBeforeGather(), gm) == 1
    gathered = next(n for n in gm.graph.nodes if ir.is_collective(n))
    assert ir.collective(gathered).gather_dim == (1 if keepdim else 0)
    assert tuple(gathered.meta["val"].shape) == ((1, 12) if keepdim else (12,))


def test_a_keepdim_that_is_said_to_be_false(bench):
    gm = bench.trace(lambda x: gather(bench, x, 1).sum([0]), (4, 6))
    (node,) = [n for n in gm.graph.nodes if n.target in REDUCTIONS]
    node.args = (*node.args, False)
    assert bench.apply(ComputeBeforeGather(), gm) == 1
    assert "%all_gather: f32[12] = dtensor.all_gather(%sum, 0, 12, tp)" in bench.text(gm)


def test_a_slice_that_names_no_dim_is_of_the_first(bench):
    gm = bench.trace(lambda x: gather(bench, x, 1)[1:3], (4, 6))
    (node,) = [n for n in gm.graph.nodes if n.target is torch.ops.aten.slice.Tensor]
    node.args, node.kwargs = node.args[:1], {"start": 1, "end": 3}
    assert bench.apply(ComputeBeforeGather(), gm) == 1
    assert "%all_gather: f32[2,12] = dtensor.all_gather(%slice, 1, 12, tp)" in bench.text(gm)


def test_slices_up_to_a_symbol(bench):
    """The end of a slice is a node, too."""
    gm = bench.trace(lambda x, y: gather(bench, x, 1)[: y.shape[0]], (4, 6), (3,), symbolic=True)
    assert bench.apply(ComputeBeforeGather(), gm) == 1


BY_HAND = {
    "number": lambda b: lambda x, y: torch.add(gather(b, x), gather(b, y), alpha=3),
    "slice": lambda b: lambda x, y: gather(b, x, 1)[1:3],
}


@pytest.mark.parametrize("case", BY_HAND)
def test_numbers_that_may_be_this_ranks_stay(bench, case):
    assert bench.keeps(ComputeBeforeGather(), bench.trace(BY_HAND[case](bench), (4, 6), (4, 6), by_hand=True))


def test_what_is_gathered_for_the_backward_stays_there(bench):
    gm = bench.trace(lambda x, y: gather(bench, x) * gather(bench, y), (4, 6), (4, 6))
    list(gm.graph.nodes)[-2].meta["partitioner_tag"] = "is_backward"
    assert bench.keeps(ComputeBeforeGather(), gm)
