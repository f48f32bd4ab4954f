"""Redistribution in compiled graphs: merged axes, permutations, sizes that stay symbolic; on real processes."""

import pytest
import torch

from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.compile import statistics
from dtensor.mesh.mesh import facts
from dtensor.testing import with_ranks


def ordered(x, text):
    return torch.ops.dtensor.redistribute(x, text, False)


def around(x):
    """Through merged collectives of every kind, and a permutation."""
    whole = x.redistribute(placements=[Replicate(), Replicate()])
    other = ordered(x * 2, "S(0)#1S(0)#0")
    columns = ordered(other, "S(1)S(1)").redistribute(placements=[Replicate(), Replicate()])
    return (whole * columns).sin().redistribute(placements=[Shard(0), Shard(0)])


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.nightly)])
@with_ranks(4)
def test_compiled_is_eager(rank, dynamic):
    mesh = init_device_mesh("cpu", (2, 2))
    compiled = torch.compile(around, backend="dtensor", fullgraph=True, dynamic=dynamic, options={"inner": "aot_eager"})
    for rows in (8, 12):
        whole = torch.linspace(-1, 1, rows * 4, dtype=torch.float64).view(rows, 4)
        results = []
        for f in (around, compiled):
            x = distribute_tensor(whole, mesh, [Shard(0), Shard(0)]).requires_grad_()
            y = f(x)
            (y * y).sum().backward()
            results.append((y.full_tensor().detach(), x.grad.full_tensor()))
        plain = whole.clone().requires_grad_()
        dense = (plain * plain * 2).sin()
        (dense * dense).sum().backward()
        for found, grad in results:
            torch.testing.assert_close(found, dense.detach())
            torch.testing.assert_close(grad, plain.grad)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@with_ranks(4)
def test_a_pending_result_is_waited_for(rank, inner):
    x = DTensor.from_local(torch.full((4,), 1.0 + rank), init_device_mesh("cpu", (2, 2)), [Partial(), Partial()])
    pending = torch.compile(
        lambda x: x.redistribute(placements=[Replicate()] * 2, async_op=True) + 1,
        backend="dtensor",
        fullgraph=True,
        options={"inner": inner},
    )
    assert pending(x).to_local().tolist() == [11.0] * 4


@pytest.fixture
def mesh(fake_mesh):
    return fake_mesh(2, 2)


def compiled(f, x, **options):
    with statistics() as seen:
        out = torch.compile(f, backend="dtensor", fullgraph=True, options={"inner": "aot_eager"}, **options)(x)
    return out, seen


def test_one_graph_of_symbolic_sizes(mesh):
    """On one rank, without values, forward and backward."""
    torch.compiler.reset()
    run = torch.compile(around, backend="dtensor", fullgraph=True, dynamic=True, options={"inner": "aot_eager"})
    with statistics() as seen:
        for rows in (8, 12):
            x = distribute_tensor(torch.ones(rows, 4), mesh, [Shard(0), Shard(0)]).requires_grad_()
            y = run(x)
            y.to_local().sum().backward()
            assert x.grad is not None
            assert y.to_local().shape == x.grad.to_local().shape == (rows // 4, 4)
    assert seen.graphs == 1
    world = facts(mesh).groups[(0, 1)]
    found = [(c.op, c.group) for c in (*seen.forward, *seen.backward)]
    assert {("all_gather", world), ("collective_permute", world)} <= set(found), found


def test_merged_axes_are_one_collective_in_the_graph(mesh):
    world = facts(mesh).groups[(0, 1)]
    x = DTensor.from_local(torch.ones(4), mesh, [Partial(), Partial()])
    _, seen = compiled(lambda x: x.redistribute(placements=[Replicate(), Replicate()]), x)
    assert [(c.op, c.group) for c in seen.forward] == [("all_reduce", world)]
    x = distribute_tensor(torch.ones(8), mesh, [Shard(0), Shard(0)])
    _, seen = compiled(lambda x: x.redistribute(placements=[Replicate(), Replicate()]), x)
    assert [(c.op, c.group) for c in seen.forward] == [("all_gather", world)]
    _, seen = compiled(lambda x: ordered(x, "S(0)#1S(0)#0"), x)
    assert [(c.op, c.group) for c in seen.forward] == [("collective_permute", world)]


def test_gather_and_shard_over_merged_axes_cancel(mesh):
    x = distribute_tensor(torch.ones(8), mesh, [Shard(0), Shard(0)])

    def back(x):
        return x.redistribute(placements=[Replicate()] * 2).redistribute(placements=[Shard(0)] * 2) + 1

    out, seen = compiled(back, x)
    assert out.to_local().tolist() == [2.0, 2.0]
    assert list(seen.forward) == []


def test_sizes_that_stop_dividing_get_a_graph_of_their_own(mesh):
    """A merged gather is guarded by what makes it exact."""
    f = torch.compile(lambda x: x.redistribute(placements=[Replicate()] * 2) + 1, fullgraph=True, dynamic=True)
    for rows in (8, 12, 6, 16):
        x = distribute_tensor(torch.ones(rows), mesh, [Shard(0), Shard(0)])
        assert f(x).to_local().shape == (rows,)


def test_pending_results_are_inputs_like_others(mesh):
    x = distribute_tensor(torch.ones(8), mesh, [Shard(0), Shard(0)])
    f = torch.compile(lambda x: x + 1, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        y = x.redistribute(placements=[Replicate()] * 2, async_op=True)
        assert f(y).to_local().shape == (8,)


@with_ranks(2)
def test_a_scale_of_ones_own_stays_ones_own(rank):
    """Numbers on DTensors are the same on all ranks; on what `to_local` gives, a program may well use its rank."""
    mesh = init_device_mesh("cpu", (2,))
    x, y = (DTensor.from_local(torch.full((4,), float(v + rank)), mesh, [Partial()]) for v in (1, 5))

    def scaled(x, y):
        a, b = (v.redistribute(placements=[Replicate()]) for v in (x, y))
        return (a * 0.5 + b).to_local()

    def scaled_by_rank(x, y):
        a, b = (v.redistribute(placements=[Replicate()]).to_local() for v in (x, y))
        return a * (rank + 2) + b

    for f, collectives in ((scaled, 1), (scaled_by_rank, 2)):
        torch.compiler.reset()
        options = {"inner": "aot_eager", "disable": ["bucket"]}
        compiled = torch.compile(f, backend="dtensor", fullgraph=True, options=options)
        with statistics() as s, torch.no_grad():
            torch.testing.assert_close(compiled(x, y), f(x, y))
        assert [c.op for c in s.forward] == ["all_reduce"] * collectives
