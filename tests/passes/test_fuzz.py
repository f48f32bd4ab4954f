"""Random SPMD programs: every pass, and the whole pipeline, must compute what the program did.

`FUZZ_GRAPHS=10000 pytest -m nightly tests/passes/test_fuzz.py` runs the pipeline on that many (the default), in parts.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from dtensor.comm.collectives import ops
from dtensor.passes import PIPELINE, Bucket, Schedule, SplitBatch, run, verify
from dtensor.passes.graph.copying import copy_graph
from dtensor.torch_private.core import c10d
from dtensor.torch_private.core import functional_collectives as funcol

SIZE = {"dp": 2, "tp": 2, "world": 4}
AXES = {"dp": {"dp"}, "tp": {"tp"}, "world": {"dp", "tp"}}
SECOND = {"dp": "tp", "tp": "dp", "world": "tp"}
"""The axis of a motif's second collective, by that of the first."""
LONGEST = 64

LOCAL = ("add", "sub", "alpha", "mul", "relu", "t", "view", "unsqueeze", "squeeze", "double", "permute")
REMOTE = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "shard", "wait", "gathered", "scattered")
# What the passes look for, and single steps seldom make.
MOTIFS = (
    "sum",
    "sum of views",
    "sum of scattered",
    "sum of transposed",
    "sum of scaled",
    "residual",
    "scatter",
    "exchange",
    "cancel",
    "scatter and gather",
    "reduce again",
    "gather again",
    "gather and narrow",
    "widen and exchange",
    "gather and combine",
    "gather and reduce",
    "gather and cut",
    "broadcast and gather",
    "sum of scaled by a sum",
)
# The same, with collectives over two groups.
TWO_AXES = ("reduce, cut", "gather, cut", "reduce, scatter", "reduce twice", "gather twice", "scatter twice")

steps = st.tuples(
    st.sampled_from(LOCAL + REMOTE + 2 * MOTIFS + TWO_AXES),
    st.integers(0, 2),
    st.integers(0, 4),
    st.integers(0, 1),
    st.sampled_from(("tp", "tp", "tp", "dp", "world")),
    st.sampled_from(("sum", "sum", "sum", "avg", "max")),
)
programs = st.lists(steps, min_size=2, max_size=10)


def motif(op, x, y, group, n, dim, reduce_op):
    """The value of a motif, or None if it does not fit its operands."""
    fits, room = x.shape == y.shape, x.numel() * n <= LONGEST
    other = (dim + 1) % x.dim()

    def reduce(v):
        return ops.all_reduce(v, reduce_op, group)

    match op:
        case "sum" if fits or x.shape[1:] == y.shape:
            return reduce(x) + reduce(y)
        case "sum of views" if x.numel() == y.numel():
            return reduce(x).view(y.shape) - reduce(y)
        case "sum of transposed" if fits and x.dim() == 2:
            return reduce(x).t() + reduce(y * 3).t()
        case "sum of scaled" if fits:
            return (reduce(x) * 3).neg() + reduce(y) / 7
        case "sum of scattered" if fits and x.shape[dim] % n == 0:
            return ops.reduce_scatter(x, reduce_op, dim, group) + ops.reduce_scatter(y * 3, reduce_op, dim, group)
        case "residual" if fits:
            return x + reduce(y)
        case "scatter" if x.shape[dim] % n == 0:
            return ops.shard(reduce(x), dim, group)
        case "exchange" if room and other != dim and x.shape[other] % n == 0:
            return ops.shard(ops.all_gather(x, dim, x.shape[dim] * n, group), other, group)
        case "scatter and gather":  # of any length
            return ops.all_gather(ops.reduce_scatter(x, reduce_op, dim, group), dim, x.shape[dim], group)
        case "gather and narrow" if room:
            return ops.all_gather(x.double() * 3, dim, x.shape[dim] * n, group).float()
        case "widen and exchange" if other != dim and x.shape[other] % n == 0:
            return ops.all_to_all(x.double(), dim, other, x.shape[dim] * n, group).float()
        case "reduce again" if room:
            return ops.all_reduce(torch.relu(ops.all_gather(x, dim, x.shape[dim] * n, group)), reduce_op, group)
        case "gather again" if room:
            return ops.all_gather(reduce(x).neg(), dim, x.shape[dim] * n, group)
        case "gather and combine" if fits and room:
            a, b = (ops.all_gather(v, dim, v.shape[dim] * n, group) for v in (x, y))
            return torch.where(a > 1, a, b * 2)
        case "gather and reduce" if room and x.dim() > 1:
            return ops.all_gather(x, dim, x.shape[dim] * n, group).amax(other)
        case "gather and cut" if room and x.dim() > 1:
            return ops.all_gather(x, dim, x.shape[dim] * n, group).select(other, 0)
        case "broadcast and gather" if 2 * x.numel() * n <= LONGEST and x.dim() < 4:
            return ops.all_gather(x.expand(2, *x.shape), dim + 1, x.shape[dim] * n, group)
        case "sum of scaled by a sum" if fits:
            return reduce(x) * ops.all_reduce(y.sum(), "sum", group) - reduce(y)
        case "cancel" if room:
            return ops.shard(ops.all_gather(x, dim, x.shape[dim] * n, group), dim, group)


def two_axes(op, x, group, n, second, m, dim, reduce_op):
    """The value of a motif over two groups, or None if it does not fit its operand."""
    length, other = x.shape[dim], (dim + 1) % x.dim()
    room, even = x.numel() * n * m <= LONGEST, length % (n * m) == 0
    match op:
        case "reduce, cut" if length % m == 0:
            return ops.shard(ops.all_reduce(x, reduce_op, group), dim, second)
        case "gather, cut" if room and x.shape[other] % m == 0:
            return ops.shard(ops.all_gather(x, dim, length * n, group), other, second)
        case "reduce, scatter" if length % m == 0:
            return ops.reduce_scatter(ops.all_reduce(x, reduce_op, group), reduce_op, dim, second)
        case "reduce twice":
            return ops.all_reduce(ops.all_reduce(x, reduce_op, group), reduce_op, second)
        case "gather twice" if room:
            return ops.all_gather(ops.all_gather(x, dim, length * n, group), dim, length * n * m, second)
        case "scatter twice" if even:
            return ops.reduce_scatter(ops.reduce_scatter(x, reduce_op, dim, group), reduce_op, dim, second)


def step(op, x, y, groups, axis, dim, reduce_op):
    """The value of one step on two of the values so far, or None if it does not fit them."""
    dim, group, n = dim % x.dim(), groups[axis], SIZE[axis]
    if op in TWO_AXES:
        return two_axes(op, x, group, n, groups[SECOND[axis]], SIZE[SECOND[axis]], dim, reduce_op)
    if op in MOTIFS:
        return motif(op, x, y, group, n, dim, reduce_op)
    fits = x.shape == y.shape
    match op:
        case "add" | "sub" | "mul":
            return getattr(torch, op)(x, y) if fits or x.shape[1:] == y.shape else None
        case "alpha":
            return torch.add(x, y, alpha=2) if fits else None
        case "relu":
            return torch.relu(x)
        case "double":
            return x * 2
        case "t":
            return x.t() if x.dim() == 2 else None
        case "permute":
            return x.permute(*range(1, x.dim()), 0)
        case "view":
            return x.reshape(y.shape) if x.numel() == y.numel() else x.reshape(-1)
        case "unsqueeze":
            return x.unsqueeze(dim) if x.dim() < 4 else None
        case "squeeze":
            return x.squeeze(dim) if x.shape[dim] == 1 and x.dim() > 1 else None
        case "all_reduce":
            return ops.all_reduce(x, reduce_op, group)
        case "wait":
            return c10d.wait_tensor(c10d.all_reduce(x.contiguous(), reduce_op, group))
        case "all_gather":
            return ops.all_gather(x, dim, x.shape[dim] * n, group) if x.numel() * n <= LONGEST else None
        case "gathered":
            return funcol.all_gather_single(x, dim, group) if x.numel() * n <= LONGEST else None
        case "reduce_scatter" | "shard" | "scattered" if x.shape[dim] % n:
            return None
        case "scattered":
            return funcol.reduce_scatter_single(x, reduce_op, dim, group)
        case "reduce_scatter":
            return ops.reduce_scatter(x, reduce_op, dim, group)
        case "shard":
            return ops.shard(x, dim, group)
        case "all_to_all":
            other = (dim + 1) % x.dim()
            if other == dim or x.shape[other] % n:
                return None
            return ops.all_to_all(x, dim, other, x.shape[dim] * n, group)


MAKES_WHOLE = (
    *("all_reduce", "all_gather", "gathered", "wait", "scatter and gather", "gather and narrow"),
    *("reduce again", "gather again", "gather and reduce", "gather and cut", "broadcast and gather"),
)
SUMS = ("sum", "sum of views", "sum of transposed", "sum of scaled", "gather and combine", "sum of scaled by a sum")
CUTS = (
    *("shard", "reduce_scatter", "scattered", "all_to_all", "scatter", "exchange", "cancel"),
    *("sum of scattered", "widen and exchange", "reduce, scatter", "scatter twice"),
)


def after(op, mine, other, axes, second):
    """The mesh axes over which a value is cut, after one step."""
    if op in MAKES_WHOLE:
        return mine - axes
    if op in SUMS:
        return (mine | other) - axes
    if op == "residual":
        return mine | other - axes
    if op in ("reduce, cut", "gather, cut"):
        return mine - axes | second
    if op in ("reduce twice", "gather twice"):
        return mine - axes - second
    if op in CUTS:
        return mine | other | axes | (second if op in TWO_AXES else set())
    return mine | other


def sharded(op, axes, second):
    """The mesh axes over which a step demands its operand to be alike."""
    if op == "shard":
        return axes
    return second - axes if op in ("reduce, cut", "gather, cut") else set()


def build(bench, recipe):
    names = {"dp": bench.dp, "tp": bench.tp, "world": bench.world}

    def f(*args):
        xs: list[torch.Tensor] = list(args)
        cut: list[set[str]] = [set() for _ in args]
        used = set()
        for op, i, j, dim, axis, reduce_op in recipe:
            # Counted from the newest, so that chains are as likely as fans.
            a, b = len(xs) - 1 - i % len(xs), len(xs) - 1 - j % len(xs)
            second = AXES[SECOND[axis]]
            if cut[a] & sharded(op, AXES[axis], second):
                continue  # `shard` takes what the ranks of its group hold alike.
            new = step(op, xs[a], xs[b], names, axis, dim, reduce_op)
            if new is not None:
                used |= {a, b}
                xs.append(new)
                cut.append(after(op, cut[a], cut[b], AXES[axis], second))
        return [x for k, x in enumerate(xs) if k >= len(args) and k not in used]

    return bench.trace(f, (4, 4), (4, 4), (4, 4), (16,), (4,))


QUIET = settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


@pytest.mark.parametrize("p", [*PIPELINE, SplitBatch()], ids=lambda p: p.name)
@settings(QUIET, max_examples=8)
@given(program=programs)
def test_each_pass(bench, p, program):
    gm = build(bench, program)
    before = copy_graph(gm.graph)
    if p(gm.graph):
        verify(gm, p.name)
        bench.simulation.check(before, gm.graph, exact=p.exactness == "bitwise")


@QUIET
@given(program=programs, ahead=st.sampled_from([None, 0, 10**6]), share=st.booleans(), exchange=st.booleans())
def test_lowered_graphs(bench, program, ahead, share, exchange):
    gm = build(bench, program)
    with bench.exchanging(exchange):
        run(gm, passes=["lower"])
    for p in (*([Bucket()] if share else []), Schedule(ahead)):
        bench.apply(p, gm)


@QUIET
@given(program=programs)
def test_split_and_scheduled(bench, program):
    """Parts take turns in whatever order: nothing is waited for that has not started, and the numbers stay."""
    gm = build(bench, program)
    before = copy_graph(gm.graph)
    run(gm, passes=[SplitBatch(), "lower", "bucket", "schedule"])
    bench.simulation.check(before, gm.graph, exact=False)


def check_pipeline(bench, program, exchange):
    gm = build(bench, program)
    run(gm, simulate=bench.simulation, meshes=bench.meshes, disable=["lower"])
    assert sum(r.rewrites for r in run(gm, meshes=bench.meshes, disable=["lower"])) == 0
    with bench.exchanging(exchange):
        run(gm, simulate=bench.simulation, meshes=bench.meshes, passes=["lower", "bucket", "schedule"])


@QUIET
@given(program=programs, exchange=st.booleans())
def test_pipeline(bench, program, exchange):
    check_pipeline(bench, program, exchange)


PARTS = 10
GRAPHS = int(os.environ.get("FUZZ_GRAPHS", "10000"))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_pipeline_on_many(bench, part):
    """Each part draws its own programs, the same ones every time."""

    @seed(part)
    @settings(QUIET, max_examples=GRAPHS // PARTS, derandomize=False, database=None)
    @given(program=programs, exchange=st.booleans())
    def check(program, exchange):
        check_pipeline(bench, program, exchange)

    check()
