"""From one mesh to another: values, gradients, and what goes over the wire."""

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

import dtensor
from dtensor import DTensor, Partial, PlacementError, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.comm.between_meshes import handed_over
from dtensor.layout.layout import Layout
from dtensor.testing import CountCollectives, run_threads, with_ranks, with_threads

RANKS = [
    [0, 1, 2, 3],
    [[0, 1], [2, 3]],
    [[0, 2], [1, 3]],
    [1, 2],
    [[0], [3]],
    [2],
    [[[0, 1], [2, 3]]],
]
"""Meshes over four ranks: all of them in two orders, some of them, one."""

placements = st.sampled_from([Shard(0), Shard(1), Replicate()])


def on(at, ranks, whole, given_placements):
    """This rank's part of `whole` on a mesh, without the library."""
    mesh = torch.tensor(ranks)
    where = (mesh == at).nonzero()
    if len(where) == 0:
        return torch.empty(0, dtype=whole.dtype)
    for axis, p in enumerate(given_placements):
        if isinstance(p, Shard):
            chunks = whole.chunk(mesh.shape[axis], p.dim)
            index = int(where[0, axis])
            whole = chunks[index] if index < len(chunks) else whole.narrow(p.dim, 0, 0)
    return whole


@st.composite
def moves(draw):
    one, other = draw(st.sampled_from(RANKS)), draw(st.sampled_from(RANKS))
    sides = [[draw(placements) for _ in torch.tensor(r).shape] for r in (one, other)]
    return one, sides[0], other, sides[1], (draw(st.integers(0, 6)), draw(st.integers(0, 5)))


def moved(rank, some):
    """Move each tensor to the other mesh, and a gradient back."""
    for one, src, other, dst, shape in some:
        meshes = [DeviceMesh("cpu", torch.tensor(r)) for r in (one, other)]
        dtensor.prepare(*meshes)
        whole = torch.arange(shape[0] * shape[1], dtype=torch.float64).view(shape)
        x = distribute_tensor(whole, meshes[0], src).requires_grad_()
        y = x.redistribute(meshes[1], dst)
        assert (y.device_mesh, y.placements, y.shape) == (meshes[1], tuple(dst), whole.shape)
        assert torch.equal(y.to_local(), on(rank, other, whole, dst))
        y.backward(distribute_tensor(whole + 1, meshes[1], dst))
        assert x.grad.device_mesh == meshes[0]
        assert torch.equal(x.grad.to_local(), on(rank, one, whole + 1, src))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(moves(), min_size=5, max_size=10))
def test_any_mesh_to_any_other(some):
    run_threads(moved, 4, some)


@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 4))
def test_parts_cover_every_box_once(length, n, m):
    before = {r: Layout.parse("S(0)", 1).local_box((length,), (n,), (r,)) for r in range(n)}
    after = {r: Layout.parse("S(0)", 1).local_box((length,), (m,), (r,)) for r in range(m)}
    found = {r: [] for r in after}
    for part in handed_over(before, after):
        (begin, end), (start, stop) = part.box[0], before[part.sender][0]
        assert start <= begin < end <= stop
        found[part.receiver] += range(begin, end)
    assert {r: sorted(got) for r, got in found.items()} == {r: list(range(*box[0])) for r, box in after.items()}


def test_replicas_take_turns_and_nobody_sends_to_itself_over_the_wire():
    before = dict.fromkeys((0, 1), ((0, 4),))
    after = dict.fromkeys((1, 2, 3), ((0, 4),))
    assert [(p.sender, p.receiver) for p in handed_over(before, after)] == [(1, 1), (1, 2), (0, 3)]


@with_threads(4)
def test_nothing_is_sent_where_every_rank_has_its_part(rank):
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.arange(8.0), line, [Shard(0)])
    with CountCollectives() as seen:
        y = x.redistribute(square, [Shard(0), Shard(0)])
        assert y.to_local().tolist() == [2.0 * rank, 2.0 * rank + 1]
        whole = distribute_tensor(torch.arange(8.0), line, [Replicate()], src_data_rank=None)
        assert whole.redistribute(square, [Replicate(), Shard(0)]).to_local().tolist() == [
            4.0 * (rank % 2) + i for i in range(4)
        ]
    assert [c.op for c in seen.collectives] == []


@with_threads(4)
def test_partial_sources_are_reduced_first(rank):
    line, pair = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", torch.tensor([1, 3]))
    x = DTensor.from_local(torch.full((6,), float(rank)), line, [Partial()]).requires_grad_()
    y = x.redistribute(pair, [Shard(0)])
    assert y.to_local().tolist() == ([6.0] * 3 if rank in (1, 3) else [])
    y.backward(distribute_tensor(torch.arange(6.0), pair, [Shard(0)]))
    assert x.grad.placements == (Replicate(),)
    assert x.grad.to_local().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    with pytest.raises(PlacementError, match=r"cannot redistribute mesh axis 0 from R to P"):
        x.redistribute(pair, [Partial()])


@with_threads(4)
def test_gradients_twice_and_where_asked_for(rank):
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.arange(1.0, 5.0), line, [Shard(0)]).requires_grad_()
    y = x.redistribute(square, [Shard(0), Replicate()], grad_placements=[Replicate()])
    (g,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
    assert g.device_mesh == line
    assert g.placements == (Replicate(),)
    assert g.full_tensor().tolist() == [3.0, 12.0, 27.0, 48.0]
    (gg,) = torch.autograd.grad(g.sum(), x)
    assert gg.full_tensor().tolist() == [6.0, 12.0, 18.0, 24.0]


@pytest.mark.nightly
@with_ranks(4)
def test_on_processes(rank):
    some = [
        (one, [Shard(i % 2)] * torch.tensor(one).dim(), other, [Shard(0)] * torch.tensor(other).dim(), (7, 5))
        for i, (one, other) in enumerate(combinations(RANKS[:4], 2))
    ]  # and gradients the other way
    moved(rank, some)
    square = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (4,)), [Shard(0)])

    def to_square(x):
        return x.redistribute(square, [Replicate(), Shard(0)]) + 1

    with pytest.raises(Exception, match=r"to another mesh cannot be compiled.*torch.compiler.disable"):
        torch.compile(to_square, fullgraph=True, backend="aot_eager")(x)
    torch._dynamo.reset()
    apart: Any = torch.compiler.disable(to_square)
    y = torch.compile(lambda x: apart(x * 2) * 2, backend="aot_eager")(x)
    assert y.to_local().tolist() == [2.0 * (2 * (4 * (rank % 2) + i) + 1) for i in range(4)]


@with_threads(4)
def test_dtypes_that_backends_do_not_take(rank):
    line, pair = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", torch.tensor([3]))
    for dtype in (torch.complex64, torch.int16, torch.bool, torch.float8_e4m3fn):
        dense = torch.arange(6).float().to(dtype)
        y = distribute_tensor(dense, line, [Shard(0)]).redistribute(pair, [Replicate()])
        assert y.dtype == dtype
        assert rank != 3 or torch.equal(y.to_local().to(torch.complex64), dense.to(torch.complex64))
