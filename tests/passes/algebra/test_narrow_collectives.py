"""Casts on either side of what moves elements."""

import pytest
import torch
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.passes import NarrowCollectives, count, run, wire_bytes

BF16 = torch.bfloat16


def gather(bench, x):
    return ops.all_gather(x, 0, x.shape[0] * 2, bench.tp)


def test_narrowing_cast_goes_first(bench):
    gm = bench.trace(lambda x: gather(bench, x).to(BF16) + 1, (4, 6))
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,6] = placeholder
%all_gather: f32[8,6] = dtensor.all_gather(%x_1, 0, 8, tp)
%to_copy: bf16[8,6] = aten._to_copy(%all_gather, dtype=bf16)
%add: bf16[8,6] = aten.add.Tensor(%to_copy, 1)
return %add""",
    )
    before = wire_bytes(gm)
    assert bench.apply(NarrowCollectives(), gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,6] = placeholder
%to_copy: bf16[4,6] = aten._to_copy(%x_1, dtype=bf16)
%all_gather: bf16[8,6] = dtensor.all_gather(%to_copy, 0, 8, tp)
%add: bf16[8,6] = aten.add.Tensor(%all_gather, 1)
return %add""",
    )
    assert wire_bytes(gm) == before // 2


def test_widening_cast_goes_last(bench):
    gm = bench.trace(lambda x: gather(bench, x.float()) + 1, (4, 6), dtype=BF16)
    before = wire_bytes(gm)
    assert bench.apply(NarrowCollectives(), gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: bf16[4,6] = placeholder
%all_gather: bf16[8,6] = dtensor.all_gather(%x_1, 0, 8, tp)
%to_copy: f32[8,6] = aten._to_copy(%all_gather, dtype=f32)
%add: f32[8,6] = aten.add.Tensor(%to_copy, 1)
return %add""",
    )
    assert wire_bytes(gm) == before // 2


MOVES = {
    "all_to_all": lambda b: lambda x: ops.all_to_all(x, 0, 1, 8, b.tp).to(BF16),
    "collective_permute": lambda b: lambda x: ops.collective_permute(x, [1, 0], b.tp).to(BF16),
    "uneven": lambda b: lambda x: ops.all_gather(ops.shard(x, 0, b.tp), 0, 4, b.tp).to(BF16),
    "to integers": lambda b: lambda x: gather(b, x).to(torch.int16),
    "inductor's cast": lambda b: (
        lambda x: torch.ops.prims.convert_element_type.default(gather(b, x), torch.bfloat16).relu()
    ),
    "inductor's widening cast": lambda b: (
        lambda x: gather(b, torch.ops.prims.convert_element_type.default(x, torch.float64)).relu()
    ),
    "another layout": lambda b: lambda x: gather(b, x.t().double()).view(-1).relu(),
}


@pytest.mark.parametrize("case", MOVES)
def test_other_moves(bench, case):
    gm = bench.trace(MOVES[case](bench), (4, 6))
    before = wire_bytes(gm)
    assert bench.apply(NarrowCollectives(), gm) == 1
    assert wire_bytes(gm) == before // 2


def test_a_cast_between_shard_and_gather_lets_them_cancel(bench):
    gm = bench.trace(lambda x: gather(bench, ops.shard(x, 0, bench.tp).double()) + 1, (4, 6))
    run(gm, simulate=bench.simulation)
    assert count(gm) == {}


def wide_and_narrow(bench):
    return lambda x: ((y := gather(bench, x)).to(BF16), y + 1)


REFUSED = {
    "needed wide": wide_and_narrow,
    "needed in two dtypes": lambda b: lambda x: ((y := gather(b, x)).to(BF16), y.to(torch.float16)),
    "as wide": lambda b: lambda x: gather(b, x).to(torch.int32),
    "wider": lambda b: lambda x: gather(b, x).double(),
    "as wide before": lambda b: lambda x: gather(b, x.to(torch.int32)),
    "narrowed before": lambda b: lambda x: gather(b, x.to(BF16)),
    "wide value used": lambda b: lambda x: (gather(b, y := x.double()), y),
    "reduction": lambda b: lambda x: ops.all_reduce(x, "sum", b.tp).to(BF16),
    "reduction of a widened value": lambda b: lambda x: ops.all_reduce(x.double(), "sum", b.tp),
    "shard": lambda b: lambda x: ops.shard(x, 0, b.tp).to(BF16),
    "another memory format too": lambda b: (
        lambda x: gather(b, x.view(1, 2, 3, 4)).to(BF16, memory_format=torch.channels_last)
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_must_not_fire(bench, case):
    assert bench.keeps(NarrowCollectives(), bench.trace(REFUSED[case](bench), (4, 6)))


def test_what_is_written_between_stays(bench):
    def f(x, y):
        wide = x.double()
        x.add_(1)
        return gather(bench, wide) + y

    assert bench.keeps(NarrowCollectives(), bench.trace(f, (4, 6), (8, 6)))


def test_a_cast_in_the_backward_stays_there(bench):
    gm = bench.trace(lambda x: gather(bench, x).to(BF16), (4, 6))
    list(gm.graph.nodes)[2].meta["partitioner_tag"] = "is_backward"
    assert bench.keeps(NarrowCollectives(), gm)
