"""Choosing: which candidate wins on each mesh axis, at what price, and what layouts that makes."""

import contextlib
import dataclasses
import importlib
import math
import pkgutil

import pytest
import torch

from dtensor import init_device_mesh, rules
from dtensor.layout.layout import Layout
from dtensor.mesh.tensor_spec import Spec
from dtensor.prices.links import DEFAULT, seconds
from dtensor.rules.call import Call, LocalCall, Output
from dtensor.rules.choose import Choice, Weighed, choose, weigh
from dtensor.rules.notation import Rule as Notation
from dtensor.rules.plan import Plan
from dtensor.rules.rule import Candidate, Rule, candidates, position, shares_dim
from dtensor.testing import fake_ranks


@pytest.fixture
def fake_mesh():
    """`fake_mesh(2, 2)` is a mesh of which only rank 0 exists, until the next one is made."""
    with contextlib.ExitStack() as stack:

        def make(*shape):
            stack.close()
            stack.enter_context(fake_ranks(math.prod(shape)))
            return init_device_mesh("cpu", shape)

        yield make


def dims(text):
    """Dims of one factor each."""
    return tuple((f,) for f in text)


MM = Rule(
    (dims("mk"), dims("kn")),
    (dims("mn"),),
    {"m": 64, "k": 64, "n": 64},
    reduce={"k": "sum"},
    linear=(frozenset({0}), frozenset({1})),
)
SAME = Rule((dims("ab"), dims("ab")), (dims("ab"),), {"a": 64, "b": 64}, linear=(frozenset({0, 1}),))


def specs(mesh, *given, shape=(64, 64), dtype=torch.float32):
    """Operands of one shape in these layouts; a pair says another shape."""
    pairs = [g if isinstance(g, tuple) else (g, shape) for g in given]
    return [
        Spec.make(mesh, Layout.parse(t, len(s)), s, torch.empty(s, device="meta").stride(), dtype) for t, s in pairs
    ]


def chosen(rule, operands, in_place=False):
    found = choose(rule, operands, in_place)
    sides = [" ".join(["-" if x is None else x.text for x in side]) for side in (found.inputs, found.outputs)]
    return f"{sides[0]} -> {sides[1]}"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("R R", "R R -> R"),
        ("S(0) R", "S(0) R -> S(0)"),
        ("R S(1)", "R S(1) -> S(1)"),
        ("S(1) S(0)", "S(1) S(0) -> P"),
        ("P R", "P R -> P"),
        ("R P", "R P -> P"),
        ("S(1) R", "S(1) S(0) -> P"),  # a shard is cut at once
        ("R S(0)", "S(1) S(0) -> P"),
        ("P(avg) R", "P(avg) R -> P(avg)"),
        ("P(max) R", "S(0) R -> S(0)"),  # half of what an all_reduce sends
    ],
)
def test_what_moves_nothing_or_least(fake_mesh, given, expected):
    assert chosen(MM, specs(fake_mesh(4), *given.split())) == expected


def test_the_smaller_operand_is_moved(fake_mesh):
    mesh = fake_mesh(4)
    rule = Rule(MM.inputs, MM.outputs, {"m": 4096, "k": 64, "n": 64}, reduce={"k": "sum"})
    assert chosen(rule, specs(mesh, ("S(0)", (4096, 64)), ("S(1)", (64, 64)))) == "S(0) R -> S(0)"
    rule = Rule(MM.inputs, MM.outputs, {"m": 64, "k": 64, "n": 4096}, reduce={"k": "sum"})
    assert chosen(rule, specs(mesh, ("S(0)", (64, 64)), ("S(1)", (64, 4096)))) == "R S(1) -> S(1)"


def test_the_first_of_equals_is_taken(fake_mesh):
    assert chosen(MM, specs(fake_mesh(4), "S(0)", "S(1)")) == "S(0) R -> S(0)"
    assert chosen(SAME, specs(fake_mesh(4), "S(0)", "S(1)")) == "S(0) S(0) -> S(0)"


def test_padding_is_paid_for(fake_mesh):
    """A batch of one that four ranks exchange is sent four times, three heads one and a third, eight heads once."""
    mesh, whole = fake_mesh(4), frozenset("s")
    for heads, padded in ((8, 1.0), (3, 4 / 3)):
        rule = Rule((dims("bhs"),), (dims("bhs"),), {"b": 1, "h": heads, "s": 64}, blocked=whole)
        operands = specs(mesh, "S(2)", shape=(1, heads, 64))
        assert chosen(rule, operands) == "S(1) -> S(1)"
        (rows,) = weigh(rule, operands)
        found = {"".join(w.candidate.factors): w.seconds for w in rows}
        part = heads * 64 * 4 / 4
        assert found["b"] == seconds("all_to_all", 4 * part, 4, DEFAULT)
        assert found["h"] == pytest.approx(seconds("all_to_all", padded * part, 4, DEFAULT))


def test_each_axis_by_itself(fake_mesh):
    mesh = fake_mesh(2, 2)
    assert chosen(MM, specs(mesh, "S(0)R", "RS(1)")) == "S(0)R RS(1) -> S(0)S(1)"
    assert chosen(MM, specs(mesh, "S(0)S(1)", "RS(0)")) == "S(0)S(1) RS(0) -> S(0)P"
    assert chosen(MM, specs(mesh, "S(0)S(0)", "RR")) == "S(0)S(0) RR -> S(0)S(0)"
    found = choose(MM, specs(mesh, "S(0)S(0)", "RR"))
    assert found.axes == {"m": (0, 1)}
    assert choose(MM, specs(mesh, "S(0)S(1)", "RS(0)")).axes == {"m": (0,), "k": (1,)}
    assert choose(MM, specs(mesh, "RR", "RR")).axes == {}


def test_axes_keep_the_order_in_which_an_operand_is_cut(fake_mesh):
    mesh = fake_mesh(2, 2, 2)
    other = "S(0)#1S(0)#0R"
    found = choose(SAME, specs(mesh, other, other))
    assert [x.text for x in (*found.inputs, *found.outputs)] == [other] * 3
    assert found.axes == {"a": (1, 0)}
    three = "S(0)#2S(0)#1S(0)#0"
    # The operand that is cut by most of the axes says the order.
    found = choose(SAME, specs(mesh, "S(0)RR", three))
    assert found.axes == {"a": (2, 1, 0)}
    # Of two that are cut by as many axes, the first one.
    for given in ((other, "S(0)S(0)R"), ("S(0)S(0)R", other)):
        assert chosen(SAME, specs(mesh, *given)) == f"{given[0]} {given[0]} -> {given[0]}"
    assert chosen(SAME, specs(mesh, other, "S(0)S(0)S(0)")) == " ".join(["S(0)S(0)S(0)"] * 2) + " -> S(0)S(0)S(0)"


def test_prices(fake_mesh):
    """Of each candidate of a sum of a sharded and a replicated matrix, on four ranks, from the formulas of `cost`."""
    (rows,) = weigh(SAME, specs(fake_mesh(4), "S(0)", "R"))
    size = 64 * 64 * 4
    cost = {op: seconds(op, size, 4, DEFAULT) for op in ("all_gather", "shard", "partial")}
    exchange = seconds("all_to_all", size / 4, 4, DEFAULT)
    opened = cost["all_gather"] + 2 * cost["partial"]
    assert [(w.candidate.inputs, w.refused, w.chosen) for w in rows] == [
        ((None, None), "", False),
        ((0, 0), "", True),
        ((1, 1), "", False),
        (("sum", "sum"), "", False),
        (("avg", "avg"), "", False),
    ]
    expected = [cost["all_gather"], cost["shard"], exchange + cost["shard"], opened, opened]
    assert [w.seconds for w in rows] == pytest.approx(expected)


def test_prices_of_reductions(fake_mesh):
    (rows,) = weigh(SAME, specs(fake_mesh(4), "P(avg)", "P(avg)", dtype=torch.float64))
    size = 64 * 64 * 8
    reduce, scatter = (seconds(op, size, 4, DEFAULT) for op in ("all_reduce", "reduce_scatter"))
    partial = seconds("partial", size, 4, DEFAULT)
    expected = [2 * reduce, 2 * scatter, 2 * scatter, 2 * (reduce + partial), 0]
    assert [w.seconds for w in rows] == pytest.approx(expected)
    assert [w.chosen for w in rows] == [False] * 4 + [True]


def test_what_other_axes_cut_is_moved_in_part(fake_mesh):
    """On the second axis there are halves to gather, of the whole tensor on the first none."""
    first, second = weigh(SAME, specs(fake_mesh(2, 2), "S(0)S(1)", "RR"))
    half = 64 * 64 * 4 / 2
    assert first[0].seconds == pytest.approx(seconds("all_gather", half, 2, DEFAULT))
    assert second[0].seconds == pytest.approx(seconds("all_gather", half, 2, DEFAULT))
    alone, _ = weigh(SAME, specs(fake_mesh(2, 2), "S(0)R", "RR"))
    assert alone[0].seconds == pytest.approx(seconds("all_gather", 2 * half, 2, DEFAULT))


UNEVEN = "uneven: 8 does not divide 4, and the dimension is merged or split"
SPLIT = Rule(((("a", "b"),),), ((("a",), ("b",)),), {"a": 4, "b": 6})


def test_a_factor_that_shares_a_dimension_is_cut_evenly_or_not_at_all(fake_mesh):
    assert chosen(SPLIT, specs(fake_mesh(4), "S(0)", shape=(24,))) == "S(0) -> S(0)"
    (rows,) = weigh(SPLIT, specs(fake_mesh(4), "S(0)", shape=(24,)))
    assert [("".join(w.candidate.factors), w.refused) for w in rows] == [("", ""), ("a", "")]


def test_uneven_cuts_of_a_shared_dimension_are_refused(fake_mesh):
    operands = specs(fake_mesh(8), "S(0)", shape=(24,))
    assert chosen(SPLIT, operands) == "R -> R"
    (rows,) = weigh(SPLIT, operands)
    assert [("".join(w.candidate.factors), w.seconds is None, w.chosen) for w in rows] == [
        ("", False, True),
        ("a", True, False),
    ]
    assert rows[1].refused == UNEVEN


def test_two_axes_that_share_a_factor_cut_it_together(fake_mesh):
    assert chosen(SPLIT, specs(fake_mesh(2, 2), "S(0)S(0)", shape=(24,))) == "S(0)S(0) -> S(0)S(0)"
    operands = specs(fake_mesh(2, 2, 2), "S(0)S(0)S(0)", shape=(24,))
    assert chosen(SPLIT, operands) == "S(0)S(0)R -> S(0)S(0)R"
    rows = weigh(SPLIT, operands)
    assert [axis[1].refused for axis in rows] == [
        "",
        "",
        UNEVEN,
    ]
    plain = Rule((dims("a"),), (dims("a"),), {"a": 6})
    assert chosen(plain, specs(fake_mesh(4), "S(0)", shape=(6,))) == "S(0) -> S(0)"


def test_in_place_the_result_lies_as_the_operand_or_is_moved_back(fake_mesh):
    mesh = fake_mesh(4)
    assert chosen(SAME, specs(mesh, "S(0)", "R"), in_place=True) == "S(0) S(0) -> S(0)"
    assert chosen(SAME, specs(mesh, "R", "S(0)"), in_place=True) == "R R -> R"
    assert chosen(SAME, specs(mesh, "S(1)", "S(0)"), in_place=True) == "S(1) S(1) -> S(1)"
    (rows,) = weigh(SAME, specs(mesh, "R", "S(0)"), in_place=True)
    size = 64 * 64 * 4
    there_and_back = seconds("shard", size, 4, DEFAULT) + seconds("all_gather", size, 4, DEFAULT)
    assert rows[1].seconds == pytest.approx(there_and_back)
    assert rows[0].seconds == pytest.approx(seconds("all_gather", size, 4, DEFAULT))


def test_in_place_what_would_lie_otherwise_is_refused(fake_mesh):
    turned = Rule((dims("ab"),), (dims("ba"),), {"a": 64, "b": 64})
    operands = specs(fake_mesh(4), "S(0)")
    (rows,) = weigh(turned, operands, in_place=True)
    assert [w.refused.partition(":")[0] for w in rows] == ["", "in place", "in place"]
    assert chosen(turned, operands, in_place=True) == "R -> R"
    assert chosen(turned, operands) == "S(0) -> S(1)"
    # What comes after such a candidate is looked at all the same.
    last = Rule((dims("abc"),), (dims("bac"),), {"a": 64, "b": 64, "c": 64})
    assert chosen(last, specs(fake_mesh(4), "S(2)", shape=(64, 64, 64)), in_place=True) == "S(2) -> S(2)"
    # The first operand's layout is that of the result, not the others'.
    row = Rule((dims("ab"), dims("b")), (dims("ab"),), {"a": 64, "b": 64})
    given = specs(fake_mesh(4), "S(1)", ("S(0)", (64,)))
    assert chosen(row, given, in_place=True) == "S(1) S(0) -> S(1)"
    unread = Rule(turned.inputs, turned.outputs, turned.sizes, unread=frozenset({0}))
    (rows,) = weigh(unread, operands, in_place=True)
    assert [w.refused for w in rows] == ["", "", ""]


def test_what_is_not_read_is_not_moved_unless_its_shard_gives_a_shape(fake_mesh):
    mesh = fake_mesh(4)
    filled = Rule((dims("ab"),), (dims("ab"),), {"a": 64, "b": 64}, unread=frozenset({0}))
    assert chosen(filled, specs(mesh, "P")) == "P -> R"
    assert chosen(filled, specs(mesh, "S(1)")) == "S(1) -> S(1)"
    (rows,) = weigh(filled, specs(mesh, "P"))
    assert [w.seconds == 0 for w in rows] == [True, False, False]
    beside = Rule(SAME.inputs, SAME.outputs, SAME.sizes, unread=frozenset({1}))
    for given, expected in (("S(0) R", "S(0) S(0)"), ("S(1) R", "S(1) S(1)"), ("S(0) S(1)", "S(0) S(0)")):
        assert chosen(beside, specs(mesh, *given.split())) == f"{expected} -> {expected[:4]}"
    assert chosen(beside, specs(mesh, "R", "P")) == "R P -> R"
    written = Rule(SAME.inputs, SAME.outputs, SAME.sizes, unread=frozenset({0}))
    found = choose(written, specs(mesh, "P", "S(0)"), in_place=True)
    assert found.inputs[0] is found.outputs[0]
    shapeless = Rule((((), ()), dims("ab")), (dims("ab"),), {"a": 64, "b": 64}, unread=frozenset({0}))
    assert chosen(shapeless, specs(mesh, "S(0)", "S(1)")) == "S(0) S(1) -> S(1)"


def test_what_is_written_is_moved_back(fake_mesh):
    mesh = fake_mesh(4)
    rule = Rule((dims("ab"), dims("ab")), (dims("ab"),), {"a": 64, "b": 64}, written=frozenset({1}))
    (rows,) = weigh(rule, specs(mesh, "S(0)", "R"))
    size = 64 * 64 * 4
    both = seconds("shard", size, 4, DEFAULT) + seconds("all_gather", size, 4, DEFAULT)
    assert rows[1].seconds == pytest.approx(both)
    assert rows[0].seconds == pytest.approx(seconds("all_gather", size, 4, DEFAULT))


def test_outputs_that_are_no_tensors_have_no_layout(fake_mesh):
    rule = Rule((dims("a"),), (None, dims("a"), ()), {"a": 64}, whole=frozenset({2}))
    assert chosen(rule, specs(fake_mesh(4), "S(0)", shape=(64,))) == "S(0) -> - S(0) R"


# Rules.


def listed(rule):
    return [("".join(c.factors), c.inputs, c.outputs) for c in candidates(rule)]


def test_candidates_of_a_product():
    assert listed(MM) == [
        ("", (None, None), (None,)),
        ("m", (0, None), (0,)),
        ("k", (1, 0), ("sum",)),
        ("n", (None, 1), (1,)),
        ("", ("sum", None), ("sum",)),
        ("", ("avg", None), ("avg",)),
        ("", (None, "sum"), ("sum",)),
        ("", (None, "avg"), ("avg",)),
    ]


def test_what_keeps_an_order():
    rule = Rule((dims("a"), dims("a")), (dims("a"),), {"a": 4}, keeps=((frozenset({1}), {"max": "min", "min": "max"}),))
    assert listed(rule)[2:] == [("", (None, "max"), ("min",)), ("", (None, "min"), ("max",))]


def test_factors_that_cannot_be_sharded():
    sizes = {"a": 4, "b": 6}
    # Blocked; missing in an output that nothing puts together; led by another factor; in two dimensions of one tensor.
    assert listed(Rule((dims("ab"),), (dims("ab"),), sizes, blocked=frozenset("a")))[1:] == [("b", (1,), (1,))]
    assert listed(Rule((dims("ab"),), (dims("a"),), sizes))[1:] == [("a", (0,), (0,))]
    assert listed(Rule(((("a", "b"),),), ((("a",), ("b",)),), sizes))[1:] == [("a", (0,), (0,))]
    assert [c[0] for c in listed(Rule((dims("aa"), dims("b")), (dims("b"),), sizes))] == ["", "b"]


def test_outputs_that_stay_whole_and_operands_that_are_added():
    rule = Rule((dims("ab"), dims("b")), (dims("b"), ()), {"a": 4, "b": 6}, reduce={"a": "max", "b": "sum"})
    assert listed(rule)[1:] == [("a", (0, None), ("max", "max")), ("b", (1, 0), (0, "sum"))]
    added = Rule(rule.inputs, rule.outputs, rule.sizes, rule.reduce, addends=frozenset({1}), whole=frozenset({1}))
    assert listed(added)[1:] == [("a", (0, "max"), ("max", None)), ("b", (1, 0), (0, None))]
    one = Rule(rule.inputs, rule.outputs, rule.sizes, rule.reduce, whole=frozenset({(1, "b")}))
    assert listed(one)[1:] == [("a", (0, None), ("max", "max")), ("b", (1, 0), (0, None))]


def test_the_dimension_that_a_factor_leads():
    sizes = {"a": 4, "b": 6, "o": 1}
    assert position(dims("ab"), "b", sizes) == 1
    assert position(dims("ab"), "c", sizes) is None
    assert position(dims("aba"), "a", sizes) == -1
    assert position(((), ("a", "b")), "a", sizes) == 1
    assert position(((), ("a", "b")), "b", sizes) == -1
    assert position(((), ("o", "b")), "b", sizes) == 1


def test_which_factors_share_a_dimension():
    assert [shares_dim(SPLIT, f) for f in "abc"] == [True, True, False]
    assert not shares_dim(MM, "k")
    assert shares_dim(Rule((dims("a"), dims("b")), (None, (("a", "b"),)), {"a": 2, "b": 3}), "b")


def test_rules_and_choices_are_frozen():
    """Decisions are kept, and shared by all calls alike."""
    modules = [importlib.import_module(f"dtensor.rules.{m.name}") for m in pkgutil.walk_packages(rules.__path__)]
    kinds = {k for m in modules for k in vars(m).values() if isinstance(k, type) and dataclasses.is_dataclass(k)}
    kinds -= {Call}
    assert {Rule, Candidate, Choice, Weighed, Notation, Plan, Output, LocalCall} < kinds
    assert all(k.__dataclass_params__.frozen for k in kinds)
