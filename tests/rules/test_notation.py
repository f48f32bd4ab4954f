"""The notation: how a line of text becomes the rule of a call, and that what cannot be meant is an error."""

import re
from pathlib import Path

import pytest
import torch

from dtensor.errors import OperatorError
from dtensor.rules import FAMILIES, RULES
from dtensor.rules.bind import TABLES, bind, rule_table
from dtensor.rules.families import matmul
from dtensor.rules.notation import LibraryRule, Rule, factors_of, parse
from dtensor.rules.plan import check_schema
from dtensor.rules.rule import candidates
from dtensor.testing.rules.candidates import OneAxis, call_and_rule
from dtensor.testing.rules.candidates import case as c
from dtensor.testing.rules.candidates import floats as f

aten = torch.ops.aten


def bound(case, rule, **options):
    return bind(rule if isinstance(rule, Rule) else LibraryRule(rule, **options), call_and_rule(case, OneAxis(2))[0])


def test_parsing():
    text = parse("...1n, (gi)* -> (gi)n,")
    assert text.inputs == (("...", (), ("n",)), (("g", "i"), "*"))
    assert text.outputs == ((("g", "i"), ("n",)), ())
    assert text.factors == {"...": (0, 1), "n": (1,), "g": (1,), "i": None}
    assert parse("mk,kn->mn").factors == {"m": (), "k": (0,), "n": ()}
    assert parse("aa->").twice == {"a"}
    assert factors_of("a...b") == ["a", "...", "b"]
    assert factors_of(["..."]) == ["..."]
    assert factors_of("") == []


def test_leading_dimensions_broadcast():
    rule = bound(c(aten.add.Tensor, f(4, 5, 3), f(5, 1)), "...a,...1->...a")
    assert rule.inputs == ((("...2",), ("...1",), ("a",)), (("...1",), ()))
    assert rule.outputs == ((("...2",), ("...1",), ("a",)),)
    assert rule.sizes == {"...2": 4, "...1": 5, "a": 3}
    for shapes in (((4, 3), (1, 3)), ((1, 3), (4, 3)), ((4, 3), (4, 1)), ((4, 1), (4, 3))):
        rule = bound(c(aten.add.Tensor, *(f(*s) for s in shapes)), "...a,...a->...a")
        assert rule.inputs == tuple(
            tuple(() if n == 1 else name for n, name in zip(s, (("...1",), ("a",)))) for s in shapes
        )
        assert (rule.sizes, rule.blocked) == ({"...1": 4, "a": 3}, set())


def test_factors_are_tried_in_the_order_of_the_text():
    small = bound(c(aten.add.Tensor, f(3), f(4, 3)), "...,...->...")
    assert list(small.sizes) == ["...2", "...1"]
    case = c(aten.mm.default, f(4, 3), f(3, 5))
    assert list(bound(case, "mk,kn->mn", reduce="k").sizes) == ["m", "k", "n"]
    assert list(bound(case, "mk,kn->mn", reduce="k", last="km").sizes) == ["n", "k", "m"]
    batched = c(aten.bmm.default, f(2, 4, 3), f(2, 3, 5))
    assert list(bound(batched, "...mk,...kn->...mn", reduce="k", last="m...").sizes) == ["k", "n", "m", "...1"]


def test_a_factor_in_several_dimensions_gets_its_size_by_division():
    rule = bound(c(aten.pixel_shuffle.default, f(12, 2, 5), 2), "(crs)hw->c(hr)(ws)", sizes={"r": 2, "s": 2})
    assert rule.sizes == {"r": 2, "s": 2, "h": 2, "w": 5, "c": 3}
    assert {x.factors for x in candidates(rule)} == {(), ("h",), ("w",), ("c",)}


def test_a_factor_of_given_size_one_is_left_out():
    case = c(aten.channel_shuffle.default, f(4, 6, 5), 1)
    assert bound(case, "n(gk)1->n(kg)1", sizes={"g": "groups"}).inputs == ((("n",), ("k",), ()),)


def test_arguments_that_are_none_are_passed_over():
    case = c(aten.addmm.default, f(3), f(4, 6), f(6, 3))
    rule = bound(case, "n,mk,kn->mn", linear=[("self", "mat1"), "mat2"], reduce="k", added="self")
    assert (rule.linear, rule.addends) == ((frozenset({0, 1}), frozenset({2})), {0})
    case = c(aten.native_layer_norm.default, f(4, 3), [3], None, f(3), 1e-5)
    rule = bound(
        case, "n1,c,c->n1,n1,n1", linear=[("input", "bias"), "weight"], blocked="c", home={1: "bias", 2: "weight"}
    )
    assert rule.inputs == ((("n",), ()), (("c",),))
    assert (rule.linear, rule.home) == ((frozenset({0, 1}),), {1: 1})


def test_numbers_are_no_operands():
    """A number is added once per rank, where a bias that is not there is added by none."""
    rule = bound(c(aten.add.Tensor, f(4), 2.0), "...,...->...", linear=[(0, 1)])
    assert (len(rule.inputs), rule.linear) == (1, ())
    rule = bound(c(aten.mul.Tensor, f(4), 2.0), "...,...->...", linear=(0, 1), keeps=[((0, 1), [("max", "max")])])
    assert (rule.linear, rule.keeps) == ((frozenset({0}),), ())


def test_an_empty_tensor_may_stand_for_none():
    """As an argument, such as statistics that are not used, and as a result that a kernel does not have."""
    x, w, none = f(5, 4), f(4), f(0)
    rest = (w, w, w, none, none, False, 1e-5, [True] * 3, none)
    text = "nc,nc,c,c,c,c,c,1->nc,c,c"
    rule = bound(c(aten.batch_norm_backward.default, x, x, *rest), text, reduce="n")
    assert [d == ((),) for d in rule.inputs] == [False] * 5 + [True] * 3
    rule = bound(c(aten.native_batch_norm.default, x, w, w, w, w, False, 0.1, 1e-5), "nc,c,c,c,c->nc,c,c", blocked="n")
    assert rule.outputs == ((("n",), ("c",)), ((),), ((),))
    assert rule.whole == {1, 2}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ab1->ab", r"aten.relu.default: the rule 'ab1->ab' gives self 3 dimensions, but its shape is \[4, 3\]"),
        ("ab->ab1", r"gives output 0 3 dimensions, but its shape is \[4, 3\]; correct the rule"),
        ("a1->a", r"gives output 0 1 dimensions, but"),
        ("...1ab->...", r"gives self 3 dimensions or more, but"),
        ("ab->ba", r"dimension 0 of output 0 is factor 'b', of length 3, but its length is 4"),
    ],
)
def test_what_does_not_fit_the_tensors(text, told):
    with pytest.raises(OperatorError, match=told):
        bound(c(aten.relu.default, f(4, 3)), text, **({"blocked": "ab"} if "..." in text else {"blocked": ""}))


def test_dimensions_that_disagree():
    with pytest.raises(OperatorError, match="dimension 0 of mat2 is factor 'a', of length 4, but its length is 3"):
        bound(c(aten.mm.default, f(4, 3), f(3, 5)), "ab,ac->bc", reduce="a")


def test_what_does_not_fit_the_schema():
    case = c(aten.mm.default, f(4, 3), f(3, 5))
    for text, told in (
        (
            "ab->a",
            r"has 1 operands, aten.mm.default takes 2 tensors \(self, mat2\): aten::mm\(.*; write a term for each",
        ),
        ("ab,bc->ac,ac", "has 2 outputs, aten.mm.default returns 1 tensors"),
    ):
        with pytest.raises(ValueError, match=told):
            bound(case, LibraryRule(text, reduce="b"))


def test_outputs_that_a_mask_leaves_out():
    rest = ([4], [1], [0], [1], False, [0], 1, [False, True, False])
    backward = c(aten.convolution_backward.default, f(2, 4, 3), f(2, 4, 3), f(4, 4, 1), *rest)
    rule = call_and_rule(backward, OneAxis(2))[1]
    assert rule.outputs == (None, (("o",), ("i",), ()), None)


@pytest.mark.parametrize(
    ("text", "properties", "told"),
    [
        ("ab", {}, "a rule reads 'operands->outputs'"),
        ("a->b->c", {}, "a rule reads 'operands->outputs'"),
        ("a(b->a", {}, r"a dimension is a letter, 1, .* got '\(' in 'a\(b'"),
        ("a()->a", {}, r"got '\(\)' in"),
        ("...a*->a", {}, "... or .* only once in a term"),
        ("a,b->c", {}, "factor 'c' of an output is in no operand"),
        ("ab,b->a", {"reduce": "k"}, "has no factor 'k', which reduce='k' names; its factors are a, b; write such as"),
        ("ab,b->a", {"reduce": {"b": "mean"}}, "'b' reduces by one of sum, avg, .* got 'mean'"),
        ("ab,b->a", {"reduce": "a"}, "'a' is in every output"),
        ("ab,b->a", {"blocked": "bc"}, "has no factor 'c', which blocked='bc' names"),
        ("ab->ab", {"linear": 1}, "has no argument 1; its terms are 0 to 0"),
        ("ab->ab", {"unread": (-1,)}, "has no argument -1"),
        ("ab->ab", {"keeps": [(2, [])]}, "has no argument 2"),
        ("ab->ab", {"home": {1: 0}}, "has no output 1; its outputs are 0 to 0"),
        ("ab->ab", {"whole": (2,)}, "has no output 2"),
        *[
            ("ab->ab", {name: value}, f"has no factor 'z', which {name}=")
            for name, value in (
                ("last", "az"),
                ("across", "z"),
                ("refuses_empty", "z"),
                ("whole", ((0, "z"),)),
                ("all_reduces", ("z", 1)),
                ("sizes", {"z": 3}),
            )
        ],
        ("ab,b->a", {}, r"output 0 lacks factor 'b', so it could never be sharded; write reduce='b' if .* else 1"),
        ("ab->ab,a", {"whole": (0,)}, "output 1 lacks factor 'b'"),
        ("aab->ab", {}, "factor 'a' stands twice in a term, so it could never be sharded; write 1"),
        ("...a->a", {}, "output 0 lacks factor '...'"),
        ("(ab)c->(ab)c", {}, r"nothing tells the sizes of both 'a' and 'b'; write sizes=\{'a': 'groups'\}"),
    ],
)
def test_typos_are_errors(text, properties, told):
    with pytest.raises(ValueError, match=told):
        LibraryRule(text, **properties)


def test_every_table_fits_its_operators():
    """Each rule of a table fits each overload that it is for."""
    checked = 0
    for name, rules in TABLES.items():
        packet = aten if "::" not in name else None
        operator = getattr(packet, name, None) if packet is not None else None
        for overload in [] if operator is None else operator.overloads():
            func = getattr(operator, overload)
            rule = rules.get(func._overloadname, rules.get(""))
            if rule is not None and not any(a.is_out for a in func._schema.arguments) and not func._can_decompose():
                check_schema(rule, func)
                checked += 1
    assert checked > 100


def test_a_table_names_the_overload():
    rule_table("here", {"dtensor_notation::mm.out": "a1,1c,ac->ac"})
    make = RULES.pop("dtensor_notation::mm")
    TABLES.pop("dtensor_notation::mm")
    call, _ = call_and_rule(c(aten.mm.default, f(4, 3), f(3, 5)), OneAxis(2))
    with pytest.raises(AssertionError, match=r"aten.mm.default has no rule in the table of here, which has out"):
        make(call)


def test_the_example_of_contributing_exists():
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    (row,) = re.findall(r'^ *("mm": Rule\(.*\),)$', text, re.MULTILINE)
    assert row in Path(matmul.__file__).read_text()


def test_rules_are_written_in_the_notation_only():
    """No module of a family makes a rule of the engine itself."""
    for module in FAMILIES:
        text = Path(module.__file__).read_text()
        assert not re.search(r"from \.\.rule import|from \.\. import rule", text), module.__name__
