"""Views by their index maps: what the rule of `view` keeps is right, and what it refuses is wrong.

A tensor of the numbers 0, 1, 2, … shows which element went where, so equal values mean equal index maps.
"""

from math import prod

import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor import Shard, distribute_tensor, init_device_mesh
from dtensor.rules.choose import _fits
from dtensor.rules.families.views import _common, groups
from dtensor.rules.rule import candidates
from dtensor.testing import with_threads
from dtensor.testing.rules.candidates import OneAxis, call_and_rule, case

PRIMES = st.lists(st.sampled_from([2, 2, 2, 3, 3, 5]), max_size=5)


@st.composite
def shape_pairs(draw):
    """Two shapes of equal product, with dimensions of length 1 here and there."""
    factors = draw(PRIMES)
    return tuple(draw(grouped(draw(st.permutations(factors)) if i else factors)) for i in range(2))


@st.composite
def grouped(draw, factors):
    shape = [1]
    for p in factors:
        if draw(st.booleans()):
            shape.append(1)
        shape[-1] *= p
    return tuple(shape[0 if draw(st.booleans()) or len(shape) == 1 else int(shape[0] == 1) :])


def chunks(x, n, dim):
    found = list(torch.chunk(x, n, dim))
    return found + [x.narrow(dim, 0, 0)] * (n - len(found))


def allowed(before, after, n) -> set[tuple[int, int]]:
    """(input dim, output dim) of each shard that the rule keeps on an axis of size `n`."""
    rule = call_and_rule(case(torch.ops.aten.view.default, torch.empty(before), list(after)), OneAxis(n))[1]
    found = [c for c in candidates(rule) if c.factors and _fits(rule, c, n, {})]
    return {
        (c.inputs[0], c.outputs[0]) for c in found if isinstance(c.inputs[0], int) and isinstance(c.outputs[0], int)
    }


def is_kept(before, after, n, i, o) -> bool:
    """Whether viewing each shard of `i` gives the shard of `o` of the view."""
    x = torch.arange(prod(before)).view(before)
    pairs = zip(chunks(x, n, i), chunks(x.view(after), n, o))
    return all(a.numel() == b.numel() and torch.equal(a.reshape(b.shape), b) for a, b in pairs)


@settings(max_examples=400, deadline=None)
@given(shape_pairs(), st.sampled_from([2, 3, 4, 5, 6]))
def test_what_is_kept_is_right(shapes, n):
    before, after = shapes
    for i, o in allowed(before, after, n):
        assert is_kept(before, after, n, i, o), (before, after, n, i, o)


@settings(max_examples=400, deadline=None)
@given(shape_pairs(), st.sampled_from([2, 3, 4, 5, 6]))
def test_what_is_refused_is_wrong(shapes, n):
    """For cuts that divide; of uneven cuts only those of unchanged dimensions are followed."""
    before, after = shapes
    kept = allowed(before, after, n)
    for i, x in enumerate(before):
        for o, y in enumerate(after):
            if x % n == 0 and y % n == 0 and (i, o) not in kept:
                assert not is_kept(before, after, n, i, o), (before, after, n, i, o)


@given(shape_pairs())
def test_groups_have_equal_products(shapes):
    before, after = shapes
    for a, b in groups(before, after):
        assert prod(before[i] for i in a) == prod(after[i] for i in b)
    assert sum(len(a) for a, _ in groups(before, after)) == sum(s != 1 for s in before)


def test_shapes_of_other_products_have_no_groups():
    """As sizes may look that are symbols."""
    assert groups((4, 3), (6,)) == groups((5,), (2, 3)) == []
    assert groups((2,), (2, 3)) == groups((2, 3), (2,)) == [([0], [0])]


def test_named_cases():
    assert allowed((4, 6), (24,), 2) == {(0, 0)}
    assert allowed((24,), (4, 6), 4) == {(0, 0)}
    assert allowed((24,), (4, 6), 8) == set()
    assert allowed((2, 5, 8), (2, 5, 4, 2), 2) == {(0, 0), (1, 1), (2, 2)}
    assert allowed((4, 9), (6, 6), 2) == {(0, 0)}
    assert allowed((5, 2), (5, 2), 4) == {(0, 0), (1, 1)}


def test_a_factor_that_two_lengths_have_in_common():
    """Of numbers the greatest; of symbols one of the two, if it divides the other."""
    s, t = (sympy.Symbol(name, positive=True, integer=True) for name in "st")
    assert _common(12, 18) == 6
    assert _common(5, 7) == 1
    assert _common(s, 3 * s) == s
    assert _common(3 * s, s) == s
    assert _common(s, t) == 1
    assert _common(6, s) == _common(s, 6) == 1
    assert _common(2 * s, 3 * s) == 1


@with_threads(2)
def test_swapaxes_in_inference_mode(rank):
    """Where torch does not write it as a transpose; its arguments have names of their own."""
    x = torch.arange(12.0).view(4, 3)
    with torch.inference_mode():
        placed = distribute_tensor(x, init_device_mesh("cpu", (2,)), [Shard(0)])
        found = torch.swapaxes(placed, 0, 1)
        assert found.placements == (Shard(1),)
        assert found.full_tensor().equal(x.t())
