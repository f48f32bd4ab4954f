"""Redistribution: any layout to any other; values against dense torch on simulated ranks, threads and processes."""

import functools
import random
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtensor import DTensor, init_device_mesh
from dtensor.cost import Network
from dtensor.layout import Layout
from dtensor.plan import plan
from dtensor.steps import senders
from dtensor.testing import run_ranks, run_threads

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


@settings(max_examples=2500, deadline=None, suppress_health_check=list(HealthCheck))
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


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_layout_to_any_other_on_threads(data):
    """The executor and its kernels, also asynchronously. (Threads know no reduce_scatter but of sums.)"""
    world = data.draw(st.sampled_from(list(WORLDS)))
    some = data.draw(st.lists(cases(world, ("sum", "avg")), min_size=10, max_size=40))
    check(some, run_threads(redistributed, world, some))


@pytest.mark.parametrize("world", [4])
def test_any_layout_to_any_other_on_processes(world):
    rng = random.Random(world)

    def drawn(mesh_ndim, ndim):
        cut, partial = [[] for _ in range(ndim)], []
        for axis in rng.sample(range(mesh_ndim), mesh_ndim):
            where = rng.choice([*range(ndim), "R", *FOLD])
            if isinstance(where, int):
                cut[where].append(axis)
            elif where != "R":
                partial.append((axis, where))
        return Layout.make(mesh_ndim, tuple(map(tuple, cut)), tuple(sorted(partial)))

    some = []
    for _ in range(60):
        sizes, shape = rng.choice(WORLDS[world]), tuple(rng.choice([0, 1, 4, 5, 12]) for _ in range(rng.randrange(4)))
        ends = drawn(len(sizes), len(shape)), drawn(len(sizes), len(shape))
        some.append((sizes, shape, *ends, rng.randrange(99), rng.random() < 0.5, rng.choice(["time", "memory"])))
    check(some, run_ranks(redistributed, world, some))
