"""Patterns: how a line of text becomes a rule."""

import pytest
import torch

from dtensor.rules.pattern import Pattern, bind, pattern_rules, words
from dtensor.rules.rule import candidates
from dtensor.testing.rules.candidates import OneAxis, call_and_rule
from dtensor.testing.rules.candidates import case as c
from dtensor.testing.rules.candidates import floats as f

aten = torch.ops.aten


def bound(case, pattern):
    return bind(pattern, call_and_rule(case, OneAxis(2))[0])


def test_words():
    ins, outs = words("*_n, (gi)~ -> ab,")
    assert ins == (("*", "_", "n"), (("g", "i"), "~"))
    assert outs == (("a", "b"), ())
    assert words("* ->") == ((("*",),), ())


def test_leading_dimensions_broadcast():
    rule = bound(c(aten.add.Tensor, f(4, 5, 3), f(5, 1)), Pattern("*a, *_ -> *a"))
    assert rule.inputs == ((("*2",), ("*1",), ("a",)), (("*1",), ()))
    assert rule.outputs == ((("*2",), ("*1",), ("a",)),)
    assert rule.sizes == {"*2": 4, "*1": 5, "a": 3}
    rule = bound(c(aten.add.Tensor, f(4, 3), f(1, 3)), Pattern("*a, *a -> *a"))
    assert rule.inputs == ((("*1",), ("a",)), ((), ("a",)))
    rule = bound(c(aten.add.Tensor, f(1, 3), f(4, 3)), Pattern("*a, *a -> *a"))
    assert rule.inputs == (((), ("a",)), (("*1",), ("a",)))
    assert (rule.sizes, rule.blocked) == ({"*1": 4, "a": 3}, set())


def test_a_factor_in_several_dimensions_gets_its_size_by_division():
    rule = bound(
        c(aten.pixel_shuffle.default, f(12, 2, 5), 2), Pattern("(crs)hw -> c(hr)(ws)", sizes={"r": "upscale_factor"})
    )
    assert rule.sizes == {"r": 2, "h": 2, "w": 5, "c": 3, "s": 2}
    assert [x.factor for x in candidates(rule)] == [None, "h", "w", "c"]


def test_a_factor_of_given_size_one_is_left_out():
    case = c(aten.channel_shuffle.default, f(4, 6, 5), 1)
    assert bound(case, Pattern("n(gk)_ -> n(kg)_", sizes={"g": "groups"})).inputs == ((("n",), ("k",), ()),)


def test_factors_whose_sizes_nothing_tells_stay_whole():
    rule = bound(c(aten.relu.default, f(6, 4)), Pattern("(ab)c -> (ab)c"))
    assert rule.inputs == rule.outputs == (((), ("c",)),)
    assert rule.sizes == {"c": 4}
    assert [x.factor for x in candidates(rule)] == [None, "c"]


def test_arguments_that_are_none_are_passed_over():
    pattern = Pattern("nc, c, c -> nc, n_, n_", linear=({0, 2}, {1}), addends=(2,))
    case = c(aten.native_layer_norm.default, f(4, 3), [3], None, f(3), 1e-5)
    rule = bound(case, pattern)
    assert rule.inputs == ((("n",), ("c",)), (("c",),))
    assert rule.linear == (frozenset({0, 1}),)
    assert rule.addends == {1}


@pytest.mark.parametrize("text", ["ab, ab -> ab", "abcd -> ab", "ab -> ab_", "a_ -> a", "a -> a_", "_ -> __"])
def test_where_the_words_do_not_fit_everything_is_replicated(text):
    rule = bound(c(aten.relu.default, f(4, 3)), Pattern(text))
    assert (rule.inputs, rule.outputs) == ((((), ()),), (((), ()),))


def test_so_it_is_of_words_for_other_arguments_and_outputs():
    nothing = ((), ())
    for case, text, outs in (
        (c(aten.mm.default, f(4, 3), f(3, 5)), "ab -> ab", (nothing,)),
        (c(aten.cat.default, [f(4, 3), f(4, 3)]), "ab -> ab", (nothing,)),
        (c(aten.cat.default, [f(4, 3), f(4, 3)]), "ab, ab -> ab", (nothing,)),
        (c(aten.sum.default, f(4, 3)), "ab -> a", ((),)),
        (c(aten.sum.dim_IntList, f(4, 3), [0]), "ab -> ab", (((),),)),
    ):
        rule = bound(case, Pattern(text))
        assert set(rule.inputs) == {nothing}
        assert (rule.outputs, rule.sizes) == (outs, {})


def test_dimensions_that_disagree_are_not_sharded():
    for rows, inner in ((4, 3), (3, 4)):
        rule = bound(c(aten.mm.default, f(rows, inner), f(inner, 5)), Pattern("ab, ac -> bc"))
        assert rule.blocked == {"a", "b"}
    rule = bound(c(aten.mm.default, f(3, 3), f(3, 5)), Pattern("ab, ac -> ac"))
    assert rule.blocked == set()


def test_outputs_that_a_mask_leaves_out():
    x = f(2, 4, 3)
    backward = c(
        aten.convolution_backward.default,
        *(f(2, 4, 3), x, f(4, 4, 1), [4], [1], [0], [1], False, [0], 1, [False, True, False]),
    )
    rule = call_and_rule(backward, OneAxis(2))[1]
    assert rule.outputs == (None, (("o",), ("i",), ()), None)


@pytest.mark.parametrize(
    ("text", "properties", "told"),
    [
        ("ab", {}, "reads 'arguments -> outputs'"),
        ("a(b -> a", {}, r"items of a word .* got 'a\(b'"),
        ("*a~ -> a", {}, "one item for any number of dims"),
        ("a, b -> c", {}, "an output names 'c', which no argument has"),
        ("ab, b -> a", {"reduce": {"k": "sum"}}, "reduce names 'k', which no argument has"),
        ("ab, b -> a", {"reduce": {"b": "mean"}}, "'b' reduces by one of sum, avg, .* got 'mean'"),
        ("ab, b -> a", {"reduce": {"a": "sum"}}, "'a' is in every output"),
        ("ab, b -> a", {"blocked": "ac"}, "blocked names 'c'"),
        ("ab, b -> a", {"linear": ({0}, {2})}, "linear has 2; the arguments are 0 to 1"),
        ("ab, b -> a", {"unread": (-1,)}, "unread has -1"),
    ],
)
def test_typos_are_errors(text, properties, told):
    with pytest.raises(ValueError, match=told):
        Pattern(text, **properties)


def test_a_pattern_has_a_word_for_each_tensor():
    with pytest.raises(
        ValueError, match="mm: 'ab -> a' has words for 1 tensor arguments and 1 outputs; the operator has 2 and 1"
    ):
        pattern_rules({"mm": "ab -> a"})
    with pytest.raises(ValueError, match=r"mm.out: .* the operator has 3 and 1"):
        pattern_rules({"mm.out": "ab, bc -> ac"})
