"""Calls with equal arguments, and those that only look equal."""

import pytest
import torch
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.passes import CommonSubexpressions, count
from dtensor.torch_private.core import c10d


def twice(f):
    return lambda x: f(x) * f(x)


def test_equal_collectives_are_one(bench):
    gm = bench.trace(twice(lambda x: ops.all_reduce(x * 2, "sum", bench.tp)), (4,))
    assert bench.apply(CommonSubexpressions(), gm) == 2
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4] = placeholder
%mul: f32[4] = aten.mul.Tensor(%x_1, 2)
%all_reduce: f32[4] = dtensor.all_reduce(%mul, 'sum', tp)
%mul_1: f32[4] = aten.mul.Tensor(%all_reduce, %all_reduce)
return %mul_1""",
    )


def test_equal_starts_and_waits_are_one(bench):
    gm = bench.trace(twice(lambda x: c10d.wait_tensor(c10d.all_reduce(x, "sum", bench.tp))), (4,))
    assert bench.apply(CommonSubexpressions(), gm) == 2
    assert count(gm) == {"all_reduce": 1}


def test_two_outputs_stay_two_tensors(bench):
    gm = bench.trace(lambda x: [ops.all_reduce(x, "sum", bench.tp) for _ in range(2)], (4,))
    assert bench.apply(CommonSubexpressions(), gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4] = placeholder
%all_reduce: f32[4] = dtensor.all_reduce(%x_1, 'sum', tp)
%clone: f32[4] = aten.clone(%all_reduce, memory_format=contiguous_format)
return %all_reduce, %clone""",
    )


@pytest.mark.parametrize("first", [True, False])
def test_where_one_of_two_leaves_the_graph_it_stands_for_both(bench, first):
    def f(x):
        a, b = x * 2, x * 2
        return (a, b + 1) if first else (b, a + 1)

    gm = bench.trace(f, (4,))
    assert bench.apply(CommonSubexpressions(), gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4] = placeholder
%mul: f32[4] = aten.mul.Tensor(%x_1, 2)
%add: f32[4] = aten.add.Tensor(%mul, 1)
return %mul, %add""",
    )


def write_between(x):
    a = x * 2
    x.add_(1)
    return a + x * 2


def write_to_result(x):
    a, b = x.clone(), x.clone()
    a.add_(1)
    return a * b


DIFFERENT = {
    "random": twice(torch.rand_like),
    "int and float": lambda x: torch.add(x, 1) * torch.add(x, 1.0),
    "negative zero": lambda x: torch.div(x, 0.0) * torch.div(x, -0.0),
    "write between": write_between,
    "write to a result": write_to_result,
    "two outputs": lambda x: (x * 2, x * 2),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_must_not_merge(bench, case):
    assert bench.keeps(CommonSubexpressions(), bench.trace(DIFFERENT[case], (4,)))


def test_other_groups_must_not_merge(bench):
    gm = bench.trace(lambda x: ops.all_reduce(x, "sum", bench.tp) * ops.all_reduce(x, "sum", bench.dp), (4,))
    assert bench.keeps(CommonSubexpressions(), gm)
