"""Dispatch: which calls run by the looked-up decision alone, and what a decision is looked up by."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import dtensor
from dtensor import Partial, Replicate, Shard, distribute_tensor, explain, init_device_mesh
from dtensor.dispatch import decision, dispatch
from dtensor.mesh import tensor_spec
from dtensor.mesh.caches import clear_caches
from dtensor.testing import CountCollectives, fake_ranks, with_threads
from dtensor.torch_private.core import FakeTensorMode, fastest_binding, without_frame

aten = torch.ops.aten

QUICK = {
    "relu": lambda x, y, w, i: torch.relu(x),
    "cast": lambda x, y, w, i: x.to(torch.float64),
    "bmm": lambda x, y, w, i: torch.bmm(y, y.transpose(1, 2)),
    "sum of a dim": lambda x, y, w, i: x.sum(1, keepdim=True),
    "mean of a dim": lambda x, y, w, i: x.mean(1),
    "amax": lambda x, y, w, i: x.amax(1),
    "var": lambda x, y, w, i: x.var(1, correction=0),
    "any": lambda x, y, w, i: (x > 0).any(1),
    "softmax": lambda x, y, w, i: torch.softmax(x, 1),
    "log softmax": lambda x, y, w, i: torch.log_softmax(x, 1),
    "layer norm": lambda x, y, w, i: F.layer_norm(x, (4,), w[0], w[1]),
    "sort": lambda x, y, w, i: torch.sort(x, 1),
    "unsqueeze": lambda x, y, w, i: x.unsqueeze(1),
    "chunk": lambda x, y, w, i: x.chunk(2, 1),
    "slice": lambda x, y, w, i: x[:, 1:3],
    "embedding": lambda x, y, w, i: F.embedding(i, w),
    "index_select": lambda x, y, w, i: w.index_select(0, i),
    "gather": lambda x, y, w, i: x.gather(1, x.argsort(1)),
    "cat": lambda x, y, w, i: torch.cat([x, x], 1),
    "stack": lambda x, y, w, i: torch.stack([x, x, x], -1),
    "zeros_like": lambda x, y, w, i: torch.zeros_like(x, dtype=torch.int32),
    "lower triangle": lambda x, y, w, i: y.tril(-1),
    "pool": lambda x, y, w, i: F.max_pool2d(y.unsqueeze(1), 2),
    "loss of each": lambda x, y, w, i: F.nll_loss(x, i, reduction="none"),
    "sum of squares": lambda x, y, w, i: F.mse_loss(x, x + 1, reduction="sum"),
}
"""Operators of x and y, sharded on dimension 0, a replicated weight and sharded indices, each in parts on a shard."""


@pytest.fixture
def mesh():
    with fake_ranks(2):
        yield init_device_mesh("cpu", (2,))


def leaves(out) -> list:
    return list(out) if isinstance(out, (list, tuple)) else [out]


@pytest.mark.parametrize("name", QUICK)
def test_what_needs_no_second_look_gets_none(mesh, name, monkeypatch):
    """Once decided, the operator runs on local tensors: no rule's function, no walk over the arguments for each."""
    torch.manual_seed(0)
    whole = torch.randn(4, 4), torch.randn(4, 4, 4), torch.randn(4, 4), torch.tensor([1, 0, 3, 2])
    given = [distribute_tensor(t, mesh, [Replicate() if t is whole[2] else Shard(0)]) for t in whole]
    local = [t.to_local() for t in given]
    QUICK[name](*given)

    def refuse(*args):
        raise AssertionError(f"{args[0]} leaves the quick path")

    monkeypatch.setattr(dispatch, "run", refuse)
    monkeypatch.setattr(dispatch, "decide", refuse)
    monkeypatch.setattr(dispatch, "_look_up", refuse)
    found, expected = leaves(QUICK[name](*given)), leaves(QUICK[name](*local))
    assert len(found) == len(expected)
    for a, e in zip(found, expected):
        assert a._spec.local_shape() == e.shape
        torch.testing.assert_close(a._local_tensor, e, rtol=0, atol=0)


PREPARED = {
    "mean over the shards": lambda x: x.mean(0),
    "moved operand": lambda x: x.softmax(0),
    "moved item of a list": lambda x: torch.cat([x, x.t()], 1),
    "any over the shards": lambda x: (x > 0).any(0),
    "view": lambda x: x.view(2, 2, 4),
    "expand": lambda x: x.expand(2, 4, 4),
    "in place": lambda x: x.add_(1),
    "several results": lambda x: x.max(1),
}


@pytest.mark.parametrize("name", PREPARED)
@with_threads(2)
def test_what_differs_on_a_shard_is_prepared_once(rank, name):
    """A second call runs what the first one has prepared, and gives the same; so does one without that."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(16.0).reshape(4, 4).sin()
    given = [distribute_tensor(x, mesh, [Shard(0)]) for _ in range(3)]
    expected = leaves(PREPARED[name](x.clone()))
    first = leaves(PREPARED[name](given[0]))
    look_up = dispatch._look_up
    dist.barrier()
    if rank == 0:
        dispatch._look_up = None  # ranks are threads, for which it is the same
    try:
        dist.barrier()
        second = leaves(PREPARED[name](given[1]))
        dist.barrier()
    finally:
        dispatch._look_up = look_up
        dist.barrier()
    for one, other, e in zip(first, second, expected, strict=True):
        assert one._spec is other._spec
        torch.testing.assert_close(one.full_tensor(), e)
        torch.testing.assert_close(other.full_tensor(), e)


def test_equal_numbers_of_other_types_are_other_calls(mesh):
    """1, True, 1.0 and 1+0j are one key of a dictionary; what adding them to a tensor of truth values gives differs."""
    x = distribute_tensor(torch.tensor([True, False]), mesh, [Shard(0)])
    for number in (1, True, 1.0, 1 + 0j, True, 1):
        out = x + number
        assert out.dtype == (torch.ones(1, dtype=torch.bool) + number).dtype == out._local_tensor.dtype
    assert [torch.sum(x, 0, keepdim).shape for keepdim in (True, False)] == [(1,), ()]
    pairs = [torch.full_like(x, 2, dtype=dtype).dtype for dtype in (torch.int64, torch.float32)]
    assert pairs == [torch.int64, torch.float32]


@with_threads(2)
def test_a_decision_for_one_float_does_not_serve_another(rank):
    """Where the rule depends on it: distances in the 1-norm are sums, and equal bounds of a histogram are none."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(24.0).reshape(4, 6).sin()
    placed = distribute_tensor(x, mesh, [Shard(1)])
    for p in (1.0, 2.0, 1.0, 3.0):
        torch.testing.assert_close(torch.cdist(placed, placed, p).full_tensor(), torch.cdist(x, x, p))
    for low, high in ((0.25, 0.75), (0.5, 0.5), (-0.25, 0.25)):
        assert torch.equal(torch.histc(placed, 4, low, high).full_tensor(), torch.histc(x, 4, low, high))


def test_decisions_are_kept_for_the_floats_of_all_steps(mesh):
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    clear_caches()
    for rate in (0.1, 0.2, 0.3):
        x.add_(x, alpha=rate)
    assert len(dispatch._cache) == 1
    x.add_(x, alpha=0.0)
    assert len(dispatch._cache) == 2


def test_lists_and_their_lengths_are_part_of_the_call(mesh):
    x = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
    assert [torch.cat([x] * n, 1).shape[1] for n in (1, 2, 3, 2)] == [2, 4, 6, 4]
    assert [tuple(x.sum(dims).shape) for dims in ([0], [0, 1], [1])] == [(2,), (), (4,)]
    assert [tuple(x.expand(*s).shape) for s in ((4, 2), (1, 4, 2), (3, 4, 2))] == [(4, 2), (1, 4, 2), (3, 4, 2)]


@with_threads(2)
def test_a_view_of_a_copy_is_written_through(rank):
    """The second view is one of the copy that the first one is, and runs by the quick path."""
    x = distribute_tensor(torch.arange(6.0).reshape(3, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    flat = x.view(6)
    for _ in range(2):
        flat.unsqueeze(0).add_(10)
    assert x.full_tensor().tolist() == [[20, 21], [22, 23], [24, 25]]


@with_threads(4)
def test_empty_shards_take_the_long_way(rank):
    """Two rows on four ranks: kernels that refuse what is empty do not get it, whatever full shards were decided."""
    mesh = init_device_mesh("cpu", (4,))
    for rows in (4, 2):
        x = torch.linspace(-1, 1, rows * 16).cos().view(rows, 1, 4, 4)
        d = distribute_tensor(x, mesh, [Shard(0)])
        torch.testing.assert_close(F.max_pool2d(d, 2).full_tensor(), F.max_pool2d(x, 2))
        torch.testing.assert_close(d.amax((0, 2)).full_tensor(), x.amax((0, 2)))
        torch.testing.assert_close(d.mean((0, 1)).full_tensor(), x.mean((0, 1)))


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_embedding_is_seen_by_modes_and_autograd(mesh):
    w = distribute_tensor(torch.randn(4, 4), mesh, [Replicate()])
    i = distribute_tensor(torch.tensor([1, 0]), mesh, [Shard(0)])
    with Seen() as seen:
        F.embedding(i, w)
    assert seen.names.count("aten.embedding.default") == 1
    assert not F.embedding(i, w).requires_grad
    w.requires_grad_()
    assert F.embedding(i, w).requires_grad
    with torch.no_grad():
        assert not F.embedding(i, w).requires_grad
    tangents = torch.func.vmap(lambda row: F.embedding(row, torch.eye(4)))(torch.tensor([[1], [0]]))
    assert tangents.shape == (2, 1, 4)


@with_threads(2)
def test_a_norms_gradients_are_explained_where_they_move(rank):
    mesh = init_device_mesh("cpu", (2,))
    drawn = torch.Generator().manual_seed(0)
    x, grad, w, b = (torch.randn(shape, generator=drawn) for shape in ((4, 6), (4, 6), 6, 6))
    _, mean, rstd = aten.native_layer_norm(x, [6], w, b, 1e-5)
    given = [distribute_tensor(t, mesh, [Shard(0)]) for t in (grad, x, mean, rstd)]
    call = aten.native_layer_norm_backward.default
    cases = {
        Replicate(): ["all_reduce", "all_reduce"],
        Shard(0): ["all_gather", "all_reduce", "reduce_scatter"],
    }
    for place, moves in cases.items():
        parameters = distribute_tensor(w, mesh, [Replicate()]), distribute_tensor(b, mesh, [place])
        arguments = (*given[:2], [6], *given[2:], *parameters, [True, True, True])
        with CountCollectives() as counted, dtensor.strict() if place == Replicate() else nullcontext():
            found = call(*arguments)
        assert [g.placements for g in found] == [(Shard(0),), (Replicate(),), (place,)]
        assert sorted(c.op for c in counted.collectives) == moves
        for a, e in zip(found, call(grad, x, [6], mean, rstd, w, b, [True, True, True]), strict=True):
            torch.testing.assert_close(a.full_tensor(), e)
        (told,) = explain(call, *arguments).operators
        assert [(m.argument, m.spec.layout.placements, m.target.placements) for m in told.moves][-2:] == [
            ("output 1", (Partial(),), (Replicate(),)),
            ("output 2", (Partial(),), (place,)),
        ]
        assert [o.layout.placements for o in told.outputs if o is not None] == [g.placements for g in found]
        assert sorted(s.op for m in told.moves for s in m.steps) == moves
        masked = call(*arguments[:-1], [False, True, False])
        assert (masked[0], masked[2]) == (None, None)
        torch.testing.assert_close(masked[1].full_tensor(), found[1].full_tensor())


def test_what_is_called_in_place_of_an_operator_makes_its_call():
    xs = [torch.randn(2, 3), torch.randn(2, 3)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert fastest_binding(aten.cat.default, (xs, 1), {}) is torch.cat
        assert fastest_binding(aten.stack.default, (xs,), {}).__name__ == "stack"
        assert fastest_binding(aten.add_.Tensor, (xs[0], 1), {}) is torch.Tensor.add_
        assert fastest_binding(aten.slice.Tensor, (xs[0], 1, 0, 2), {}) is without_frame(aten.slice.Tensor)
        # torch.max of a dim is another overload; that of all is this one.
        assert fastest_binding(aten.max.dim, (xs[0], 1), {}) is torch.max


def test_what_is_decided_in_a_trace_is_known_in_the_next(mesh, monkeypatch):
    """Each input of a graph has a stand-in for its mesh: calls that differ in nothing else share a decision, and
    nothing that is kept holds a stand-in."""
    clear_caches()
    torch.compiler.reset()
    layers = [distribute_tensor(torch.randn(4, 4), mesh, [Shard(1)]).requires_grad_() for _ in range(3)]
    x = distribute_tensor(torch.randn(4, 4), mesh, [Replicate()])
    decided = []
    decide = dispatch.decide
    monkeypatch.setattr(dispatch, "decide", lambda func, *args: decided.append(func) or decide(func, *args))

    def loss():
        return sum([(x @ w).redistribute(placements=[Replicate()]).sum() for w in layers]).to_local()

    def decided_in_a_step():
        decided.clear()
        torch.compiler.reset()
        torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(), layers)
        return list(decided)

    first = decided_in_a_step()
    assert first.count(aten.sum.default) == 1
    assert first.count(aten.mm.default) == 2  # of the forward, and of the backward
    assert decided_in_a_step() == []
    prepared = list(dispatch._cache.values())
    kept = [*tensor_spec._interned.values(), *[s for p in prepared for s in p.decision.outputs if s is not None]]
    assert all(s.mesh is mesh and s.real is None for s in kept)


def test_outputs_are_worked_out_once_for_all_layouts(mesh, monkeypatch):
    """By all that they follow from: sizes, dtypes and numbers, also of what is in lists, and the default dtype."""
    run, own = [], decision._made_by
    monkeypatch.setattr(decision, "_made_by", lambda func, *given: run.append(func) or own(func, *given))
    monkeypatch.setattr(decision, "_known_outputs", {})

    def told(func, *sizes, dtype=None, **kwargs):
        """The shape and dtype in each layout, and how often torch was asked."""
        run.clear()
        whole = [torch.ones(n, dtype=dtype) for n in sizes]
        found = set()
        for placement in (Replicate(), Shard(0), Shard(1), Partial()):
            clear_caches()
            out = func(*[distribute_tensor(x, mesh, [placement]) for x in whole], **kwargs)
            out = out if isinstance(out, torch.Tensor) else out[0]
            found.add((tuple(out.shape), out.dtype))
        return found, len(run)

    assert told(torch.asinh, (6, 10)) == ({((6, 10), torch.float32)}, 1)
    assert told(torch.asinh, (6, 11)) == ({((6, 11), torch.float32)}, 1)
    assert told(torch.asinh, (6, 10)) == ({((6, 10), torch.float32)}, 0)
    assert told(lambda x, y: torch.cat([x, y], 1), (6, 10), (6, 4)) == ({((6, 14), torch.float32)}, 1)
    assert told(lambda x, y: torch.cat([x, y], 1), (6, 4), (6, 4)) == ({((6, 8), torch.float32)}, 1)
    assert told(lambda x: x.sum(1, keepdim=True), (6, 10)) == ({((6, 1), torch.float32)}, 1)
    assert told(lambda x: x.sum(1, keepdim=False), (6, 10)) == ({((6,), torch.float32)}, 1)
    halves = {((6, 10), torch.float32)}, 1
    assert told(lambda x: x / 2, (6, 10), dtype=torch.int64) == halves
    torch.set_default_dtype(torch.float64)
    try:
        assert told(lambda x: x / 2, (6, 10), dtype=torch.int64) == ({((6, 10), torch.float64)}, 1)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_decision_is_for_the_default_dtype_of_its_call():
    """Of integers a quotient has the default dtype, which a program may change between two calls."""
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(4), mesh, [Shard(0)])
        try:
            for dtype in (torch.float32, torch.float64, torch.float32):
                torch.set_default_dtype(dtype)
                half = x / 2
                assert half.dtype == half.to_local().dtype == dtype
        finally:
            torch.set_default_dtype(torch.float32)
