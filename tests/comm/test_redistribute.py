"""Redistribution: any layout to any other; values against dense torch on simulated ranks, threads and processes."""

import copy
import functools
import pickle
import random
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from dtensor import DTensor, Partial, PlacementError, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.comm.collectives import fit, start
from dtensor.comm.pending_tensor import Pending
from dtensor.layout.layout import Layout
from dtensor.layout.planner import plan
from dtensor.layout.transitions import senders
from dtensor.prices.links import Network
from dtensor.testing import CountCollectives, run_ranks, run_threads, with_ranks, with_threads

FOLD = {"sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}
WORLDS = {
    1: [(1,), (1, 1)],
    2: [(2,), (1, 2), (2, 1)],
    3: [(3,), (3, 1)],
    4: [(4,), (2, 2), (1, 2, 2), (2, 1, 2)],
    6: [(6,), (2, 3), (3, 2), (3, 1, 2)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2)],
}
"""World size -> meshes over it."""


def gathered_at_once(rank):
    """Many gathers started before the first is waited for, of sizes small and large; how many gave other values."""
    group, wrong = torch.distributed.group.WORLD.group_name, 0
    for step in range(300):
        lengths = [(64, 256, 4096, 65536)[(step + k) % 4] for k in range(8)]
        waits = [start("all_gather", torch.full((n,), rank + 1.0), 0, 2 * n, group) for n in lengths]
        for n, wait in zip(lengths, waits):
            y = wait()
            wrong += bool(y.sum() != 3 * n or y[0] != 1 or y[-1] != 2)
    return wrong


def test_several_gathers_under_way():
    """Gloo's own, called so, damages the heap; a process then dies within some thousands of them."""
    assert run_ranks(gathered_at_once, 2) == [0, 0]


def reduced(xs, op):
    total = functools.reduce(FOLD[op], xs)
    return total / len(xs) if op == "avg" else total


def dense(parts, layout, sizes, shape):
    """The global tensor that the ranks' local tensors say, without the library; replicas must agree bit by bit."""
    ops = dict(layout.partial)
    filled = {}
    for x, at in zip(parts, product(*map(range, sizes)), strict=True):
        key = tuple(at[a] if a in ops else 0 for a in range(len(sizes)))
        place = tuple(slice(*span) for span in layout.local_box(shape, sizes, at))
        values, known = filled.setdefault(key, (torch.zeros(shape, dtype=x.dtype), torch.zeros(shape, dtype=bool)))
        assert x.shape == values[place].shape
        assert torch.equal(values[place][known[place]], x[known[place]])
        values[place], known[place] = x, True
    assert all(known.all() for _, known in filled.values())
    whole = {key: values for key, (values, _) in filled.items()}
    for axis in reversed(range(len(sizes))):
        if axis in ops:
            keys = dict.fromkeys([(*k[:axis], 0, *k[axis + 1 :]) for k in whole])
            rows = {k: [whole[(*k[:axis], i, *k[axis + 1 :])] for i in range(sizes[axis])] for k in keys}
            whole = {k: reduced(row, ops[axis]) for k, row in rows.items()}
    (found,) = whole.values()
    return found


def values_of(layout, shape, sizes, seed):
    """Local tensors of each rank: small whole numbers, which doubles add and multiply exactly."""
    draw = torch.Generator().manual_seed(seed)
    made, parts = {}, []
    for at in product(*map(range, sizes)):
        key = tuple(at[a] for a, _ in layout.partial)
        if key not in made:
            made[key] = torch.randint(-3, 4, shape, generator=draw).double()
        place = tuple(slice(*span) for span in layout.local_box(shape, sizes, at))
        parts.append(made[key][place].clone())
    return parts


def agree(found, expected, src, dst):
    if any(op == "avg" for _, op in src.partial + dst.partial):
        torch.testing.assert_close(found, expected)
    else:
        assert torch.equal(found, expected)


@st.composite
def layouts(draw, mesh_ndim, ndim, ops=tuple(FOLD)):
    cut = [[] for _ in range(ndim)]
    partial = []
    for axis in draw(st.permutations(range(mesh_ndim))):
        where = draw(st.sampled_from([*range(ndim), "R", "R", *ops]))
        if isinstance(where, int):
            cut[where].append(axis)
        elif where != "R":
            partial.append((axis, where))
    return Layout.make(mesh_ndim, tuple(map(tuple, cut)), tuple(sorted(partial)))


shapes = st.lists(st.one_of(st.integers(0, 9), st.sampled_from([4, 8])), max_size=3).map(tuple)


def chunk(x, dim, n, index):
    """Chunk `index` of `torch.chunk`, empty past the end."""
    chunks = x.chunk(n, dim)
    return chunks[index] if index < len(chunks) else x.narrow(dim, 0, 0)


def stepped(step, xs, index):
    """What rank `index` of a group that holds `xs` has after a step."""
    n = len(xs)
    match step.op:
        case "all_gather":
            return torch.cat(xs, step.dim)
        case "all_to_all":
            return chunk(torch.cat(xs, step.dim), step.scatter_dim, n, index)
        case "all_reduce":
            return reduced(xs, step.reduce_op)
        case "reduce_scatter":
            return chunk(reduced(xs, step.reduce_op), step.dim, n, index)
        case "shard":
            return chunk(xs[index], step.dim, n, index)
        case "partial" if step.reduce_op in ("sum", "product") and index:
            return torch.full_like(xs[index], step.reduce_op == "product")
    return xs[index]


def simulated(steps, parts, sizes):
    """The ranks' local tensors after `steps`, all ranks in lock step in this thread."""
    ranks = list(product(*map(range, sizes)))
    for step in steps:
        after = []
        for at in ranks:
            row = [i for i, r in enumerate(ranks) if all(r[a] == at[a] for a in range(len(at)) if a not in step.axes)]
            index, xs = row.index(ranks.index(at)), [parts[i] for i in row]
            if step.op == "collective_permute":
                after.append(xs[senders(step.src.dims, step.dst.dims, step.axes, sizes)[index]])
            else:
                after.append(stepped(step, xs, index))
        parts = after
    return parts


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_layout_to_any_other_simulated(data):
    """Every reduction, order of axes, length and mesh; plans with and without merged groups, of both preferences."""
    sizes = data.draw(st.sampled_from([m for meshes in WORLDS.values() for m in meshes]))
    shape = data.draw(shapes)
    src, dst = data.draw(layouts(len(sizes), len(shape))), data.draw(layouts(len(sizes), len(shape)))
    axes = tuple(a for a, n in enumerate(sizes) if n > 1)
    merged = [axes, axes[:2], axes[1:], axes[::2]] if data.draw(st.booleans()) else []
    network = Network.of(sizes, merged={g for g in merged if len(g) > 1})
    made = plan(src, dst, shape, network, 8, data.draw(st.sampled_from(["time", "memory"])))
    before = values_of(src, shape, sizes, data.draw(st.integers(0, 99)))
    after = simulated(made.steps, before, sizes)
    agree(dense(after, dst, sizes, shape), dense(before, src, sizes, shape), src, dst)


def redistributed(rank, cases):
    """For each case this rank's local tensor after redistribution."""
    meshes, found = {}, []
    for sizes, shape, src, dst, seed, async_op, prefer in cases:
        if sizes not in meshes:
            meshes[sizes] = init_device_mesh("cpu", sizes)
        stride = torch.empty(shape).stride()
        x = DTensor(values_of(src, shape, sizes, seed)[rank], meshes[sizes], src, shape, stride)
        y = torch.ops.dtensor.redistribute(x, dst.text, async_op, "", prefer)
        assert y._spec.layout is dst
        assert tuple(y._local_tensor.shape) == y._spec.local_shape()
        found.append(y.to_local().clone())
    return found


def check(cases, results):
    for (sizes, shape, src, dst, seed, *_), parts in zip(cases, zip(*results, strict=True), strict=True):
        expected = dense(values_of(src, shape, sizes, seed), src, sizes, shape)
        agree(dense(parts, dst, sizes, shape), expected, src, dst)


@st.composite
def cases(draw, world, ops):
    sizes, shape = draw(st.sampled_from(WORLDS[world])), draw(shapes)
    src, dst = draw(layouts(len(sizes), len(shape), ops)), draw(layouts(len(sizes), len(shape), ops))
    return (
        sizes,
        shape,
        src,
        dst,
        draw(st.integers(0, 99)),
        draw(st.booleans()),
        draw(st.sampled_from(["time", "memory"])),
    )


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_layout_to_any_other_on_threads(data):
    """The executor and its kernels, also asynchronously. (Threads know no reduce_scatter but of sums.)"""
    world = data.draw(st.sampled_from(list(WORLDS)))
    some = data.draw(st.lists(cases(world, ("sum", "avg")), min_size=10, max_size=40))
    check(some, run_threads(redistributed, world, some))


def drawn(rng, mesh_ndim, ndim):
    cut, partial = [[] for _ in range(ndim)], []
    for axis in rng.sample(range(mesh_ndim), mesh_ndim):
        where = rng.choice([*range(ndim), "R", *FOLD])
        if isinstance(where, int):
            cut[where].append(axis)
        elif where != "R":
            partial.append((axis, where))
    return Layout.make(mesh_ndim, tuple(map(tuple, cut)), tuple(sorted(partial)))


def summed(rank):
    """A sum over both axes of random numbers, whose bits depend on the order, and the collectives it took."""
    local = torch.randn(1000, generator=torch.Generator().manual_seed(rank)) * 10 ** (rank % 3)
    x = DTensor.from_local(local, init_device_mesh("cpu", (2, 2)), [Partial(), Partial()])
    with CountCollectives() as seen:
        return x.full_tensor(), [c.op for c in seen.collectives]


def on_processes(rank, cases):
    return redistributed(rank, cases), summed(rank)


def test_any_layout_to_any_other_on_processes():
    """With all reductions; and merged sums have the same bits on every rank."""
    rng, some = random.Random(0), []
    for _ in range(60):
        sizes, shape = rng.choice(WORLDS[4]), tuple(rng.choice([0, 1, 4, 5, 12]) for _ in range(rng.randrange(4)))
        ends = drawn(rng, len(sizes), len(shape)), drawn(rng, len(sizes), len(shape))
        some.append((sizes, shape, *ends, rng.randrange(99), rng.random() < 0.5, rng.choice(["time", "memory"])))
    moved, sums = zip(*run_ranks(on_processes, 4, some))
    check(some, moved)
    assert [ops for _, ops in sums] == [["all_reduce"]] * 4
    assert all(torch.equal(total, sums[0][0]) for total, _ in sums)


@with_threads(4)
def test_order_of_axes_on_one_dim(rank):
    """From the default order of cuts to the other one and back, where it divides and where it does not."""
    mesh = init_device_mesh("cpu", (2, 2))
    for length in (10, 8):
        x = distribute_tensor(torch.arange(length), mesh, [Shard(0), Shard(0)])
        other = torch.ops.dtensor.redistribute(x, "S(0)#1S(0)#0", False)
        assert other.placements == (Shard(0, cut=1), Shard(0, cut=0))
        assert torch.equal(x.redistribute(placements=other.placements).to_local(), other.to_local())
        at = mesh.get_coordinate() or []
        assert other.to_local().tolist() == torch.arange(length).chunk(2)[at[1]].chunk(2)[at[0]].tolist()
        assert torch.equal(other.full_tensor(), torch.arange(length))
        y = distribute_tensor(torch.arange(1.0 * length), mesh, [Shard(0), Shard(0)]).requires_grad_()
        weight = torch.ops.dtensor.redistribute(x.float(), "S(0)#1S(0)#0", False).to_local()
        (torch.ops.dtensor.redistribute(y, "S(0)#1S(0)#0", False).to_local() * weight).sum().backward()
        assert torch.equal(y.grad.full_tensor(), torch.arange(1.0 * length))


@with_threads(2)
def test_redistribute_to_partial_is_refused(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(PlacementError, match=r"cannot redistribute mesh axis 0 from S\(0\) to P: .*from_local"):
        x.redistribute(mesh, [Partial()])


def test_layouts_that_do_not_fit_are_refused():
    with pytest.raises(PlacementError, match=r"layout R is for a 1-dimensional tensor on 1 mesh axes, but the plan"):
        plan(Layout.parse("R", 1), Layout.parse("S(0)", 1), (4, 4), (2,), 4)
    with pytest.raises(ValueError, match=r"prefer is 'time' or 'memory'; got 'speed'"):
        plan(Layout.parse("R", 1), Layout.parse("S(0)", 1), (4,), (2,), 4, "speed")


@pytest.mark.parametrize("length", [1, 3, 6])
def test_what_is_fitted_lies_in_memory_as_a_trace_takes_it_to(length):
    """Padding alone would keep channels last."""
    x = torch.arange(120.0).view(3, 2, 4, 5).contiguous(memory_format=torch.channels_last)
    found = fit(x, 0, length)
    assert found.is_contiguous()
    torch.testing.assert_close(found, torch.cat([x, torch.zeros_like(x)])[:length])


@with_threads(4)
def test_gradients_are_those_of_one_device(rank):
    """Any move is the identity, so the gradient of a function of the result is that of the function; twice too."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(1.0, 16.0, dtype=torch.float64).view(5, 3)
    dense_x = whole.clone().requires_grad_()
    (dense_g,) = torch.autograd.grad((dense_x**3).sum(), dense_x, create_graph=True)
    (dense_gg,) = torch.autograd.grad((dense_g**2).sum(), dense_x)
    every = [Shard(0), Shard(1), Replicate()]
    for src, dst in product(product(every, every), repeat=2):
        x = distribute_tensor(whole, mesh, src).requires_grad_()
        y = x.redistribute(placements=dst)
        (g,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        assert g.placements == src
        assert torch.equal(g.full_tensor(), dense_g)
        (gg,) = torch.autograd.grad((g**2).sum(), x)
        assert gg.placements == src
        assert torch.equal(gg.full_tensor(), dense_gg)


@with_threads(2)
def test_the_gradient_of_a_partial_input_is_replicated_unless_asked_otherwise(rank):
    mesh = init_device_mesh("cpu", (2,))
    for asked, expected in (
        (None, Replicate()),
        ([Replicate()], Replicate()),
        ([Shard(0)], Shard(0)),
        ([Partial()], Partial()),
    ):
        x = DTensor.from_local(torch.full((4,), 1.0 + rank), mesh, [Partial()]).detach().requires_grad_()
        y = x.redistribute(mesh, [Shard(0)], grad_placements=asked)
        assert y.full_tensor().tolist() == [3.0] * 4
        y.backward(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
        assert x.grad.placements == (expected,)
        assert x.grad.full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0]


@with_threads(2)
def test_grad_placements_hold_where_nothing_moves(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(4.0), mesh, [Replicate()]).requires_grad_()
    y = x.redistribute(mesh, [Replicate()], grad_placements=[Shard(0)])
    (y * y).sum().backward()
    assert x.grad.placements == (Shard(0),)
    assert x.grad.full_tensor().tolist() == [0.0, 2.0, 4.0, 6.0]
    with pytest.raises(PlacementError, match=r"Shard\(1\) does not fit a tensor of 1 dimensions"):
        x.redistribute(mesh, [Replicate()], grad_placements=[Shard(1)])


@with_threads(2)
def test_async_result_waits_on_first_use(rank):
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(10.0).view(5, 2)
    partial = DTensor.from_local(whole * (rank + 1), mesh, [Partial("avg")])
    for src, dst in (
        (distribute_tensor(whole, mesh, [Shard(0)]), [Replicate()]),
        (distribute_tensor(whole, mesh, [Shard(1)]), [Replicate()]),
        (distribute_tensor(whole, mesh, [Shard(1)]), [Shard(0)]),
        (partial, [Replicate()]),
        (partial, [Shard(0)]),
    ):
        expected = src.redistribute(mesh, dst).to_local()
        with CountCollectives() as seen:
            y = src.redistribute(mesh, dst, async_op=True)
            local = y.to_local()
        assert len(seen.collectives) == 1
        assert isinstance(local, Pending)
        assert local.shape == expected.shape
        assert not local.done
        assert isinstance(local, AsyncCollectiveTensor)
        assert not local.completed
        assert torch.equal((y * 2).to_local(), expected * 2)
        assert local.done
        assert local.completed
        assert torch.equal(local.trigger_wait(), expected)
        assert torch.equal(local + 1, expected + 1)
        assert local.tolist() == expected.tolist()
        assert local.numpy().tolist() == expected.tolist()
        assert repr(expected) in repr(local)
        assert torch.equal(copy.deepcopy(y).to_local(), expected)
        assert torch.equal(pickle.loads(pickle.dumps(local)), expected)
        assert torch.equal(y.redistribute(mesh, [Replicate()]).to_local(), src.full_tensor())


@with_ranks(2)
def test_async_result_is_given_to_compiled_code(rank):
    """As a DTensor, and this rank's part of it."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(6.0).view(3, 2)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    compiled = torch.compile(lambda x: x * 2 + 1, backend="aot_eager", fullgraph=True)
    for of in (lambda y: y, lambda y: y.to_local()):
        y = compiled(of(x.redistribute(placements=[Replicate()], async_op=True)))
        assert torch.equal(y.to_local() if isinstance(y, DTensor) else y, whole * 2 + 1)


@with_threads(2)
def test_async_gradients(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(1)]).requires_grad_()
    y = x.redistribute(mesh, [Replicate()], async_op=True)
    (y * y).sum().backward()
    assert torch.equal(x.grad.full_tensor(), 2 * torch.arange(6.0).view(3, 2))
    x.grad = None
    local = x.redistribute(mesh, [Replicate()], async_op=True).to_local()
    (local * local).sum().backward()
    assert torch.equal(x.grad.full_tensor(), 2 * torch.arange(6.0).view(3, 2))


@with_threads(2)
def test_writing_to_an_async_result(rank):
    mesh = init_device_mesh("cpu", (2,))
    y = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).redistribute(mesh, [Replicate()], async_op=True)
    y.add_(1)
    assert y.to_local().tolist() == [1.0, 2.0, 3.0, 4.0]


@with_threads(2)
def test_memory_is_preferred_to_time_where_asked(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)]).requires_grad_()
    y = x.redistribute(mesh, [Shard(1)], prefer="memory")
    assert y.to_local().tolist() == [[2.0 * i + rank] for i in range(4)]
    (y * y).sum().backward()
    assert torch.equal(x.grad.full_tensor(), 2 * torch.arange(8.0).view(4, 2))
