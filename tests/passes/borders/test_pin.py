"""The order of the schedule, kept for Inductor."""

import pytest
import torch
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.passes import Compilation, Lower, Pin, Schedule, collectives


def scheduled(bench, f, *shapes):
    gm = bench.trace(f, *shapes)
    Lower()(gm.graph)
    Schedule()(gm.graph)
    return gm


def test_products_run_after_the_start_and_the_wait_after_them(bench):
    def f(x, y, z):
        late = x @ y
        return late, ops.all_reduce(x @ z, "sum", bench.tp).relu()

    gm = scheduled(bench, f, (4, 4), (4, 4), (4, 4))
    sent = collectives(gm)
    assert bench.apply(Pin(), gm) == 1
    assert collectives(gm) == sent
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,4] = placeholder
%y_1: f32[4,4] = placeholder
%z_1: f32[4,4] = placeholder
%mm: f32[4,4] = aten.mm(%x_1, %z_1)
%all_reduce: f32[4,4] = _c10d_functional.all_reduce(%mm, 'sum', tp)
%mm_1: f32[4,4] = aten.mm(%x_1, %y_1) after [%all_reduce]
%wait_tensor: f32[4,4] = _c10d_functional.wait_tensor(%all_reduce) after [%mm_1]
%relu: f32[4,4] = aten.relu(%wait_tensor)
return %mm_1, %relu""",
    )


def test_attention_runs_after_the_start_and_the_wait_after_it(bench):
    """Of its results only one is read."""

    def f(x, y):
        late = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0]
        return late, ops.all_reduce(y * 2, "sum", bench.tp).relu()

    gm = scheduled(bench, f, (2, 3, 4, 8), (4, 4))
    assert bench.apply(Pin(), gm) == 1
    said = bench.text(gm)
    assert "aten._scaled_dot_product_flash_attention_for_cpu(%x_1, %x_1, %x_1) after [%all_reduce]" in said
    assert "wait_tensor(%all_reduce) after [%scaled_dot_product_flash_attention_for_cpu]" in said


def test_where_nothing_long_runs_in_between_nothing_is_pinned(bench):
    def f(x, y):
        return ops.all_reduce(x @ y, "sum", bench.tp).relu() + y.sin()

    assert bench.keeps(Pin(), scheduled(bench, f, (4, 4), (4, 4)))


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("names", [(), ("schedule",)])
def test_only_what_schedule_ordered_and_inductor_compiles(inner, names):
    taken = Pin().taking(Compilation("forward", inner, frozenset(names)))
    assert (taken is not None) == (inner == "inductor" and names == ("schedule",))
