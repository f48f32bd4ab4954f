"""All ranks compile one order of collectives, whatever their local sizes: graphs of all ranks, compared."""

import math

import pytest
import torch
import torch.nn.functional as F

from dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.compile.backends.compare_ranks import disagreement, overheard
from dtensor.testing import fake_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def told(f, shape, inputs, dynamic=None, **options):
    """Rank -> what its graphs communicate, if each rank of a mesh of `shape` compiles `f` for it alone."""
    found = {}
    for rank in range(math.prod(shape)):
        torch.compiler.reset()
        with fake_ranks(math.prod(shape), rank), overheard() as heard:
            mesh = init_device_mesh("cpu", shape)
            args = [distribute_tensor(torch.ones(size), mesh, list(p)).requires_grad_() for size, p in inputs]
            chosen = {"inner": "aot_eager", **options}
            compiled = torch.compile(f, backend="dtensor", fullgraph=True, dynamic=dynamic, options=chosen)
            compiled(*args).sum().backward()
        found[rank] = heard
    torch.compiler.reset()
    return found


def gated(x, y, w, b, w3):
    """The norm, of length one in the cut dimension, is empty on the second rank, and so is its mask in the backward."""
    n = x / (torch.linalg.vector_norm(y, dim=0, keepdim=True) + 1)
    g = F.linear(n, w, b) @ w3
    s = F.silu(g[..., :4]) * g[..., 4:8]
    c = torch.tanh(s.clamp(-1, 1)).cumprod(0)
    return (c + torch.diagonal(c, 0, 1, 2).sum() * 0.01).pow(2).mean() + s.pow(2).mean()


def normalized(a, b):
    t = F.normalize(a @ b, dim=0)
    u = torch.var_mean(t, 1, keepdim=True, unbiased=False)[0] + t
    c = u.cumprod(0)
    return u.select(0, 1).pow(2).sum() + c.pow(2).sum() + F.layer_norm(c, (3,)).pow(2).sum()


def attended(q, k, v):
    return F.scaled_dot_product_attention(q, *[x.redistribute(placements=[S0]) for x in (k, v)])


def gathered(a):
    return a.redistribute(placements=[R]).pow(2).sum()


def counted(x, y, z, w):
    return (x * y).sum() + (z * w).sum() + torch.topk(z, 7, dim=0)[0].sum()


def scaled(x, e, w, b, g, c):
    """Gradients of what both axes cut are reduced twice, and not every rank pads what it has after the first."""
    n = F.layer_norm(F.gelu(F.linear(x @ e, w, b)), (13,), g, c)
    return n * F.cosine_similarity(n, n.flip(1).detach(), dim=0)


PROGRAMS = {
    # The partitioner saved the mask on the rank on which it has no elements, and made it again on the other.
    "what is saved": (
        gated,
        (2,),
        (((4, 4, 4), (R,)), ((4, 4, 4), (S0,)), ((4, 4), (S0,)), ((4,), (S0,)), ((4, 12), (R,))),
        {},
    ),
    # compute_before_gather took one row of three, cut over the ranks, for a dimension of length one.
    "what is rewritten": (normalized, (2, 2), (((3, 8), (S0, S1)), ((8, 3), (S1, S0))), {}),
    # The gradients of query, key and value were zeros of one shape on the rank without a batch, and their gathers one.
    "what has no rows": (attended, (2,), [((1, 2, 4, 4), (p,)) for p in (S0, R, R)], {}),
    # Which gradient a reduction is for was unknown where its result is padded, to be cut again.
    "what is for a gradient": (
        scaled,
        (2, 2),
        (((5, 11), (S0, R)), ((11, 7), (S1, S0)), ((13, 7), (S0, S1)), *[((13,), (S0, S0))] * 3),
        {},
    ),
    # Only at its end does the trace learn that the length of seven, of which the second rank has three, is a number.
    "what becomes a number": (
        counted,
        (2,),
        (((2, 7), (S0,)), ((1, 7), (S1,)), ((7,), (R,)), ((1,), (S0,))),
        {"dynamic": True},
    ),
    # The texts named a shard as it is before it is padded.
    "what is told": (gathered, (2,), (((5, 3), (S0,)),), {"passes": []}),
}


AT_NIGHT = ("what is rewritten", "what is for a gradient")
"""They take four ranks; `tests/fuzz/test_ranks.py` has such programs, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in AT_NIGHT else name for name in PROGRAMS]
)
def test_ranks_compile_one_order(name, monkeypatch):
    monkeypatch.setenv("DTENSOR_AGREEMENT", "0")  # there is nobody to agree with
    f, shape, inputs, options = PROGRAMS[name]
    found = told(f, shape, inputs, **options)
    assert [len(graphs) for graphs in found.values()] == [2] * math.prod(shape)
    assert sum([len(graph) for graph in found[0]]) > 0
    assert disagreement(found) is None


def test_what_is_written_to_on_one_rank_travels_alike_on_all(monkeypatch):
    """Of seven rows the first rank sends its input, which is written to in the end, and the last a padded copy."""
    monkeypatch.setenv("DTENSOR_AGREEMENT", "0")

    def f(x, w):
        y = w.redistribute(placements=[R]).sum(0) + x.redistribute(placements=[R]).exp().sum(0)
        w.sin_()
        return y

    found = {}
    for rank in range(2):
        torch.compiler.reset()
        with fake_ranks(2, rank), overheard() as heard:
            mesh = init_device_mesh("cpu", (2,))
            args = [distribute_tensor(torch.ones(7, 2), mesh, [S0]) for _ in range(2)]
            torch.compile(f, backend="dtensor", fullgraph=True, options={"inner": "aot_eager", "passes": TRAVEL})(*args)
        found[rank] = heard
    torch.compiler.reset()
    assert [len(graph) for graph in found[0]] == [1]
    assert disagreement(found) is None


TRAVEL = ["lower", "bucket"]
"""The passes that decide what travels together."""

ONE, OTHER = ((0, 1), "all_reduce sum of float32[4]"), ((0, 1), "all_gather of float32[4]")


def test_another_order_is_found():
    assert disagreement({0: [[ONE, OTHER]], 1: [[ONE, OTHER]]}) is None
    text = disagreement({0: [[ONE, OTHER]], 1: [[OTHER, ONE]]})
    assert text is not None
    assert text.startswith("graph 0: ranks 0 and 1 run compiled graphs that communicate diff")
    assert disagreement({0: [[ONE]], 1: []}) == "the ranks compile different numbers of graphs: {0: 1, 1: 0}"


def test_groups_that_wait_for_each_other_are_found():
    """On a 2 x 2 mesh each pair of ranks agrees, and all four wait for ever."""
    rows, columns = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}, {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    first = {0: rows, 1: columns, 2: columns, 3: rows}
    told = {}
    for rank, by in first.items():
        then = columns if by is rows else rows
        told[rank] = [[(by[rank], "all_reduce sum of float32[4]"), (then[rank], "all_reduce sum of float32[4]")]]
    text = disagreement(told)
    assert text is not None
    assert "wait for each other in a cycle" in text
    assert "rank 3: all_reduce sum of float32[4] with ranks [2, 3]" in text
    assert disagreement({r: [sorted(graphs[0], key=lambda c: c[0] != rows[r])] for r, graphs in told.items()}) is None
