"""Calls without users."""

from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.passes import DeadCode, count
from dtensor.torch_private.core import c10d


def dead(bench):
    def f(x):
        ops.all_gather(x + 1, 0, 8, bench.tp)
        c10d.wait_tensor(c10d.all_reduce(x, "sum", bench.tp))
        many = c10d.all_reduce_coalesced([x, x], "sum", bench.tp)
        [c10d.wait_tensor(item) for item in many]
        return x * 2

    return f


def test_dead_collectives_go(bench):
    gm = bench.trace(dead(bench), (4,))
    assert sum(count(gm).values()) == 3
    assert bench.apply(DeadCode(), gm) == 9
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4] = placeholder
%mul: f32[4] = aten.mul.Tensor(%x_1, 2)
return %mul""",
    )


def test_what_has_an_effect_stays(bench):
    def f(x, buffer):
        c10d.wait_tensor(c10d.all_reduce_(buffer, "sum", bench.tp))
        c10d.wait_tensor(buffer)
        x.add_(1)
        return ops.all_reduce(buffer, "sum", bench.tp)

    assert bench.keeps(DeadCode(), bench.trace(f, (4,), (4,)))
