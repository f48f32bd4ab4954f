"""Collectives of uneven shards keep their order."""

from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.mesh.provenance import SENT
from dtensor.passes import Agree, Compilation, KeepOrder, Lower
from dtensor.passes.graph import ir


def lowered(bench, *, uneven):
    """Three reductions that depend on nothing of each other."""

    def f(x, y, z):
        return [ops.all_reduce(value, "sum", bench.tp) for value in (x, y, z)]

    gm = bench.trace(f, (4,), (4,), (4,))
    Lower()(gm.graph)
    if uneven:
        next(node for node in gm.graph.nodes if node.target in ir.STARTS).meta[SENT] = 16
    return gm


def test_each_runs_after_the_one_before(bench):
    gm = lowered(bench, uneven=True)
    assert bench.apply(KeepOrder(), gm) == 2
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4] = placeholder
%y_1: f32[4] = placeholder
%z_1: f32[4] = placeholder
%all_reduce: f32[4] = _c10d_functional.all_reduce(%x_1, 'sum', tp)
%wait_tensor: f32[4] = _c10d_functional.wait_tensor(%all_reduce)
%all_reduce_1: f32[4] = _c10d_functional.all_reduce(%y_1, 'sum', tp) after [%all_reduce]
%wait_tensor_1: f32[4] = _c10d_functional.wait_tensor(%all_reduce_1)
%all_reduce_2: f32[4] = _c10d_functional.all_reduce(%z_1, 'sum', tp) after [%all_reduce_1]
%wait_tensor_2: f32[4] = _c10d_functional.wait_tensor(%all_reduce_2)
return %wait_tensor, %wait_tensor_1, %wait_tensor_2""",
    )


def test_also_after_the_agreement(bench):
    gm = lowered(bench, uneven=True)
    Agree(Compilation("forward", "inductor"))(gm.graph)
    assert bench.apply(KeepOrder(), gm) == 2


def test_even_shards_are_left_alone(bench):
    assert bench.keeps(KeepOrder(), lowered(bench, uneven=False))
    assert KeepOrder().taking(Compilation("forward", "aot_eager")) is None
