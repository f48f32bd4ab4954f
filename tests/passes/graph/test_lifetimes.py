"""Bytes that a graph holds: when they are made, how long they stay, and what a compiler never writes."""

import pytest
import torch

from dtensor.comm.host_memory import from_host_start, to_host
from dtensor.passes.graph.lifetimes import Lifetimes
from dtensor.passes.graph.node_order import rearrange

X = 4 * 8 * 8  # bytes of a matrix


def held(bench, f, *shapes, fused=False):
    """Operator -> matrices that are there while it runs; those that are inputs; those at the peak."""
    found = Lifetimes(bench.trace(f, *shapes).graph, fused=fused)
    rows = {node.name: at / X for node, at in zip(found.nodes, found.held) if node.op == "call_function"}
    return rows, found.given / X, found.peak / X


def test_a_value_is_held_from_its_maker_to_its_last_reader(bench):
    def f(x):
        a = x @ x
        b = a @ x
        return b @ a

    rows, given, peak = held(bench, f, (8, 8))
    assert rows == {"mm": 1, "mm_1": 2, "mm_2": 3}
    assert (given, peak) == (1, 4)


def view(x):
    a = (x @ x).t()
    b = x @ x
    return a @ b


def one_of_two_results(x):
    q, r = torch.linalg.qr(x)
    del r
    a = q @ q
    return a @ a


@pytest.mark.parametrize("f", [view, one_of_two_results])
def test_memory_is_held_by_what_looks_at_it(bench, f):
    rows, _, _ = held(bench, f, (8, 8))
    assert rows["mm_1"] == 2


def test_results_are_held_until_the_last_is_taken_out(bench):
    def f(x):
        q, r = torch.linalg.qr(x)
        a = q @ q
        b = a @ a
        return b @ r

    def at(graph, name):
        found = Lifetimes(graph, fused=False)
        return next(held / X for node, held in zip(found.nodes, found.held) if node.name == name)

    graph = bench.trace(f, (8, 8)).graph
    assert at(graph, "mm_1") == 3
    last, first = (next(n for n in graph.nodes if n.name == name) for name in ("mm_2", "getitem_1"))
    last.prepend(first)
    assert at(graph, "linalg_qr") == 2, "both are there from the call on"
    assert at(graph, "mm_1") == 4, "q as well, which nothing reads any more"
    rearrange(graph, list(graph.nodes))
    assert at(graph, "mm_1") == 3


def test_a_reduction_is_written(bench):
    """What it reduces would have to wait for what reads it."""

    def f(x):
        a = (x @ x).exp()
        b = a.sum()
        c = x @ x
        return (c @ c) + b

    rows, _, _ = held(bench, f, (8, 8), fused=True)
    assert rows["mm_2"] == 2 + 4 / X


def test_parts_of_a_split_are_views(bench):
    def f(x):
        a, b = (x @ x).split(4)
        c = b.t() @ b
        return c @ a.t()

    rows, _, _ = held(bench, f, (8, 8))
    assert rows == {"mm": 1, "split": 1, "getitem": 1, "getitem_1": 1, "t": 1, "mm_1": 2, "t_1": 2, "mm_2": 2.5}


def test_what_is_fused_is_not_written(bench):
    def f(x):
        return (x @ x).exp().sin() @ x

    rows, _, _ = held(bench, f, (8, 8), fused=True)
    assert max(rows.values()) == 2, "exp is never written"
    rows, _, _ = held(bench, f, (8, 8))
    assert (rows["sin"], rows["mm_1"]) == (2, 2)


def test_what_is_not_written_keeps_what_it_is_made_of(bench):
    def f(x):
        a = x @ x
        b = a.exp()
        c = x @ x
        return (c @ c) + b

    rows, _, _ = held(bench, f, (8, 8), fused=True)
    assert rows["mm_2"] == 3, "mm, of which exp is computed with add"


def test_what_is_on_the_host_takes_nothing(bench):
    def f(x):
        host = to_host(x @ x)
        a = x @ x
        b = a @ a
        return from_host_start(host, x.device) @ b

    rows, _, _ = held(bench, f, (8, 8))
    assert (rows["mm_1"], rows["mm_2"]) == (1, 2)
