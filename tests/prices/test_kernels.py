"""What the kernels of a sequence of operators read and write."""

from itertools import pairwise

import pytest

from dtensor.prices.kernels import Call, shares

X, Y, Z, W = "xyzw"


def fused(*reads, to, bytes_=4.0):
    return Call(True, [(x, bytes_) for x in reads], [(to, bytes_)])


def product(*reads, to, bytes_=4.0):
    return Call(False, [(x, bytes_) for x in reads], [(to, bytes_)])


def total(calls, kept, sizes=None):
    found = shares(calls, kept, sizes or {})
    return sum([s.moved for s in found]), sum([s.launches for s in found])


def test_a_product_reads_its_operands_and_writes_its_result():
    (share,) = shares([product(X, Y, to=Z)], {Z}, {})
    assert (share.read, share.written, share.launches) == ([4.0, 4.0], [4.0], 1.0)


def test_what_stays_inside_of_a_kernel_is_not_moved():
    assert total([fused(X, to=Y), fused(Y, to=Z)], {Z}) == (8.0, 1.0)


def test_a_kernel_reads_once_what_several_read():
    assert total([fused(X, to=Y), fused(X, Y, to=Z)], {Z}) == (8.0, 1.0)
    assert total([fused(X, to=Y), fused(X, to=Z)], {Y, Z}) == (12.0, 1.0)


def test_what_is_kept_is_written():
    assert total([fused(X, to=Y), fused(Y, to=Z)], {Y, Z}) == (12.0, 1.0)
    assert total([fused(X, to=Y)], set()) == (4.0, 1.0)


def test_a_product_in_between_parts_two_kernels():
    """What both sides of it read is written and read."""
    calls = [fused(X, to=Y), product(Y, to=Z), fused(Y, Z, to=W)]
    assert total(calls, {W}) == (4 + 4 + 8 + 12, 3.0)


def test_what_only_a_later_kernel_reads_is_computed_there():
    calls = [fused(X, to=Y), product(X, to=Z), fused(Y, Z, to=W)]
    assert total(calls, {W}) == (8 + 12, 2.0)


def test_what_two_later_kernels_read_is_computed_once():
    calls = [fused(X, to=Y), product(X, to=Z), fused(Y, Z, to=W), product(W, to="p"), fused("p", Y, to="q")]
    assert total(calls, {"q"}) == (8 + 8 + 12 + 8 + 12, 5.0)


def test_a_part_of_memory_is_read_in_part_and_no_more_than_there_is():
    halves = [Call(True, [(X, 2.0)], [(Y, 2.0)]), Call(True, [(X, 2.0)], [(Z, 2.0)])]
    assert total(halves, {Y, Z}, {X: 4.0})[0] == 4 + 4
    assert total([fused(X, X, to=Y)], {Y}, {X: 4.0})[0] == 8
    assert total([fused(X, to=Y, bytes_=8.0)], {Y}, {X: 1.0})[0] == 16, "the sizes of an expanded tensor are its view's"


def test_a_write_in_place_is_one_write():
    calls = [fused(X, to=Y), Call(True, [(Y, 4.0)], [(Y, 4.0)]), product(Y, to=Z)]
    assert total(calls, {Z}) == (4 + 4 + 8, 2.0)
    assert total([Call(True, [(X, 4.0)], [(X, 4.0)])], {X}) == (8.0, 1.0)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_how_far_operators_are_decomposed_does_not_matter(steps):
    """A norm as one operator costs what it does as several."""
    whole = [product(X, to=Y), fused(Y, to=Z), product(Z, to=W)]
    names = [Y, *[f"{k}" for k in range(steps - 1)], Z]
    parts = [fused(Y, a, to=b) for a, b in pairwise(names)]
    assert total([whole[0], *parts, whole[-1]], {W}) == total(whole, {W})
