"""The mirror of lowering: raise(lower(graph)) is the graph, on every rank."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from dtensor.comm.collectives import ops
from dtensor.comm.start_collectives import FUNCTIONAL, OVER_GLOO
from dtensor.layout.chunks import chunk_length
from dtensor.passes import Lower, Raise, text, verify, wire_bytes
from dtensor.passes.graph import ir
from dtensor.testing import fake_ranks
from dtensor.torch_private.core import make_fx

RANKS = 4


@pytest.fixture(scope="module", params=range(RANKS), ids="rank {}".format)
def me(request):
    """A rank of four, and the name of their group."""
    with fake_ranks(RANKS, request.param):
        yield request.param, init_device_mesh("cpu", (RANKS,)).get_group().group_name


def trace(f, shape, dtype=torch.float32):
    return make_fx(f, tracing_mode="fake")(torch.zeros(shape, dtype=dtype))


OPERATORS = {
    "all_gather": lambda x, dim, other, size, group, by: ops.all_gather(x, dim, size, group),
    "reduce_scatter": lambda x, dim, other, size, group, by: ops.reduce_scatter(x, by, other, group),
    "all_reduce": lambda x, dim, other, size, group, by: ops.all_reduce(x, by, group),
    "all_to_all": lambda x, dim, other, size, group, by: ops.all_to_all(x, dim, other, size, group),
}


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    name=st.sampled_from(list(OPERATORS)),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dims=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    by=st.sampled_from(("sum", "avg", "max")),
    transposed=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.float32, torch.int64, torch.int16, torch.complex64)),
    exchange=st.booleans(),
)
def test_mirror_of_lower(me, name, shape, dims, by, transposed, dtype, exchange):
    """Even and uneven shards, empty ones too, of any strides and dtype; `shape` is the global one."""
    rank, group = me
    dim, other = dims[0] % len(shape), dims[1] % len(shape)
    other = (dim + 1) % len(shape) if name == "all_to_all" else other
    name = "all_reduce" if name == "all_to_all" and other == dim else name
    by = by if dtype is torch.float32 else "sum"
    local = list(shape)
    if name in ("all_gather", "all_to_all"):
        local[dim] = chunk_length(shape[dim], RANKS, rank)

    def f(x):
        x = x.transpose(0, -1) if transposed else x
        return OPERATORS[name](x, dim, other, shape[dim], group, by).abs() + 1

    ends = (local[-1], *local[1:-1], local[0]) if transposed and len(local) > 1 else local
    gm = trace(f, ends, dtype)
    before, sent = text(gm), wire_bytes(gm)
    with patch("dtensor.comm.collectives.starts", lambda group, device: OVER_GLOO if exchange else FUNCTIONAL):
        assert Lower()(gm.graph) == 1
        assert not any(ir.is_collective(node) for node in gm.graph.nodes)
        assert Raise()(gm.graph) == 1
    verify(gm, "raise")
    assert (text(gm), wire_bytes(gm)) == (before, sent)


def test_what_was_cut_afterwards_is_told_from_uneven(me):
    """Seven rows gathered, and eight gathered of which seven are used, look alike on ranks with full shards."""
    rank, group = me
    uneven = trace(lambda x: ops.all_gather(x, 0, 7, group) + 1, (chunk_length(7, RANKS, rank), 2))
    cut = trace(lambda x: ops.all_gather(x, 0, 8, group)[:7] + 1, (2, 2))
    for gm in (uneven, cut):
        before = text(gm)
        Lower()(gm.graph)
        assert (Raise()(gm.graph), text(gm)) == (1, before)


def test_changed_after_lowering_is_left(me):
    """Another user of what lies between the start and the result: the operator would not make it."""
    rank, group = me
    gm = trace(lambda x: ops.all_gather(x, 1, 23, group) + 1, (4, chunk_length(23, RANKS, rank)))
    Lower()(gm.graph)
    (join,) = [n for n in gm.graph.nodes if n.target is ir.aten.cat.default and n.meta["val"].shape == (4, 24)]
    (out,) = [n for n in gm.graph.nodes if n.op == "output"]
    out.args = ([out.args[0], join],)
    before = text(gm)
    assert (Raise()(gm.graph), text(gm)) == (0, before)


def test_pulled_apart_after_lowering_is_left(me):
    """Work between a start and its wait was put there so that both run at once."""
    _, group = me
    gm = trace(lambda x: (ops.all_reduce(x, "sum", group), x * 2), (4, 4))
    Lower()(gm.graph)
    (wait,) = [n for n in gm.graph.nodes if n.target is ir.WAIT]
    (work,) = [n for n in gm.graph.nodes if n.target is ir.aten.mul.Tensor]
    wait.prepend(work)
    before = text(gm)
    assert (Raise()(gm.graph), text(gm)) == (0, before)
