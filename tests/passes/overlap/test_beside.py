"""The comparison of inputs behind the first collective of a model."""

import torch
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.passes import Beside, Compilation, Lower, Pin, Schedule, collectives


def graph(bench, f, *shapes):
    gm = bench.trace(f, *shapes)
    Lower()(gm.graph)
    return gm


def checked(x, group):
    numbers = ops.all_gather(ops.input_numbers([x]), 0, 4, group)
    torch._assert_async(ops.inputs_alike(numbers, [2], [1], ["x"])[0], "differ")


def test_it_starts_behind_the_first_collective_and_is_read_before_it(bench):
    def f(x, y):
        checked(x, bench.tp)
        return ops.all_reduce(x @ y, "sum", bench.tp).relu()

    gm = graph(bench, f, (4, 4), (4, 4))
    sent = collectives(gm)
    assert Beside()(gm.graph) == 1
    assert [info.op for info in collectives(gm)] == [info.op for info in sent[::-1]]
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,4] = placeholder
%y_1: f32[4,4] = placeholder
%mm: f32[4,4] = aten.mm(%x_1, %y_1)
%all_reduce: f32[4,4] = _c10d_functional.all_reduce(%mm, 'sum', tp)
%input_numbers: i64[2] = dtensor.input_numbers([%x_1])
%all_gather_into_tensor: i64[4] = _c10d_functional.all_gather_into_tensor(%input_numbers, 2, tp)
%wait_tensor: i64[4] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
%inputs_alike: b8[1] = dtensor.inputs_alike(%wait_tensor, [2], [1], ['x'])
%select: b8[] = aten.select.int(%inputs_alike, 0, 0)
%assert_async: none = aten._assert_async.msg(%select, 'differ')
%wait_tensor_1: f32[4,4] = _c10d_functional.wait_tensor(%all_reduce)
%relu: f32[4,4] = aten.relu(%wait_tensor_1)
return %relu""",
    )


def test_under_inductor_the_order_is_kept_with_that_of_others(bench):
    def f(x, y, z):
        checked(x, bench.tp)
        late = x @ y
        return late, ops.all_reduce(x @ z, "sum", bench.tp).relu()

    gm = graph(bench, f, (4, 4), (4, 4), (4, 4))
    Schedule()(gm.graph)
    assert bench.apply(Beside(Compilation("forward", "inductor")), gm) == 1
    Pin()(gm.graph)
    lines = [line.split(" = ") for line in bench.text(gm).splitlines() if " after " in line]
    assert_expected_inline(
        "\n".join([f"{a.split(':')[0]} after{b.split(' after')[1]}" for a, b in lines]),
        """\
%input_numbers after [%all_reduce]
%mm_1 after [%all_gather_into_tensor]
%wait_tensor after [%mm_1]
%wait_tensor_1 after [%inputs_alike]""",
    )


def test_alone_it_stays_where_it_is(bench):
    def f(x):
        checked(x, bench.tp)
        return x.relu()

    assert bench.keeps(Beside(), graph(bench, f, (4, 4)))


def test_what_was_sent_before_stays_before(bench):
    def f(x):
        y = ops.all_reduce(x, "sum", bench.tp)
        checked(x, bench.tp)
        return y.relu()

    assert bench.keeps(Beside(), graph(bench, f, (4, 4)))
