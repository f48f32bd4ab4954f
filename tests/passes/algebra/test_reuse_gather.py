"""A gather of a reduction of what is gathered anyway."""

import pytest
import torch
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.passes import ComputeBeforeGather, DeadCode, ReuseGather, count, wire_bytes


def gather(bench, x, dim=0, group=None):
    return ops.all_gather(x, dim, x.shape[dim] * 2, group or bench.tp)


def test_fires(bench):
    gm = bench.trace(
        lambda x: (gather(bench, x.sum([0], True).view(4, 6)), gather(bench, x.view(3, 4, 6), 1)), (3, 4, 6)
    )
    before = wire_bytes(gm)
    assert bench.apply(ReuseGather(), gm) == 1
    DeadCode()(gm.graph)
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[3,4,6] = placeholder
%all_gather: f32[3,8,6] = dtensor.all_gather(%x_1, 1, 8, tp)
%sum: f32[8,6] = aten.sum.dim_IntList(%all_gather, [0], False)
return %sum, %all_gather""",
    )
    assert wire_bytes(gm) == before * 3 // 4
    assert bench.keeps(ComputeBeforeGather(), gm)


FIRES = {
    "the wide one first": lambda b: lambda x: (gather(b, x, 1), gather(b, x.sum(0))),
    "mean of the dims around": lambda b: lambda x: (gather(b, x.mean((0, 2))), gather(b, x, 1)),
    "of what is transposed": lambda b: lambda x: (gather(b, (y := x.permute(2, 1, 0)).sum(0)), gather(b, y, 1)),
    "greatest": lambda b: lambda x: (gather(b, x.amax(-1), 1), gather(b, x, 1)),
    "any": lambda b: lambda x: (gather(b, (y := x > 0.5).any(0)), gather(b, y, 1)),
    "of another dtype": lambda b: lambda x: (gather(b, x.sum(0, dtype=torch.float64)), gather(b, x, 1)),
}


@pytest.mark.parametrize("case", FIRES)
def test_fires_too(bench, case):
    gm = bench.trace(FIRES[case](bench), (3, 4, 6))
    assert bench.apply(ReuseGather(), gm) == 1
    assert count(gm) == {"all_gather": 1}


def test_two_reductions(bench):
    gm = bench.trace(lambda x: (gather(bench, x.sum(0)), gather(bench, x.mean(0)), gather(bench, x, 1)), (3, 4, 6))
    assert bench.apply(ReuseGather(), gm) == 2
    assert count(gm) == {"all_gather": 1}


def written(b):
    def f(x):
        x = x + 1
        y = gather(b, x.sum(0))
        x.mul_(2)
        return y, gather(b, x, 1)

    return f


REFUSED = {
    "along the gathered dim": lambda b: lambda x: (gather(b, x.sum(1), 1), gather(b, x, 1)),
    "along another dim": lambda b: lambda x: (gather(b, x.sum(0), 1), gather(b, x, 1)),
    "another group": lambda b: lambda x: (gather(b, x.sum(0), group=b.dp), gather(b, x, 1)),
    "of something else": lambda b: lambda x: (gather(b, (x + 1).sum(0)), gather(b, x, 1)),
    "of all": lambda b: lambda x: (gather(b, x.sum().view(1)), gather(b, x, 1)),
    "gathered alone": lambda b: lambda x: gather(b, x.sum(0)),
    "written in between": written,
}


@pytest.mark.parametrize("case", REFUSED)
def test_must_not_fire(bench, case):
    assert bench.keeps(ReuseGather(), bench.trace(REFUSED[case](bench), (3, 4, 6)))


def test_symbolic_sizes(bench):
    """What is gathered later may have a size that is not known yet, and stays; one that came before is used."""
    first = bench.trace(lambda x: (gather(bench, x, 1), gather(bench, x.sum(0))), (3, 4, 6), symbolic=True)
    assert bench.apply(ReuseGather(), first) == 1
    assert count(first) == {"all_gather": 1}
    viewed = bench.trace(
        lambda x: (gather(bench, x, 1), gather(bench, x.view(x.shape[0], -1, 6).sum(0))), (3, 4, 6), symbolic=True
    )
    assert bench.apply(ReuseGather(), viewed) == 1
    reduced = bench.trace(
        lambda x: (gather(bench, x, 1), gather(bench, x.sum(0, keepdim=True).view(x.shape[1], 6))),
        (3, 4, 6),
        symbolic=True,
    )
    assert bench.apply(ReuseGather(), reduced) == 1
