"""Replay on simulated ranks, against values worked out by hand."""

import pytest
import torch

from dtensor.comm.collectives import ops
from dtensor.errors import PassError
from dtensor.passes import equivalent, mesh_groups, simulate
from dtensor.torch_private.core import c10d


def ranks(*shape):
    """Rank r holds r * 100 + 0, 1, 2, ..."""
    n = torch.Size(shape).numel()
    return [[torch.arange(n, dtype=torch.float32).reshape(shape) + 100 * r] for r in range(4)]


def replay(bench, f, inputs):
    return simulate(bench.trace(f, inputs[0][0]), inputs, bench.simulation.groups)


def test_groups_are_the_axes_of_the_mesh(bench):
    groups = bench.simulation.groups
    assert groups[bench.dp] == ((0, 2), (1, 3))
    assert groups[bench.tp] == ((0, 1), (2, 3))


@pytest.mark.parametrize("lowered", [False, True])
def test_all_reduce_over_each_axis(bench, lowered):
    def reduce(x, group):
        return c10d.wait_tensor(c10d.all_reduce(x, "sum", group)) if lowered else ops.all_reduce(x, "sum", group)

    assert [y.item() for y in replay(bench, lambda x: reduce(x, bench.tp), ranks(1))] == [100, 100, 500, 500]
    assert [y.item() for y in replay(bench, lambda x: reduce(x, bench.dp), ranks(1))] == [200, 400, 200, 400]


@pytest.mark.parametrize(("op", "want"), [("avg", 150), ("max", 300), ("min", 0), ("product", 0), ("sum", 600)])
def test_reductions(bench, op, want):
    got = replay(bench, lambda x: ops.all_reduce(x, op, bench.world), ranks(1))
    assert [y.item() for y in got] == [want] * 4


def test_gather_scatter_exchange_and_shard(bench):
    tp = bench.tp
    got = replay(bench, lambda x: ops.all_gather(x, 0, 4, tp), ranks(2))
    assert got[3].tolist() == [200, 201, 300, 301]
    got = replay(bench, lambda x: ops.reduce_scatter(x, "sum", 0, tp), ranks(2))
    assert [y.tolist() for y in got] == [[100], [102], [500], [502]]
    got = replay(bench, lambda x: ops.all_to_all(x, 0, 1, 2, tp), ranks(1, 2))
    assert [y.flatten().tolist() for y in got] == [[0, 100], [1, 101], [200, 300], [201, 301]]
    got = replay(bench, lambda x: ops.shard(x, 0, bench.world), ranks(5))
    assert [y.tolist() for y in got] == [[0, 1], [102, 103], [204], []]


def test_permutation(bench):
    got = replay(bench, lambda x: ops.collective_permute(x, [2, 0, 1, 3], bench.world), ranks(2))
    assert [y.tolist() for y in got] == [[200, 201], [0, 1], [100, 101], [300, 301]]
    with pytest.raises(PassError, match="does not name one of 4 ranks for each"):
        replay(bench, lambda x: ops.collective_permute(x, [0, 4, 1, 3], bench.world), ranks(2))


def test_groups_over_several_axes():
    ranks = torch.arange(8).view(2, 2, 2)

    class Mesh:
        mesh, ndim = ranks, 3

    names = {(0,): "a", (0, 2): "ac", (1, 2): "bc", (0, 1, 2): "abc"}
    groups = mesh_groups(Mesh(), names)
    assert groups["a"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert groups["ac"] == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert groups["bc"] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups["abc"] == (tuple(range(8)),)


def test_functional_collectives(bench):
    def f(x):
        y = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, bench.tp))
        y = c10d.wait_tensor(c10d.reduce_scatter_tensor(y, "sum", 2, bench.tp))
        y = c10d.wait_tensor(c10d.all_to_all_single(y, [1, 1], [1, 1], bench.tp))
        many = c10d.all_reduce_coalesced([y, y * 2], "sum", bench.tp)
        return [c10d.wait_tensor(item) for item in many]

    got = replay(bench, f, ranks(2))
    # Ranks 0 and 1 gather [0, 1, 100, 101], reduce and scatter it to [0, 2] and [200, 202], exchange halves for
    # [0, 200] and [2, 202], and add these up.
    assert [y.tolist() for y in got[0]] == [[2, 402], [4, 804]] == [y.tolist() for y in got[1]]
    assert [y.tolist() for y in got[2]] == [[802, 1202], [1604, 2404]]


def test_inputs_are_not_written_to(bench):
    inputs = ranks(2)
    got = replay(bench, lambda x: x.add_(1), inputs)
    assert inputs[0][0].tolist() == [0, 1]
    assert got[0].tolist() == [1, 2]


def test_random_draws_are_the_same_again(bench):
    gm = bench.trace(lambda x: x + torch.rand_like(x), (4,))
    inputs = ranks(4)
    first, again = simulate(gm, inputs, bench.simulation.groups), simulate(gm, inputs, bench.simulation.groups)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1] - 100)


def test_unknown_group(bench):
    gm = bench.trace(lambda x: ops.all_reduce(x, "sum", bench.tp), (2,))
    with pytest.raises(PassError, match="is not among the simulated ones"):
        simulate(gm, ranks(2), {})


def test_shapes_that_do_not_fit(bench):
    gm = bench.trace(lambda x: ops.all_gather(x, 0, 4, bench.tp), (2,))
    with pytest.raises(PassError, match="gathers 6 elements along dim 0, not 4"):
        simulate(gm, ranks(3), bench.simulation.groups)


def check(bench, f, g, *shapes, exact=True, **kwargs):
    before, after = bench.trace(f, *shapes, **kwargs), bench.trace(g, *shapes, **kwargs)
    equivalent(before, after, bench.simulation.groups, 4, exact=exact)


def test_difference_is_found(bench):
    for f, g in [
        (lambda x: x + 1, lambda x: x + 1.01),
        (lambda x: ops.all_reduce(x, "sum", bench.tp), lambda x: ops.all_reduce(x, "sum", bench.dp)),
        (lambda x: ops.all_reduce(x, "sum", bench.tp), lambda x: ops.all_reduce(x, "max", bench.tp)),
        (lambda x: x, lambda x: x.double()),
        (lambda x: x, lambda x: x.reshape(-1)),
        (lambda x: (x, x), lambda x: (x,)),
    ]:
        with pytest.raises(PassError):
            check(bench, f, g, (4, 4), exact=False)


def test_exactness_tells_reassociation_from_equality(bench):
    def f(x):
        return ops.all_reduce(x, "sum", bench.world) + ops.all_reduce(x * 3, "sum", bench.world)

    def g(x):
        return ops.all_reduce(x + x * 3, "sum", bench.world)

    check(bench, f, g, (40, 40), exact=False)
    with pytest.raises(PassError, match="elements differ"):
        check(bench, f, g, (40, 40))


def test_what_reaches_a_shard_is_alike_on_its_group(bench):
    def f(x, y):
        return ops.all_gather(ops.shard(x * 2, 0, bench.tp), 0, 4, bench.tp) + y

    check(bench, f, lambda x, y: x * 2 + y, (4,), (4,))
    with pytest.raises(PassError):
        check(bench, f, lambda x, y: x * 2 + ops.all_reduce(y, "avg", bench.tp), (4,), (4,))


def test_indices_are_valid(bench):
    index = torch.zeros(3, dtype=torch.int64)
    check(bench, lambda w, i: w[i], lambda w, i: torch.index_select(w, 0, i), (2, 4), index)
