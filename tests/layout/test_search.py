"""The parts of the search for a plan: the bound that leads it, the edges it goes along, and what it lists of them."""

import pytest

from dtensor import Partial, PlacementError, Replicate, Shard
from dtensor.layout import transitions
from dtensor.layout.layout import Layout
from dtensor.layout.placements import Placement
from dtensor.layout.planner import Cost, Plan, Step, _Bound, _readable, forget, plan
from dtensor.layout.transitions import (
    Space,
    State,
    _dealt,
    _interchangeable,
    _reducible_sets,
    commute,
    rearranged,
    senders,
)
from dtensor.prices.links import DEFAULT, INTER, Link, Network, log2_ceil, seconds, terms, wire_bytes

COLLECTIVE, LOCAL, ELEMENT = 1000.0, 1.0, 0.001
"""Seconds of a collective, of a local step, and of an element, so that a bound reads as its three parts."""

ONE = Link(alpha=400.0, start=600.0, launch=5.0, bandwidth=2e3)
OTHER = Link(alpha=800.0, start=300.0, launch=1.0, bandwidth=4e3)


def state(text, ndim):
    layout = Layout.parse(text, ndim)
    return State(layout.dims, layout.partial)


@pytest.mark.parametrize(
    ("src", "dst", "collectives", "locally", "elements"),
    [
        ("RR", "RR", 0, 0, 0),
        ("S(0)P", "S(0)P", 0, 0, 0),
        ("RR", "S(0)R", 0, 1, 0),
        ("RR", "S(0)S(1)", 0, 1, 0),
        ("S(0)R", "S(0)S(0)", 0, 1, 0),
        ("RR", "PR", 0, 1, 0),
        ("RR", "PP(max)", 0, 2, 0),
        ("RR", "PS(0)", 0, 2, 0),
        ("S(0)R", "RR", 1, 0, 96 - 48),
        ("S(0)S(0)", "RR", 1, 0, 96 - 24),
        ("S(0)S(1)", "RR", 2, 0, 96 - 24),
        ("S(0)S(0)", "S(0)R", 1, 0, 48 - 24),
        ("S(0)S(1)", "S(0)R", 1, 0, 48 - 24),
        ("PR", "RR", 1, 0, 96),
        ("PP", "RR", 1, 0, 96),
        ("PP(max)", "RR", 2, 0, 96),
        ("PP(max)", "PR", 1, 0, 96),
        ("PR", "S(0)R", 1, 0, 48),
        ("PR", "S(0)S(1)", 1, 1, 24),
        ("PR", "P(max)R", 1, 1, 96),
        ("S(0)P", "RR", 2, 0, 96),
        ("S(0)P", "S(1)S(1)", 2, 0, 24),
        ("S(0)R", "S(1)R", 1, 0, 48 - 24),
        ("S(0)R", "S(1)S(1)", 1, 1, 24 - 12),
        ("S(0)S(1)", "S(1)S(0)", 1, 0, 0),
        ("S(0)S(0)", "S(0)#1S(0)#0", 1, 0, 0),
        ("S(0)R", "RS(0)", 1, 1, 0),
    ],
)
def test_the_bound_counts_what_every_path_has_to_do(src, dst, collectives, locally, elements):
    network = Network.of((2, 2), (ONE, OTHER), [(0, 1)])
    space = Space((8, 12), network, frozenset({0, 1}), Layout.parse(dst, 2).partial)
    bound = _Bound(space, state(dst, 2), 4)
    for _ in range(2):  # found, and found again
        expected = collectives * COLLECTIVE + locally * LOCAL + elements * ELEMENT
        assert bound(state(src, 2)) == pytest.approx(expected, abs=1e-9)


def test_the_bound_takes_the_longest_shards():
    space = Space((7, 5), Network.of((2, 4), (ONE, OTHER)), frozenset({0, 1}), ())
    bound = _Bound(space, state("RR", 2), 4)
    assert bound(state("S(0)S(1)", 2)) == pytest.approx(2 * COLLECTIVE + (35 - 4 * 2) * ELEMENT)


def test_blocks_that_the_goal_has_too_may_be_permuted_into_place():
    """Four blocks over an axis of four: the goal's two axes of two make as many, one of them alone does not."""
    network = Network.of((4, 2, 2), OTHER, [(0, 1, 2)])
    space = Space((16, 16), network, frozenset({0, 1}), ())
    moved = _Bound(space, State(((1, 2), (0,)), ()), 4)
    assert moved(State(((0,), (1, 2)), ())) == pytest.approx(1100.0)
    gathered = _Bound(space, State(((1,), (0,)), ()), 4)
    assert gathered(State(((0,), (1,)), ())) == pytest.approx(1100.0 + ELEMENT * (32 - 4 * 4))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("sum", "sum", True),
        ("max", "max", True),
        ("sum", "avg", True),
        ("avg", "sum", True),
        ("sum", "max", False),
        ("max", "min", False),
        ("avg", "product", False),
    ],
)
def test_which_reductions_commute(a, b, expected):
    assert commute(a, b) is expected


def test_sets_of_axes_that_may_be_reduced_first():
    assert _reducible_sets(((0, "sum"), (1, "sum"))) == (("sum", (0,)), ("sum", (1,)), ("sum", (0, 1)))
    assert _reducible_sets(((0, "sum"), (1, "max"))) == (("max", (1,)),)
    assert _reducible_sets(((0, "max"), (1, "sum"), (2, "max"))) == (("max", (2,)),)
    assert _reducible_sets(((0, "sum"), (1, "avg"))) == (("sum", (0,)), ("avg", (1,)))
    assert _reducible_sets(((0, "sum"), (1, "max"), (2, "sum"), (3, "sum"))) == (
        *(("sum", (2,)), ("sum", (3,)), ("sum", (2, 3))),
    )
    assert _reducible_sets(()) == ()


def test_dimensions_that_may_be_exchanged():
    """Those that nobody names, if their lengths divide or are the same; an empty one is like an empty one."""
    assert _interchangeable((8, 12, 5, 5, 4, 7), frozenset({1}), 4) == [[1], [0, 4], [2, 3], [5]]
    assert _interchangeable((0, 8, 0, 1), frozenset(), 4) == [[0, 2], [1], [3]]
    assert _interchangeable((8, 8), frozenset({1, 0}), 4) == [[0], [1]]


def edges(text, shape, network, named=(), wanted=()):
    space = Space(shape, network, frozenset(named), wanted)
    return {
        (e.op, e.axes, e.dim, e.scatter_dim, e.reduce_op, e.times, e.to) for e in space.edges(state(text, len(shape)))
    }


def test_steps_out_of_a_shard():
    network = Network.of((2, 2), DEFAULT, [(0, 1)])
    assert edges("S(0)R", (4, 4), network, {0, 1}) == {
        ("all_gather", (0,), 0, None, None, 2, state("RR", 2)),
        ("all_to_all", (0,), 0, 1, None, 2, state("S(1)R", 2)),
        ("shard", (1,), 0, None, None, 1, state("S(0)S(0)", 2)),
        ("shard", (1,), 1, None, None, 1, state("S(0)S(1)", 2)),
    }


def test_steps_out_of_two_shards_of_a_dimension():
    """The innermost cut, or both where the length divides; blocks change places; nothing is left to shard."""
    merged = Network.of((2, 2), DEFAULT, [(0, 1)])
    inner = ("all_gather", (1,), 0, None, None, 2, state("S(0)R", 1))
    both = ("all_gather", (0, 1), 0, None, None, 4, state("RR", 1))
    permuted = ("collective_permute", (0, 1), None, None, None, 1, State(((1, 0),), ()))
    assert edges("S(0)S(0)", (8,), merged, {0}) == {inner, both, permuted}
    assert edges("S(0)S(0)", (7,), merged, {0}) == {inner}
    assert edges("S(0)S(0)", (8,), Network.of((2, 2)), {0}) == {inner}
    # In the other order one group's ranks are not numbered as the dimension is cut.
    assert edges("S(0)#1S(0)#0", (8,), merged, {0}) == {
        ("all_gather", (0,), 0, None, None, 2, State(((1,),), ())),
        ("collective_permute", (0, 1), None, None, None, 1, State(((0, 1),), ())),
    }


def test_steps_out_of_partial_values():
    network = Network.of((2, 2), DEFAULT, [(0, 1)])
    assert edges("PP", (4,), network, {0}) == {
        ("all_reduce", (0,), None, None, "sum", 1, state("RP", 1)),
        ("all_reduce", (1,), None, None, "sum", 1, state("PR", 1)),
        ("all_reduce", (0, 1), None, None, "sum", 1, state("RR", 1)),
        ("reduce_scatter", (0,), 0, None, "sum", 2, state("S(0)P", 1)),
        ("reduce_scatter", (1,), 0, None, "sum", 2, state("PS(0)", 1)),
        ("reduce_scatter", (0, 1), 0, None, "sum", 4, state("S(0)S(0)", 1)),
    }
    # What does not divide is not scattered over both at once. Of a value open over one axis the other may be opened.
    assert ("reduce_scatter", (0, 1)) not in {e[:2] for e in edges("PP", (5,), network, {0})}
    opened = ("partial", (1,), None, None, "max", 1, state("P(max)P(max)", 1))
    assert opened in edges("P(max)R", (4,), network)
    assert opened not in edges("P(max)R", (4,), Network.of((2, 2)))
    assert opened[:5] in {e[:5] for e in edges("RR", (4,), network, wanted=((1, "max"),))}


def test_a_product_is_not_opened_before_a_sum():
    network = Network.of((2, 2))
    made = {e[:2] for e in edges("RP", (4,), network, wanted=((0, "product"), (1, "sum")))}
    assert ("partial", (0,)) not in made
    for text, wanted in (("PR", ((1, "product"),)), ("RP(max)", ((0, "product"),)), ("RR", ((0, "product"),))):
        axis = wanted[0][0]
        assert ("partial", (axis,)) in {e[:2] for e in edges(text, (4,), network, wanted=wanted)}


def test_axes_of_one_rank_take_no_part():
    assert {e[1] for e in edges("RRR", (4,), Network.of((2, 1, 2)), {0})} == {(0,), (2,)}


def test_of_dimensions_that_are_alike_the_first_is_cut():
    network = Network.of((2, 2))
    assert {e[2] for e in edges("RR", (4, 4, 4), network)} == {0}
    assert {e[2] for e in edges("S(0)R", (4, 4, 4), network) if e[0] == "shard"} == {0, 1}
    assert {e[2] for e in edges("RR", (4, 4, 4), network, {1})} == {0, 1}


def test_what_is_priced():
    """A gather by the shards that are put together, an exchange by what is cut along both, a shard by what it makes."""
    space = Space((8, 12), Network.of((2, 2)), frozenset({0, 1}), ())
    pieces = {e.op: (e.pieces, e.times) for e in space.edges(state("S(0)R", 2)) if e.scatter_dim in (None, 1)}
    assert pieces["all_gather"] == (((0,), ()), 2)
    assert pieces["all_to_all"] == (((0,), (0,)), 2)
    assert space.elements(((0,), (0,))) == 4 * 6
    assert space.elements(((0, 1), ())) == 2 * 12
    assert Space((7, 5), Network.of((2, 2)), frozenset(), ()).elements(((0, 1), (1,))) == 2 * 3
    assert space.divides(0, (0, 1))
    assert not Space((6,), Network.of((2, 2)), frozenset(), ()).divides(0, (0, 1))
    assert Space((6,), Network.of((2, 2)), frozenset(), ()).divides(0, (0,))
    (scatter,) = [e for e in Space((8,), Network.of((2,)), frozenset({0}), ()).edges(state("P", 1)) if e.dim == 0]
    fixed, per_byte = terms("reduce_scatter", 2)
    assert (scatter.pieces, scatter.fixed, scatter.per_byte) == (((0,),), fixed, 2 * per_byte)


def test_rearranged_blocks():
    equal = Network.of((2, 2), DEFAULT, [(0, 1)])
    assert rearranged(((0, 1),), equal) == ((((1, 0),), (0, 1)),)
    assert rearranged(((0,), (1,)), equal) == ((((1,), (0,)), (0, 1)),)
    assert rearranged(((0,), ()), equal) == ()
    assert rearranged(((0, 1),), Network.of((2, 2))) == ()
    three = Network.of((2, 2, 2), DEFAULT, [(0, 1), (0, 2), (1, 2), (0, 1, 2)])
    assert rearranged(((0, 1), (2,)), three) == (
        (((0, 2), (1,)), (1, 2)),
        (((1, 0), (2,)), (0, 1)),
        (((1, 2), (0,)), (0, 1, 2)),
        (((2, 0), (1,)), (0, 1, 2)),
        (((2, 1), (0,)), (0, 2)),
    )


def test_rearranged_blocks_of_unequal_axes():
    network = Network.of((4, 2, 2), DEFAULT, [(0, 1), (0, 2), (1, 2), (0, 1, 2)])
    assert rearranged(((0,), (1,)), network) == ()  # two blocks and four: nothing else cuts so
    assert rearranged(((0,), (1, 2)), network) == (
        (((0,), (2, 1)), (1, 2)),
        (((1, 2), (0,)), (0, 1, 2)),
        (((2, 1), (0,)), (0, 1, 2)),
    )
    assert rearranged(((0, 1),), network) == ((((1, 0),), (0, 1)),)
    assert _dealt((0, 1), ((0,), (1,)), network) == (((0,), (1,)), {0: (0, 1), 1: (1, 1)})
    assert _dealt((1, 0), ((0,), (1,)), network) is None
    assert _dealt((0, 1), ((0, 1),), network) == (((0, 1),), {0: (0, 2), 1: (0, 1)})
    assert _dealt((1, 2, 0), ((0,), (1, 2)), network) == (((1, 2), (0,)), {1: (0, 2), 2: (0, 1), 0: (1, 1)})


def test_who_sends_what_each_rank_holds_after():
    assert senders(((0, 1),), ((1, 0),), (0, 1), (2, 2)) == (0, 2, 1, 3)
    assert senders(((0,), (1,)), ((1,), (0,)), (0, 1), (2, 2)) == (0, 2, 1, 3)
    # Rank (i, j) of 2 by 3 holds block 3 i + j, and then block 2 j + i.
    expected = tuple(2 * j + i for i in range(2) for j in range(3))
    assert senders(((0, 1),), ((1, 0),), (0, 1), (2, 3)) == expected
    # Axis 1 keeps its place and its ranks are in groups of their own.
    assert senders(((0, 1, 2),), ((2, 1, 0),), (0, 2), (2, 5, 2)) == (0, 2, 1, 3)


@pytest.mark.parametrize("prefer", ["time", "memory"])
def test_what_does_not_fit(prefer):
    one, two = Layout.parse("RR", 1), Layout.parse("RR", 2)
    for src, dst, shape, sizes in (
        *((one, one, (4, 4), (2, 2)), (two, two, (4,), (2, 2)), (one, two, (4,), (2, 2)), (two, one, (4, 4), (2, 2))),
        *((one, one, (4,), (2,)), (one, one, (4,), (2, 2, 2)), (one, Layout.parse("R", 1), (4,), (2, 2))),
    ):
        with pytest.raises(PlacementError, match="the plan is for shape"):
            plan(src, dst, shape, sizes, 4, prefer)


def test_what_may_be_preferred():
    layout = Layout.parse("R", 1)
    with pytest.raises(ValueError, match="prefer is 'time' or 'memory'; got 'money'"):
        plan(layout, layout, (4,), (2,), 4, "money")


def test_a_mesh_of_no_axes_and_one_of_single_ranks():
    nothing = plan(Layout.parse("", 1), Layout.parse("", 1), (4,), ())
    assert (nothing.steps, nothing.bytes, nothing.seconds, nothing.peak) == ((), 0, 0, 16)
    named = plan(Layout.parse("S(0)P", 1), Layout.parse("RR", 1), (4,), (1, 1))
    assert (named.steps, str(named)) == ((), "S(0)P -> RR: nothing to do")


def test_axes_of_one_rank_lie_as_in_the_goal_from_the_first_step_on():
    found = plan(Layout.parse("S(0)RP", 2), Layout.parse("RS(1)S(0)", 2), (8, 8), (2, 1, 2))
    assert found.steps[0].src is Layout.parse("S(0)RP", 2)
    assert found.steps[-1].dst is Layout.parse("RS(1)S(0)", 2)
    assert [s.dst.dims[1][-1] for s in found.steps] == [1] * 3
    assert all(one.dst is two.src for one, two in zip(found.steps, found.steps[1:]))
    partial = plan(Layout.parse("S(0)RP", 2), Layout.parse("RPR", 2), (8, 8), (2, 1, 2))
    assert all((1, "sum") in s.dst.partial for s in partial.steps)


def test_plans_are_made_anew_when_they_are_forgotten():
    args = Layout.parse("S(0)R", 1), Layout.parse("RR", 1), (8,), (2, 2)
    before = plan(*args)
    assert plan(*args) is before
    forget()
    assert plan(*args) is not before
    assert plan(*args) == before
    rearranged(((0, 1),), Network.of((2, 2), DEFAULT, [(0, 1)]))
    transitions.forget()
    assert rearranged.cache_info().currsize == 0


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1e3, "1.0 kB"),
        (999_900, "999.9 kB"),
        (999_999.5, "1000.0 kB"),
        (1e6, "1.0 MB"),
        (2.5e8, "250.0 MB"),
        (999_999_999.5, "1000.0 MB"),
        (1e9, "1.0 GB"),
        (1.25e10, "12.5 GB"),
    ],
)
def test_readable_sizes(size, text):
    assert _readable(size) == text


# Costs.


def test_the_slower_of_two_links_in_everything():
    one = Link(alpha=1.0, bandwidth=5.0, memory=7.0, launch=9.0, start=2.0)
    other = Link(alpha=3.0, bandwidth=4.0, memory=8.0, launch=6.0, start=1.0)
    slower = Link(alpha=3.0, bandwidth=4.0, memory=7.0, launch=9.0, start=2.0)
    assert one.and_(other) == other.and_(one) == slower
    network = Network.of((2, 2, 2), (one, other, INTER))
    assert network.link((0, 1)) == slower
    assert network.link((1,)) == other
    assert network.link((0, 1, 2)) == slower.and_(INTER)


def test_the_links_that_are_taken_where_none_were_measured():
    assert (DEFAULT.alpha, DEFAULT.bandwidth, DEFAULT.memory) == (5e-6, 10e9, 100e9)
    assert (DEFAULT.launch, DEFAULT.start) == (1e-6, 5e-6)
    assert Link(alpha=10e-6, bandwidth=2.5e9, start=10e-6) == INTER


def test_rounds_of_recursive_doubling():
    assert [log2_ceil(n) for n in (1, 2, 3, 4, 5, 8, 9, 16)] == [0, 1, 2, 2, 3, 3, 4, 4]


def test_bytes_on_the_wire():
    sent = {op: wire_bytes(op, 240, 4) for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")}
    assert sent == {"all_gather": 180, "reduce_scatter": 180, "all_reduce": 360, "all_to_all": 180}
    assert wire_bytes("collective_permute", 240, 4) == 240
    assert wire_bytes("shard", 240, 4) == wire_bytes("partial", 240, 4) == 0


def test_fixed_time_and_time_per_byte():
    link = Link(alpha=1.0, bandwidth=100.0, memory=50.0, launch=0.5, start=2.0)
    assert terms("all_gather", 4, link) == (2.0 + 2 * 1.0, 0.75 / 100)
    assert terms("all_reduce", 4, link) == (2.0 + 4 * 1.0, 1.5 / 100)
    assert terms("collective_permute", 4, link) == (2.0 + 1.0, 1 / 100)
    assert terms("shard", 4, link) == (0.5, 1 / 50)
    assert terms("all_reduce", 1, link) == terms("shard", 1, link) == (0.0, 0.0)
    assert seconds("partial", 100, 2, link) == 0.5 + 2.0


def test_networks_that_are_equal_are_one():
    merged = [(0, 1)]
    one = Network.of((2, 2), DEFAULT, merged)
    assert Network.of((2, 2), (DEFAULT, DEFAULT), merged) is one
    assert Network.of((2, 2)) is not one
    assert Network.of((2, 2), INTER, merged) is not one
    assert (one.sizes, one.links, one.merged) == ((2, 2), (DEFAULT, DEFAULT), frozenset({(0, 1)}))
    assert (one.size(()), one.size((1,)), one.size((0, 1))) == (1, 2, 4)
    assert one.terms("all_gather", (0, 1)) == terms("all_gather", 4)
    assert one.terms("all_gather", (0,)) == terms("all_gather", 2)
    with pytest.raises(ValueError, match="has 2 axes but 3 links were given"):
        Network.of((2, 2), (DEFAULT,) * 3)
    with pytest.raises(AttributeError):
        one.sizes = (4,)


def test_symbols_are_positive_integers():
    cost = plan(Layout.parse("S(0)", 1), Layout.parse("R", 1), (6,), (4,)).cost(symbolic=True)
    assert all(x.is_positive and x.is_integer for x in cost.bytes.free_symbols)
    assert {x.name for x in cost.bytes.free_symbols} == {"s0", "n0"}
    assert "ceiling" in str(cost.bytes)  # six are not cut evenly
    local = plan(Layout.parse("R", 1), Layout.parse("S(0)", 1), (8,), (4,), 2).cost(symbolic=True)
    values = {x: {"s0": 8, "n0": 4}[x.name] for x in local.seconds.free_symbols}
    assert local.bytes == 0
    assert float(local.seconds.subs(values)) == pytest.approx(DEFAULT.launch + 4 / DEFAULT.memory)


@pytest.mark.parametrize("kind", [Link, Network, Step, Cost, Plan, Layout, Placement, Shard, Replicate, Partial])
def test_what_is_planned_with_is_frozen(kind):
    """Plans and layouts are shared by all who ask for them."""
    assert kind.__dataclass_params__.frozen


def test_steps_that_lengths_share_are_those_of_each():
    """Searches share what they listed: no length may find what is true of another one."""
    network = Network.of((2, 2, 2), DEFAULT, [(0, 1), (0, 2), (1, 2), (0, 1, 2)])
    texts, lengths = ("S(0)S(0)R", "S(0)RS(1)", "PPR", "RRR"), (4, 6, 8, 1, 16, 0, 5, 24, 2)

    def listed(text, a, b):
        return edges(text, (a, b), network, {0})

    transitions.forget()
    shared = {(text, a, b): listed(text, a, b) for text in texts for a in lengths for b in (4, 6, 16)}
    for key, found in shared.items():
        transitions.forget()
        assert listed(*key) == found, key


def test_lengths_that_divide_share_their_steps():
    """Whichever they are: all searches over one network find what one of them has found."""

    def known(*lengths):
        return Space(lengths, Network.of((2, 2)), frozenset(), ())._edges

    assert known(8, 16) is known(12, 4)
    assert known(8, 9) is known(4, 9)
    assert known(8, 9) is not known(8, 16)
    assert known(8, 9) is not known(8, 10)
    assert known(8, 0) is not known(8, 9)
