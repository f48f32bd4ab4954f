"""all_gather and shard of one group."""

import pytest
import torch
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.passes import CancelGatherShard, wire_bytes


def test_other_dim_becomes_all_to_all(bench):
    def f(x):
        return torch.relu(ops.shard(ops.all_gather(x, 0, 8, bench.tp), 1, bench.tp))

    gm = bench.trace(f, (4, 6))
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,6] = placeholder
%all_gather: f32[8,6] = dtensor.all_gather(%x_1, 0, 8, tp)
%shard: f32[8,3] = dtensor.shard(%all_gather, 1, tp)
%relu: f32[8,3] = aten.relu(%shard)
return %relu""",
    )
    before = wire_bytes(gm)
    assert bench.apply(CancelGatherShard(), gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,6] = placeholder
%all_to_all: f32[8,3] = dtensor.all_to_all(%x_1, 0, 1, 8, tp)
%relu: f32[8,3] = aten.relu(%all_to_all)
return %relu""",
    )
    assert (before, wire_bytes(gm)) == (8 * 6 * 4 // 2, 4 * 6 * 4 // 2)


def test_a_dim_before_the_gathered_one_becomes_all_to_all(bench):
    gm = bench.trace(lambda x: torch.relu(ops.shard(ops.all_gather(x, 1, 8, bench.tp), 0, bench.tp)), (6, 4))
    assert bench.apply(CancelGatherShard(), gm) == 1
    assert "%all_to_all: f32[3,8] = dtensor.all_to_all(%x_1, 1, 0, 8, tp)" in bench.text(gm)


def test_same_dim_is_identity(bench):
    def f(x):
        full = ops.all_gather(x, 0, 8, bench.tp)
        return torch.relu(ops.shard(full, 0, bench.tp)), full

    gm = bench.trace(f, (4, 6))
    assert bench.apply(CancelGatherShard(), gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,6] = placeholder
%all_gather: f32[8,6] = dtensor.all_gather(%x_1, 0, 8, tp)
%relu: f32[4,6] = aten.relu(%x_1)
return %relu, %all_gather""",
    )


def test_shard_then_gather_is_identity(bench):
    gm = bench.trace(lambda x: ops.all_gather(ops.shard(x, 1, bench.tp), 1, 6, bench.tp) * 2, (4, 6))
    assert bench.apply(CancelGatherShard(), gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,6] = placeholder
%mul: f32[4,6] = aten.mul.Tensor(%x_1, 2)
return %mul""",
    )


def test_uneven_shards(bench):
    gm = bench.trace(lambda x: ops.all_gather(ops.shard(x, 0, bench.world), 0, 5, bench.world) * 2, (5, 3))
    assert bench.apply(CancelGatherShard(), gm) == 1
    gm = bench.trace(lambda x: ops.shard(ops.all_gather(x, 0, 4, bench.tp), 1, bench.tp) * 2, (2, 3))
    assert bench.apply(CancelGatherShard(), gm) == 1


def test_identity_that_leaves_the_graph_is_a_copy(bench):
    gm = bench.trace(lambda x: ops.shard(ops.all_gather(x, 0, 8, bench.tp), 0, bench.tp), (4, 6))
    assert bench.apply(CancelGatherShard(), gm) == 1
    assert "aten.clone(%x_1" in bench.text(gm)


def test_identity_keeps_the_memory_layout(bench):
    def f(x):
        y = ops.shard(ops.all_gather(x.t(), 0, 8, bench.tp), 0, bench.tp)
        return y.view(-1) + 1

    gm = bench.trace(f, (6, 4))
    assert bench.apply(CancelGatherShard(), gm) == 1
    assert "aten.clone" in bench.text(gm)


def test_dims_count_from_either_end(bench):
    gm = bench.trace(lambda x: ops.shard(ops.all_gather(x, -2, 8, bench.tp), 0, bench.tp) + 1, (4, 6))
    assert bench.apply(CancelGatherShard(), gm) == 1


def test_other_group_stays(bench):
    assert bench.keeps(
        CancelGatherShard(), bench.trace(lambda x: ops.shard(ops.all_gather(x, 0, 8, bench.tp), 1, bench.dp), (4, 6))
    )


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("turned", [False, True])
def test_another_group_of_as_many_ranks_stays(bench, dim, turned):
    """Along one dim and along two, whichever group comes first."""
    one, other = (bench.tp, bench.dp) if turned else (bench.dp, bench.tp)
    gm = bench.trace(lambda x: ops.shard(ops.all_gather(x, 0, 8, one), dim, other) + 1, (4, 6))
    assert bench.keeps(CancelGatherShard(), gm)
    gm = bench.trace(lambda x: ops.all_gather(ops.shard(x, 0, one), dim, (4, 12)[dim], other) + 1, (4, 6))
    assert bench.keeps(CancelGatherShard(), gm)


def test_full_value_that_is_needed_keeps_the_gather(bench):
    def f(x):
        full = ops.all_gather(x, 0, 8, bench.tp)
        return ops.shard(full, 1, bench.tp), full + 1

    assert bench.keeps(CancelGatherShard(), bench.trace(f, (4, 6)))


def test_more_shards_than_ranks_keep_the_gather(bench):
    def f(x):
        full = ops.all_gather(x, 0, 4, bench.tp)
        return [ops.shard(full, dim, bench.tp) for dim in (1, 2, 3)]

    assert bench.keeps(CancelGatherShard(), bench.trace(f, (2, 2, 2, 2)))


def test_gather_of_another_size_is_no_identity(bench):
    # Four rows gathered to seven: rank 0 holds four of them, but the graph of rank 0 says nothing of rank 1.
    gm = bench.trace(lambda x: ops.all_gather(ops.shard(x, 0, bench.tp), 0, 7, bench.tp) + 1, (8, 2))
    assert bench.keeps(CancelGatherShard(), gm)


def test_shards_of_another_length_than_was_gathered_stay(bench):
    """They lie along the gathered dim, so they are no all_to_all either."""
    gm = bench.trace(lambda x: ops.shard(ops.all_gather(x, 0, 6, bench.tp), 0, bench.tp) + 1, (4, 6))
    assert bench.keeps(CancelGatherShard(), gm)


def test_symbolic_batch(bench):
    def f(x):
        full = ops.all_gather(x, 0, x.shape[0] * 2, bench.tp)
        return ops.shard(full, 0, bench.tp) + 1

    gm = bench.trace(f, (4, 6), symbolic=True)
    assert bench.apply(CancelGatherShard(), gm) == 1
    assert "shard" not in bench.text(gm)
