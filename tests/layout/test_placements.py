"""Placements and chunks by themselves: what they say of themselves, what they refuse, and how lengths are cut."""

import pytest
import torch
from torch.distributed import tensor as theirs

from dtensor import Partial, PlacementError, Replicate, Shard
from dtensor.layout.chunks import chunk_length, own_length, uneven_noted
from dtensor.layout.layout import Layout
from dtensor.layout.placements import Placement, as_placement, as_placements, parsed, words
from dtensor.torch_private.core import strided_shard


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_lengths_are_cut_as_torch_chunk_cuts(parts):
    for size in range(15):
        expected = [len(c) for c in torch.arange(size).chunk(parts)] if size else []
        expected += [0] * (parts - len(expected))
        assert [chunk_length(size, parts, index) for index in range(parts)] == expected


def test_only_uneven_lengths_are_noted():
    with uneven_noted() as noted:
        assert [own_length(size, 3, 2, "mesh.x") for size in (6, 7, 8)] == [2, 1, 2]
    assert noted == {(7, "mesh.x"): 1, (8, "mesh.x"): 2}


def test_what_kind_a_placement_is():
    shard, replicate, partial = Shard(1), Replicate(), Partial("max")
    assert [p.is_shard() for p in (shard, replicate, partial)] == [True, False, False]
    assert [p.is_replicate() for p in (shard, replicate, partial)] == [False, True, False]
    assert [p.is_partial() for p in (shard, replicate, partial)] == [False, False, True]
    assert [shard.is_shard(dim) for dim in (0, 1, 2)] == [False, True, False]
    assert [partial.is_partial(op) for op in ("avg", "max", "sum")] == [False, True, False]
    assert not replicate.is_shard(0)
    assert not replicate.is_partial("sum")


@pytest.mark.parametrize(
    ("placement", "text", "code"),
    [
        (Shard(0), "S(0)", "Shard(dim=0)"),
        (Shard(-1, cut=0), "S(-1)#0", "Shard(dim=-1, cut=0)"),
        (Shard(1, cut=2), "S(1)#2", "Shard(dim=1, cut=2)"),
        (Replicate(), "R", "Replicate()"),
        (Partial(), "P", "Partial(reduce_op='sum')"),
        (Partial("avg"), "P(avg)", "Partial(reduce_op='avg')"),
    ],
)
def test_texts(placement, text, code):
    assert (str(placement), repr(placement)) == (text, code)
    assert words([placement]) == text
    assert parsed(text) == (placement,)
    made, names = placement.__fx_repr__()
    assert eval(made, dict(names)) == placement
    assert placement != Placement()


def test_placements_are_values():
    assert {Shard(0), Shard(0), Shard(0, cut=0), Partial("sum"), Partial()} == {Shard(0), Shard(0, cut=0), Partial()}
    with pytest.raises(AttributeError):
        Shard(0).dim = 1


@pytest.mark.parametrize("dim", [True, 1.0, None, "0"])
def test_dims_are_integers(dim):
    with pytest.raises(TypeError, match="takes a tensor dimension"):
        Shard(dim)


@pytest.mark.parametrize("cut", [-1, "0", 0.5])
def test_cuts_count_from_zero(cut):
    with pytest.raises(TypeError, match="takes as cut"):
        Shard(0, cut=cut)
    assert Shard(0, cut=0).cut == 0


def test_torch_s_placements_by_one():
    assert as_placement(theirs.Shard(2)) == Shard(2)
    assert as_placement(theirs.Replicate()) == Replicate()
    assert as_placement(theirs.Partial("max")) == Partial("max")
    for wrong in (None, "R", 0, Replicate):
        with pytest.raises(PlacementError, match=r"a placement is Shard\(dim\), Replicate\(\) or Partial\(\); got"):
            as_placement(wrong)
    with pytest.raises(
        PlacementError, match=r"write Shard with a cut for each axis .* Shard\(1, cut=0\) for the outer"
    ):
        as_placement(strided_shard(1, 2))


def test_kinds_of_the_same_name_elsewhere_are_none():
    class Shard:
        dim = 0

    with pytest.raises(PlacementError, match="a placement is"):
        as_placement(Shard())


@pytest.mark.parametrize("name", ["Mask", "Q", "Re", "Rz", "Sh", "Si", "Z"])
def test_other_kinds_of_torch_s_are_none(name):
    kind = type(name, (), {"dim": 0, "reduce_op": "sum", "__module__": "torch.distributed.tensor.placement_types"})
    with pytest.raises(PlacementError, match="a placement is"):
        as_placement(kind())


def test_dims_run_from_the_last_one_back_to_the_first():
    assert as_placements([Shard(-2), Shard(1)], 2, 2) == (Shard(0), Shard(1))
    assert as_placements((Shard(-1, cut=1), Shard(1, cut=0)), 2, 2) == (Shard(1, cut=1), Shard(1, cut=0))
    for dim in (-3, 2):
        with pytest.raises(PlacementError, match=rf"Shard\({dim}\) does not fit a tensor of 2 dimensions; dims run"):
            as_placements([Shard(dim)], 1, 2)


@pytest.mark.parametrize("given", [[Shard(0)], [Shard(0)] * 3])
def test_one_placement_for_each_axis(given):
    with pytest.raises(PlacementError, match=f"the mesh has 2 axes but {len(given)} placements? (was|were) given"):
        as_placements(given, 2, 1)


@pytest.mark.parametrize("given", [Shard(0), "RR", {Replicate()}, 2])
def test_what_is_no_sequence(given):
    for read in (lambda: as_placements(given, 2, 1), lambda: words(given)):
        with pytest.raises(PlacementError, match=r"one placement per mesh axis; got .*, write (such as )?\["):
            read()


def test_words_of_none():
    assert words(None) == words([]) == ""
    assert words((Shard(0), Replicate(), Partial("min"))) == "S(0)RP(min)"
    assert parsed("") == ()
    with pytest.raises(PlacementError, match="a placement is"):
        words([Shard(0), 3])


def test_cuts_of_one_dim_are_each_another_or_none():
    good = [Shard(0, cut=1), Shard(1), Shard(0, cut=0)]
    assert as_placements(good, 3, 2) == tuple(good)
    for bad in ([Shard(0, cut=1), Shard(0, cut=1)], [Shard(0), Shard(0, cut=1)], [Shard(0, cut=0), Shard(-2)]):
        with pytest.raises(PlacementError, match="in which order axes shard dimension 0"):
            as_placements(bad, 2, 2)


# Layouts.


def test_what_a_layout_lists():
    layout = Layout.parse("S(1)P(max)S(0)RS(1)", 3)
    assert (layout.mesh_ndim, layout.dims, layout.partial) == (5, ((2,), (0, 4), ()), ((1, "max"),))
    assert layout.sharded_axes == (2, 0, 4)
    assert layout.context == (layout,)
    assert str(layout) == layout.text == "S(1)P(max)S(0)RS(1)"
    assert repr(layout) == "Layout.parse('S(1)P(max)S(0)RS(1)', 3)"
    made, names = layout.__fx_repr__()
    assert eval(made, dict(names)) is layout


def test_which_layouts_are_replicated():
    assert Layout.parse("RR", 2).is_replicated
    assert Layout.parse("", 2).is_replicated
    assert not Layout.parse("RP", 2).is_replicated
    assert not Layout.parse("S(1)R", 2).is_replicated


def test_orders_of_three_axes():
    layout = Layout.make(3, ((1, 2, 0),), ())
    assert layout.text == "S(0)#2S(0)#0S(0)#1"
    assert Layout.parse(layout.text, 1) is layout
    assert Layout.parse("S(0)#0S(0)#1S(0)#2", 1) is Layout.parse("S(0)S(0)S(0)", 1)


@pytest.mark.parametrize("text", ["S(1)", "RS(1)", "RSR", " R", "R ", "P(", "S(0)S(0)#", "R,R"])
def test_texts_of_no_layout(text):
    with pytest.raises(PlacementError, match="is not a layout of a 1-dimensional tensor"):
        Layout.parse(text, 1)


def test_a_text_is_read_anew_for_other_numbers_of_dims():
    assert Layout.parse("S(0)R", 1) is not Layout.parse("S(0)R", 2)
    assert Layout.parse("S(0)R", 2).dims == ((0,), ())


def test_moving_an_axis():
    layout = Layout.parse("S(0)S(0)P(max)", 2)
    assert layout.moved(0).text == "RS(0)P(max)"
    assert layout.moved(0, dim=1).text == "S(1)S(0)P(max)"
    assert layout.moved(0, dim=0).dims == ((1, 0), ())
    assert layout.moved(0, reduce_op="avg").partial == ((0, "avg"), (2, "max"))
    assert layout.moved(2).text == "S(0)S(0)R"
    assert layout.moved(2, dim=0).dims == ((0, 1, 2), ())
    assert layout.moved(2, reduce_op="sum").text == "S(0)S(0)P"
    assert layout.without_partial() is layout.moved(2)
    assert layout.moved(2).without_partial() is layout.moved(2)


@pytest.mark.parametrize("text", ["S(0)S(0)", "S(0)#1S(0)#0", "S(1)S(0)", "S(0)R", "PS(1)"])
@pytest.mark.parametrize("shape", [(12, 9), (5, 1), (0, 7), (11, 13)])
def test_boxes_are_the_chunks_of_chunks(text, shape):
    """As `torch.chunk` gives them, axis after axis; of empty ones the length alone."""
    layout, sizes = Layout.parse(text, 2), (2, 3)
    for at in ((i, j) for i in range(2) for j in range(3)):
        expected = []
        for length, axes in zip(shape, layout.dims):
            held = torch.arange(length)
            for a in axes:
                chunks = held.chunk(sizes[a]) if len(held) else ()
                held = chunks[at[a]] if at[a] < len(chunks) else held[:0]
            expected.append(held.tolist())
        box = layout.local_box(shape, sizes, at)
        assert [list(range(*span)) for span in box] == expected
        assert layout.local_shape(shape, sizes, at) == tuple(map(len, expected))
        assert all(0 <= begin <= end <= length for (begin, end), length in zip(box, shape))
