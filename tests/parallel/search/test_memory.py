"""What is predicted to be held along a step, on steps of a few operators."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dtensor import Plan, Shard, predict
from dtensor.parallel.search.memory import Held, Memory, handing_all_on, packed
from dtensor.parallel.search.tape import BORDER, Op, Value
from dtensor.prices.machine import MACHINES

N = 10
"""Operators; the last five are the backward."""


def memory(**ends):
    given = {"last": {}, "forward": {}, "backward": {}, "turn": 5, "handed": (), **ends}
    return Memory(SimpleNamespace(**given), N)


def test_buckets_are_in_the_order_of_operators_and_no_larger_than_they_may_be():
    one, two, three, large = Held(4, 2.0, 1.0), Held(1, 2.0, 1.0), Held(2, 2.0, 1.0), Held(3, 9.0, 4.5)
    assert packed([one, two, three, large], 4.0) == [[two, three], [large], [one]]


def test_gradients_that_all_ranks_sum():
    """The bucket is there from the first gradient on, and what arrives is copied out of it at the end."""
    held = memory()
    held.reduce([Held(6, 3.0, 3.0), Held(8, 5.0, 5.0)], 100.0)
    assert held.peak(0.0) == (8.0 + 8.0 + 8.0, 8.0 + 8.0 + 8.0)


def test_gradients_of_which_ranks_get_parts():
    """They are put together when the last one is there; or the bucket was there from the first one on."""
    held = memory(last={1: 6}, backward={1: 6})
    held.make(0, 1, 100.0)  # what the backward reads is gone before the end
    held.reduce([Held(6, 3.0, 1.5), Held(8, 5.0, 2.5)], 100.0)
    assert held.peak(0.0) == (100.0 + 3.0, 100.0 + 8.0)


def test_a_gradient_that_fills_a_bucket_is_there_until_the_next_one_is_sent():
    """Of three, two are there at once, with the parts of those before, of which the last is just copied."""
    held = memory()
    held.reduce([Held(5, 8.0, 1.0), Held(6, 8.0, 1.0), Held(7, 8.0, 1.0)], 4.0)
    assert held.peak(0.0) == (8.0 + 8.0 + 1.0 + 1.0 + 1.0,) * 2


def test_parameters_come_in_buckets_one_ahead():
    held = memory(last={("p", False): 1, ("q", False): 3})
    held.take(1, ("p", False), Held(1, 4.0, 2.0))
    held.take(3, ("q", False), Held(3, 4.0, 2.0))
    held.gather(4.0)
    assert held.peak(0.0)[0] == 4.0 + 2.0 + 2.0  # the first, what it is gathered of, and what the next one will be
    together = memory(last={("p", False): 1, ("q", False): 3})
    together.take(1, ("p", False), Held(1, 4.0, 2.0))
    together.take(3, ("q", False), Held(3, 4.0, 2.0))
    together.gather(8.0)
    assert together.peak(0.0)[0] == 8.0 + 4.0 + 4.0  # the bucket, what it is gathered of, and a copy of the first


@pytest.mark.parametrize(("part", "least"), [(0.5, 2.0), (1.0, 4.0), (2.0, 8.0)], ids=["shards", "itself", "gathered"])
def test_what_the_backward_takes_is_kept(part, least):
    held = memory(last={1: 7}, forward={1: 1}, backward={1: 7})
    held.make(0, 1, 4.0)
    held.read(1, part)
    assert dict(held.kept()) == {1: least}
    assert held.peak(0.0)[0] == max(4.0, least)


@pytest.mark.parametrize(("handed", "stays"), [((2,), 8.0), ((), 12.0)], ids=["all read it", "others read the shards"])
def test_what_a_border_gathers_stays_in_place_of_shards_that_nothing_else_reads(handed, stays):
    held = memory(last={1: 7}, forward={1: 3}, backward={1: 7}, handed=handed)
    held.make(0, 1, 4.0)
    held.copy(2, 1, 8.0, 4.0, stays=True)
    assert dict(held.kept()) == {1: stays}
    assert held.peak(0.0)[0] == 4.0 + 8.0


def test_borders_after_which_memory_is_only_read_as_they_handed_it_on():
    def value(storage):
        return Value("made", "", (4,), (1,), torch.float32, storage)

    def op(func, reads, makes):
        return Op(func, (), {}, reads, makes, False, "", False)

    x, handed, view, y, again = value(1), value(1), value(1), value(2), value(1)
    ops = [
        op("norm", [value(0)], [x]),
        op(BORDER, [x], [handed]),
        op("view", [handed], [view]),
        op("product", [view], [y]),
        op(BORDER, [handed], [again]),
        op("add", [y, view], [value(3)]),
        op(BORDER, [y], [value(2)]),
    ]
    assert sorted(handing_all_on(ops)) == [1, 6]


def test_what_the_forward_moves_is_saved_and_paid_once():
    """Sums are scattered before the activation, whose derivative reads the same shards."""
    model, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.ones(512, 64)
    plan = Plan({"tp": 2}, {"0.weight": {"tp": Shard(1)}})
    moves = predict(model, {"tp": 2}, x, plan, machine=MACHINES["cpu"], device_type="cpu").prediction.moves
    assert [(op, n) for _, op, a, b, n, _ in moves if (a, b) == ("P", "S(0)")] == [("aten.gelu", 1)]


def test_weights_are_gathered_again_where_the_backward_reads_them():
    """Not that of the first layer, as its input has no gradient, and not those of the last two, which stay gathered."""
    model, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(5)]), torch.ones(512, 64)
    for dim in (0, 1):
        plan = Plan({"tp": 2}, {"*.weight": {"tp": Shard(dim)}}, {"*.weight": {}}, {"tp": Shard(0)})
        moves = predict(model, {"tp": 2}, x, plan, machine=MACHINES["cpu"], device_type="cpu").prediction.moves
        assert sum(n for _, op, a, b, n, _ in moves if a.startswith("S") and b == "R" and op == "aten.t") == 7
