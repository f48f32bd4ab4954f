"""Memory as a bound in bytes: what is decided keeps it, computes the same, and costs the least."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.comm.host_memory import from_host_start, to_host
from dtensor.errors import ArgumentError, UnsupportedError
from dtensor.mesh.provenance import SHARDS, Shards
from dtensor.passes import Recompute
from dtensor.passes.graph.copying import copy_graph
from dtensor.passes.graph.lifetimes import Lifetimes
from dtensor.passes.overlap import fitting
from dtensor.passes.overlap.again import fetch_early
from dtensor.passes.overlap.fitting import Policy, fitted
from dtensor.prices.machine import MACHINES
from tests.passes.overlap.test_recompute import whole

aten = torch.ops.aten


def later(gm):
    return {n for n in gm.graph.nodes if n.meta.get("partitioner_tag") == "is_backward"}


def peak(gm, fused=False):
    return Lifetimes(gm.graph, fused=fused).peak


def same(graph):
    return graph


def busy(x, w):
    """The beginning of a backward, which holds three matrices at once."""
    first = x.sum().sin() * w
    return first @ first + first


def test_values_are_computed_again_where_there_is_no_room(bench):
    def f(x, w):
        a = (x @ w).relu()
        return busy(a @ w, w) @ a

    gm = whole(bench, f, (8, 8), (8, 8))
    most = peak(gm)
    assert bench.keeps(Recompute(memory=most), gm)
    assert bench.apply(Recompute(memory=most - 256), gm)
    assert peak(gm) <= most - 256
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[8,8] = placeholder
%w_1: f32[8,8] = placeholder
%mm: f32[8,8] = aten.mm(%x_1, %w_1)
%relu: f32[8,8] = aten.relu(%mm)
%mm_1: f32[8,8] = aten.mm(%relu, %w_1)
%sum: f32[] = aten.sum(%mm_1)
%sin: f32[] = aten.sin(%sum)
%mul: f32[8,8] = aten.mul.Tensor(%sin, %w_1)
%mm_2: f32[8,8] = aten.mm(%mul, %mul)
%add: f32[8,8] = aten.add.Tensor(%mm_2, %mul)
%mm_3: f32[8,8] = aten.mm(%x_1, %w_1)
%relu_1: f32[8,8] = aten.relu(%mm_3)
%mm_4: f32[8,8] = aten.mm(%add, %relu_1)
return %mm_4""",
    )


def test_what_cannot_be_computed_again_is_put_on_the_host(bench):
    def f(x, w):
        a = (x @ w).sigmoid().bernoulli()
        return busy((a @ w) @ w, w) @ a

    gm = whole(bench, f, (64, 64), (64, 64))
    most = peak(gm)
    assert bench.apply(Recompute(memory=most - 4 * 64 * 64), gm)
    assert len([n for n in gm.graph.nodes if n.target in (to_host, from_host_start)]) == 2
    assert len([n for n in gm.graph.nodes if "bernoulli" in n.name]) == 1
    assert peak(gm) <= most - 4 * 64 * 64


def test_a_gather_is_held_if_there_is_room(bench):
    """Without a bound a parameter is gathered again."""

    def f(w, x):
        gathered = ops.all_gather(w, 0, 8, bench.tp)
        return busy(x @ gathered.t() @ gathered, x) @ gathered.t()

    for less, gathers in ((0, 1), (256, 2)):
        gm = whole(bench, f, (4, 8), (8, 8))
        bench.apply(Recompute(memory=peak(gm) - less), gm)
        assert len(gm.graph.find_nodes(op="call_function", target=ops.all_gather.default)) == gathers


def test_too_little_is_refused_with_what_it_takes(bench):
    gm = whole(bench, lambda x, w: ((x @ w).relu() @ w).sum().sin() * (x @ w), (8, 8), (8, 8))
    before = bench.text(gm)
    with pytest.raises(ArgumentError, match=r"at most memory=100 bytes was not found; .*takes [\d,]+, 512 of these"):
        Recompute(memory=100)(gm.graph)
    assert bench.text(gm) == before


def test_graphs_that_differ_between_ranks_are_refused(bench):
    gm = whole(bench, lambda x, w: (x @ w).sum().sin() * (x @ w), (8, 8), (8, 8))
    first = next(iter(gm.graph.nodes))
    first.meta[SHARDS] = Shards((9, 8), False, None)
    with pytest.raises(UnsupportedError, match=r"shards differ in size, as those of a parameter or input do"):
        Recompute(memory=10**6)(gm.graph)


FORWARD = (
    lambda a, b, w: a @ w,
    lambda a, b, w: a.exp(),
    lambda a, b, w: a * b,
    lambda a, b, w: a @ b,
    lambda a, b, w: a.t() + b,
)
BACKWARD = (lambda g, a: g @ a, lambda g, a: g + a, lambda g, a: g * a.t())


def programs(seed):
    """A random whole step: products and pointwise operators of the forward, of which the backward reads some."""
    draw = random.Random(seed)

    def f(x, w):
        made = [x @ w]
        for _ in range(draw.randint(2, 5)):
            made.append(draw.choice(FORWARD)(draw.choice(made), draw.choice(made), w))
        out = made[-1].sum().sin() * w
        for a in draw.sample(made, min(3, len(made))):
            out = draw.choice(BACKWARD)(out, a)
        return out

    return f


def cost(find, chosen):
    """What a policy costs, as the program has it."""
    travel = 2 * (1 - find.machine.overlap) / find.machine.host
    of = {
        "held": lambda v: v.writing,
        "away": lambda v: travel * v.bytes + 2 * find.machine.host_start,
        "again": lambda v: v.seconds,
    }
    return sum([of[kind](v) for v, kind in chosen.items()])


def policies(find):
    """All policies of a graph, with their costs."""
    values = find.values
    for kinds in itertools.product(*[[*v.kinds, None] for v in values]):
        chosen = {v: k for v, k in zip(values, kinds) if k is not None}
        known = all(v in chosen for v in values if v.reads)
        if known and all(x in chosen for v, k in chosen.items() if k == "again" for x in v.made_of):
            yield chosen, cost(find, chosen)


@pytest.mark.parametrize("seed", range(12))
def test_it_costs_the_least_of_all_that_fit(bench, seed):
    """Against all policies, one by one, but for bounds within a matrix of the least: these may be refused."""
    gm = whole(bench, programs(seed), (16, 16), (16, 16))
    find = fitting._Fitting(gm.graph, later(gm), same, False, False)
    every = [(find._measured(find._policy(chosen))[0], took) for chosen, took in policies(find)]
    least = min(every)[0]
    for memory in [p for p in sorted({p for p, _ in every}) if p >= least + 4 * 16 * 16]:
        best = min(took for p, took in every if p <= memory)
        policy = fitted(gm.graph, later(gm), memory, same, fused=False, host=False)
        trial = whole(bench, programs(seed), (16, 16), (16, 16))
        twin = dict(zip(gm.graph.nodes, trial.graph.nodes))
        fitting.applied(trial.graph, later(trial), policy, find.machine, twin)
        assert peak(trial) <= memory
        found = min(took for chosen, took in policies(find) if find._policy(chosen) == policy)
        assert found <= best * 1.05 + 1e-9, (memory, found, best)


@pytest.mark.parametrize("seed", range(6))
def test_the_result_is_the_same_and_fits(bench, seed):
    """Also with values on the host, on simulated ranks, bit for bit."""
    gm = whole(bench, programs(seed), (64, 64), (64, 64))
    least, most = 0, peak(gm)
    for part in (0.95, 0.8, 0.7):
        memory = int(part * most)
        trial = whole(bench, programs(seed), (64, 64), (64, 64))
        before = copy_graph(trial.graph)
        try:
            Recompute(memory=memory)(trial.graph)
        except ArgumentError:
            least = memory
            continue
        assert peak(trial) <= memory
        bench.simulation.check(before, trial.graph, exact=True)
    assert least < most


def test_a_copy_from_the_host_starts_before_it_is_needed(bench):
    """Where copies travel beside computation, as long before as they take."""

    def f(x, w):
        a = (x @ w).exp()
        b = (a @ w).sum().sin() * w
        for _ in range(4):
            b = b @ w
        return b @ a

    gm = whole(bench, f, (64, 64), (64, 64))
    node, total = (next(n for n in gm.graph.nodes if n.name == name) for name in ("exp", "sum_1"))
    machine = replace(MACHINES["cpu"], overlap=1.0, host=1e9, launch=0.0, flops=64**3 * 2 * 1e5)
    fitting.applied(gm.graph, later(gm), Policy(frozenset([total]), frozenset([node])), machine)
    nodes = list(gm.graph.nodes)
    start = next(k for k, n in enumerate(nodes) if n.target is from_host_start)
    wait = next(k for k, n in enumerate(nodes) if n.name.startswith("wait_tensor"))
    between = [n for n in nodes[start:wait] if n.target is aten.mm.default]
    assert len(between) == 2, "16 KiB take 16 us, a product 10"
    fetch_early(gm.graph, replace(machine, overlap=0.0))
    assert list(gm.graph.nodes) == nodes, "on a CPU both are waited for"
