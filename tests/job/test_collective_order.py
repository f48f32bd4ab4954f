"""What ranks compare of their graphs' collectives, and how a difference is said."""

import zlib

import pytest
import torch

from dtensor.job.collective_order import MOST, Eager, Order, alike, difference, mark, said, text

SUM, MAX = ("all_reduce sum of float32[4, 8]", "a.py:1"), ("all_reduce max of float32[4, 8]", "a.py:2")
OPEN = ("all_reduce sum of float32[?, 8]", "b.py:3")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([], [], True),
        ([SUM], [], False),
        ([SUM, MAX], [SUM], False),
        ([SUM], [SUM, MAX], False),
        ([SUM, MAX], [SUM, MAX], True),
        ([SUM, MAX], [MAX, SUM], False),
        ([SUM, MAX], [SUM, SUM], False),
        ([SUM, MAX], [OPEN, MAX], True),
        ([MAX], [OPEN], False),
    ],
)
def test_sequences_that_are_alike(one, other, expected):
    """Of one length, and alike one by one; a question mark, on either side, is any size."""
    assert alike(one, other) is expected
    assert alike(other, one) is expected


@pytest.mark.parametrize("other", ["all_gather of float32[4]", "all_gather of float32[4, 8, 2]"])
def test_entries_with_more_words_are_not_alike(other):
    assert not alike([("all_gather of float32[4, 8]", "")], [(other, "")])
    assert not alike([("all_gather of float32[?, ?]", "")], [(other, "")])


def test_marks_are_made_of_what_was_asked_for_with_sizes_left_open():
    assert mark([]) == 0
    assert mark([SUM, MAX]) == zlib.crc32(b"all_reduce sum of float32[?, ?]\nall_reduce max of float32[?, ?]")
    assert mark([("all_gather of float32[12], int8[?, 7]", "")]) == zlib.crc32(b"all_gather of float32[?], int8[?, ?]")


def test_a_difference_names_the_first_collective_that_differs():
    text = difference({5: [SUM, MAX, SUM], 2: [SUM, SUM, SUM]})
    assert text.splitlines() == [
        "ranks 2 and 5 run compiled graphs that communicate differently on the group they share:",
        "  rank 2, collective 1 of 3: all_reduce sum of float32[4, 8], from a.py:1",
        "  rank 5, collective 1 of 3: all_reduce max of float32[4, 8], from a.py:2",
        "make the model, its inputs and what the program depends on the same on all ranks",
    ]


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_where_one_sequence_goes_on_the_other_has_none(ranks):
    long, short = ranks
    lines = difference({long: [SUM, MAX], short: [OPEN]}).splitlines()
    assert lines[1 + long] == f"  rank {long}, collective 1 of 2: all_reduce max of float32[4, 8], from a.py:2"
    assert lines[1 + short] == f"  rank {short}, collective 1 of 1: none"


def test_how_a_collective_is_said():
    assert said([SUM, MAX], 0) == "all_reduce sum of float32[4, 8], from a.py:1"
    assert said([SUM, ("barrier", "")], 1) == "barrier"
    assert said([SUM, MAX], 2) == said([], 0) == "none"


BEGUN = [("all_reduce", torch.float32, torch.Size((n % 3, 2)), ("sum", "mesh.x")) for n in range(MOST + 1)]


def sums_of(begun):
    """The checksum after each collective."""
    found, last = [], 0
    for b in begun:
        last = zlib.crc32(text(b).encode(), last)
        found.append(last)
    return found


def test_checksums_are_kept_where_other_ranks_have_them_too():
    """At the greatest multiple of each power of two up to the number of collectives."""
    order, sums = Order(), sums_of(BEGUN[:20])
    for n, begun in enumerate(BEGUN[:20], 1):
        assert order.begin(begun) == order.count == n
        assert order.last is begun
        if n % 3 == 0:
            continue  # several are added at once
        order.sum_up()
        multiples = {k: n - n % (1 << k) for k in range(5) if 1 << k <= n}
        assert order.checksums == {k: (m, sums[m - 1]) for k, m in multiples.items()}


def test_the_program_sums_up_itself_what_nobody_asks_for():
    order = Order()
    for begun in BEGUN[:-1]:
        order.begin(begun)
    assert order.checksums == {}
    order.begin(BEGUN[-1])
    assert order.checksums[0] == (MOST + 1, sums_of(BEGUN)[-1])


def test_at_first_nothing_is_marked():
    assert (Eager().mark, Eager().waits, Eager().raises, Eager().failures) == (0, None, None, 0)
