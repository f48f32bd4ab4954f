"""Attention whose keys are cut along the sequence and travel, forced to do so, against dense torch."""

import sys
import threading
from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import dtensor.compile
from dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.rules import attention_blocks
from dtensor.testing import CountCollectives, run_ranks, run_threads

CHOOSE = sys.modules["dtensor.rules.choose"]

RING, KEYS = ("s", "t"), ("t",)


class Way(threading.local):
    """The factors whose candidate this thread's operators take, where they have it."""

    factors = None


WAY, PRICE = Way(), CHOOSE._price


def price(rule, c, *rest):
    return -1.0 if c.factors == WAY.factors else PRICE(rule, c, *rest)


@contextmanager
def forced(*factors):
    """Operators take the candidate of these factors. The ranks are threads that enter at different times."""
    WAY.factors = factors
    yield
    WAY.factors = None


@contextmanager
def in_a_process(*factors):
    """`forced` on a rank that is a process of its own."""
    with patch.object(CHOOSE, "_price", price), forced(*factors):
        yield


@pytest.fixture(autouse=True)
def _priced(monkeypatch):
    monkeypatch.setattr(CHOOSE, "_price", price)


def t(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


spans = st.tuples(st.integers(0, 9), st.integers(0, 9))


@given(spans, spans)
def test_parts_of_a_causal_block_are_what_is_seen_of_it(rows, columns):
    seen = Counter()
    for (first, count), (left, width), is_causal in attention_blocks._parts(True, rows, columns):
        assert not is_causal or count == width, "kernels agree on squares only"
        for i in range(count):
            for j in range(width):
                if not is_causal or j <= i:
                    seen[rows[0] + first + i, columns[0] + left + j] += 1
    wanted = {(i, j) for i in range(rows[0], sum(rows)) for j in range(columns[0], sum(columns)) if j <= i}
    assert seen == dict.fromkeys(wanted, 1)


def masks(length):
    """A name -> what attention takes for it."""
    at = torch.arange(length)
    document = torch.tensor([0] * (length // 3) + [1] * (length - length // 3))
    causal = at[:, None] >= at
    yield "all", {}
    yield "causal", {"is_causal": True}
    yield "documents", {"attn_mask": causal & (document[:, None] == document)}
    yield "window", {"attn_mask": causal & (at[:, None] - at < 3)}
    yield "bias", {"attn_mask": t(7, length, length)}
    yield "a row of nothing", {"attn_mask": (causal & (at != length - 1)) & (at[:, None] != 0)}


def compared(mesh, length, heads, keys, placements, options, dtype=torch.float64):
    """The collectives of a forward and a backward, which agree with dense torch."""
    dense = [t(i, 2, h, length, 8, dtype=dtype).requires_grad_() for i, h in enumerate((heads, keys, keys))]
    expected = F.scaled_dot_product_attention(*dense, **options, enable_gqa=heads != keys)
    weight = t(9, *expected.shape, dtype=dtype)
    (expected * weight).sum().backward()
    placed = [distribute_tensor(x.detach(), mesh, p).requires_grad_() for x, p in zip(dense, placements)]
    if "attn_mask" in options:
        options = {"attn_mask": distribute_tensor(options["attn_mask"], mesh, [Replicate()] * mesh.ndim)}
    with CountCollectives() as count:
        out = F.scaled_dot_product_attention(*placed, **options, enable_gqa=heads != keys)
        out.backward(distribute_tensor(weight, mesh, out.placements))
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(out.full_tensor(), expected, **close)
    for x, leaf in zip(placed, dense):
        torch.testing.assert_close(x.grad.full_tensor(), leaf.grad, **close)
    return Counter([c.op for c in count.collectives])


def every_way(rank, shape, some):
    mesh = init_device_mesh("cpu", shape)
    whole, cut = [Replicate()] * len(shape), [Shard(2)] * len(shape)
    cases = [
        (length, of, options)
        for length in (1, 2, 5, 9, 37)
        for of in ((3, 3), (4, 2), (3, 1))
        for options in masks(length)
    ]
    for length, (heads, keys), (name, options) in cases[:: 7 if some else 1]:
        with forced(*RING):
            made = compared(mesh, length, heads, keys, [cut] * 3, options)
        assert set(made) == {"collective_permute"}, (name, made)
        with forced(*KEYS):
            made = compared(mesh, length, heads, keys, [whole, cut, cut], options)
        assert not made["collective_permute"], (name, made)
        assert made["all_reduce"], (name, made)
        compared(mesh, length, heads, keys, [cut, whole, whole], options)
    with forced(*RING):
        compared(mesh, 9, 4, 2, [cut] * 3, {"is_causal": True}, torch.bfloat16)


@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2)])
def test_every_way_and_mask_gives_what_one_device_gives(shape, some):
    """By day every seventh of 90 cases, which is each mask, length and number of heads."""
    run_threads(every_way, 4 if shape == (2, 2) else shape[0], shape, some)


def two_ways_at_once(rank):
    """Keys passed along one axis and reduced, or heads cut, along the other."""
    mesh = init_device_mesh("cpu", (2, 2))
    for options in ({"is_causal": True}, {}):
        for other in (Replicate(), Shard(1)):
            placements = [[Shard(2), other], [Shard(2), other], [Shard(2), other]]
            with forced(*RING):
                compared(mesh, 9, 4, 2, placements, options)
        with forced(*KEYS):
            compared(mesh, 9, 4, 2, [[Shard(2), Replicate()]] + [[Replicate(), Shard(2)]] * 2, options)


def test_ways_on_two_axes():
    run_threads(two_ways_at_once, 4, timeout=200)


def work(rank, n, backward):
    """How many pairs of a query and a key this rank computes, by a causal mask in the ring."""
    mesh, done = init_device_mesh("cpu", (n,)), []
    of = attention_blocks._Block.backward if backward else attention_blocks._Block.forward

    def counted(self, *args):
        found = of(self, *args)
        query, key = (args[0][1], args[1]) if backward else args[:2]
        square = args[-1]
        done.append(query.shape[2] * key.shape[2] * (0.5 if square else 1))
        return found

    with patch.object(attention_blocks._Block, of.__name__, counted), in_a_process(*RING):
        q = distribute_tensor(t(0, 1, 1, 16 * n, 8), mesh, [Shard(2)]).requires_grad_()
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    return sum(done)


@pytest.mark.parametrize(("n", "backward"), [(2, False), (3, True), (4, True)])
def test_ranks_of_a_causal_ring_compute_as_much(n, backward):
    done = run_ranks(work, n, n, backward)
    assert max(done) <= 1.05 * sum(done) / n
    assert sum(done) == (16 * n) ** 2 / 2


def compiled(rank, shape, lengths, inner):
    mesh = init_device_mesh("cpu", shape)
    run = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        backend="dtensor",
        options={"decide": False, "inner": inner},
        dynamic=True,
        fullgraph=True,
    )
    cut = [Shard(2)] * len(shape)
    with in_a_process(*RING), dtensor.compile.statistics() as found:
        for length in lengths:
            dense = [t(i, 2, 3, length, 8).requires_grad_() for i in range(3)]
            expected = F.scaled_dot_product_attention(*dense, is_causal=True)
            weight = t(9, *expected.shape)
            expected.backward(weight)
            placed = [distribute_tensor(x.detach(), mesh, cut).requires_grad_() for x in dense]
            out = run(*placed)
            out.backward(distribute_tensor(weight, mesh, cut))
            torch.testing.assert_close(out.full_tensor(), expected)
            for x, leaf in zip(placed, dense):
                torch.testing.assert_close(x.grad.full_tensor(), leaf.grad)
    assert {c.op for c in (*found.forward, *found.backward)} == {"collective_permute"}
    return found.graphs


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled_for_any_length(inner):
    """Also where it does not divide, or ranks have no tokens."""
    assert run_ranks(compiled, 3, (3,), (64, 37, 16, 5), inner, timeout=300)[0] <= 2
