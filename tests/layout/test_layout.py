"""Layouts: text, order, interning, and the sizes of shards."""

import copy
import pickle
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtensor import Partial, PlacementError, Replicate, Shard
from dtensor.layout.layout import Layout
from dtensor.layout.placements import as_placements, parsed, words


@st.composite
def layouts(draw, mesh_ndim: int = 3, ndim: int = 2):
    axes = draw(st.permutations(range(mesh_ndim)))
    dims: list[list[int]] = [[] for _ in range(ndim)]
    partial = []
    for axis in axes:
        where = draw(st.sampled_from([*range(ndim), "P", "R"]))
        if isinstance(where, int):
            dims[where].append(axis)
        elif where == "P":
            partial.append((axis, draw(st.sampled_from(["sum", "avg", "max", "min", "product"]))))
    return Layout.make(mesh_ndim, tuple(map(tuple, dims)), tuple(sorted(partial)))


@given(layouts())
def test_text_round_trip(layout):
    assert Layout.parse(layout.text, 2) is layout


@given(layouts())
def test_placements_tell_all_of_a_layout(layout):
    assert Layout.of(as_placements(layout.placements, 3, 2), 2) is layout
    assert parsed(words(layout.placements)) == layout.placements
    assert eval(repr(layout.placements)) == layout.placements


def test_cuts_that_say_no_order():
    with pytest.raises(PlacementError, match="in which order axes shard dimension 0; give each of these axes"):
        as_placements([Shard(0, cut=0), Shard(0)], 2, 1)
    with pytest.raises(TypeError, match="0 the outermost; got -1"):
        Shard(0, cut=-1)
    assert Layout.of(as_placements([Replicate(), Shard(-1, cut=1)], 2, 1), 1).text == "RS(0)"


@given(layouts())
def test_copies_are_the_same_object(layout):
    assert copy.deepcopy(layout) is layout
    assert pickle.loads(pickle.dumps(layout)) is layout
    assert eval(repr(layout)) is layout


@given(layouts(), st.tuples(st.integers(0, 9), st.integers(0, 9)), st.tuples(*[st.integers(1, 3)] * 3))
def test_shards_cover_the_tensor(layout, shape, mesh):
    """Along each dimension the shards of the ranks that differ in its axes add up to the global length."""
    for dim, axes in enumerate(layout.dims):
        total = 0
        for index in product(*(range(mesh[a]) for a in axes)):
            at = dict(zip(axes, index))
            total += layout.local_shape(shape, mesh, [at.get(a, 0) for a in range(3)])[dim]
        assert total == shape[dim]


def test_order_is_data():
    first, second = Layout.parse("S(0)S(0)", 1), Layout.parse("S(0)#1S(0)#0", 1)
    assert first.placements == (Shard(0), Shard(0))
    assert second.placements == (Shard(0, cut=1), Shard(0, cut=0))
    assert first is not second
    assert (first.dims, second.dims) == (((0, 1),), ((1, 0),))
    assert first.local_shape((10,), (2, 2), (0, 1)) == (2,)
    assert first.local_shape((10,), (2, 2), (1, 0)) == (3,)
    assert second.local_shape((10,), (2, 2), (1, 0)) == (2,)


def test_uneven_and_empty_shards_are_those_of_chunk():
    layout = Layout.of((Shard(0),), 1)
    assert [layout.local_shape((5,), (4,), (r,)) for r in range(4)] == [(2,), (2,), (1,), (0,)]


def test_without_partial():
    assert Layout.parse("PS(0)P(max)", 1).without_partial().text == "RS(0)R"


@pytest.mark.parametrize("text", ["S(2)", "Q", "S(0)x", "P(mean"])
def test_bad_text(text):
    with pytest.raises(PlacementError, match=r"is not a layout of a 2-dimensional tensor"):
        Layout.parse(text, 2)


def test_checked_placements():
    assert as_placements([Shard(-1), Partial("max")], 2, 3) == (Shard(2), Partial("max"))
    assert as_placements(None, 2, 0) == (Replicate(), Replicate())
    with pytest.raises(PlacementError, match=r"2 axes but 1 placements? (was|were) given: \[Shard\(dim=0\)\]"):
        as_placements([Shard(0)], 2, 1)
    with pytest.raises(
        PlacementError, match=r"Shard\(3\) does not fit a tensor of 2 dimensions; dims run from -2 to 1"
    ):
        as_placements([Shard(3)], 1, 2)
    with pytest.raises(PlacementError, match=r"a 0-dim tensor takes Replicate\(\) or Partial\(\)"):
        as_placements([Shard(0)], 1, 0)
    with pytest.raises(PlacementError, match=r"write \[Shard\(dim=0\)\]"):
        as_placements(Shard(0), 1, 1)
    with pytest.raises(PlacementError, match="got 'S"):
        as_placements(["S(0)"], 1, 1)
    with pytest.raises(TypeError, match=r"such as Shard\(0\); got 'x'"):
        Shard("x")
    with pytest.raises(ValueError, match="one of sum, avg, max, min, product; got 'mean'"):
        Partial("mean")


def test_torch_placements_are_accepted():
    from torch.distributed import tensor as theirs

    given = [theirs.Shard(-1), theirs.Replicate(), theirs.Partial("avg")]
    assert as_placements(given, 3, 2) == (Shard(1), Replicate(), Partial("avg"))


def test_kinds_of_placements():
    assert Shard(1).is_shard()
    assert Shard(1).is_shard(1)
    assert not Shard(1).is_shard(0)
    assert not Replicate().is_shard()
    assert Partial().is_partial()
    assert not Shard(0).is_partial()
    assert Replicate().is_replicate()
    assert not Partial().is_replicate()


def test_layouts_are_equal_only_to_themselves():
    """They are interned, so the same text gives the same object."""
    one = Layout.parse("S(0)R", 2)
    assert one == Layout.parse("S(0)R", 2)
    assert one != Layout.parse("RS(0)", 2)
    assert one != "S(0)R"
