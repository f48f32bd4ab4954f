"""Descriptions of objects: the same in every process for what does the same, another one for what does not."""

import functools
import types

import pytest
import torch

import dtensor
from dtensor.compile.packages.identities import _constant, describe, digest, same_objects, stand_ins
from dtensor.parallel.modules.forward_wrapping import called_class


def made(number):
    def f(x):
        return x + number

    return f


def one(x, y=1):
    return [i * y for i in x if i in {1, 2, 3}]


def test_functions_by_what_they_do():
    assert describe(made(1)) == describe(made(1)) != describe(made(2))
    assert describe(one) != describe(made(1))
    renamed = types.FunctionType(one.__code__.replace(co_name="other", co_firstlineno=1, co_filename="x"), globals())
    assert digest(renamed.__code__) == digest(one.__code__)
    assert digest(one.__code__.replace(co_consts=(*one.__code__.co_consts, 1))) != digest(one.__code__)


def test_the_number_of_a_generated_class_does_not_count():
    class A(torch.nn.Linear):
        pass

    class B(torch.nn.Linear):
        pass

    a, b = called_class(A).forward.__code__, called_class(B).forward.__code__
    assert a.co_name != b.co_name
    assert digest(a) == digest(b)


def test_the_order_of_a_set_does_not_count():
    """It is another one in every process."""
    assert _constant(frozenset({"b", "a", "c"})) == "['a', 'b', 'c']"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "None"),
        (torch.float32, "torch.float32"),
        (len, "builtin builtins.len"),
        (torch, "module torch"),
        (torch.nn.Linear, "torch.nn.modules.linear.Linear"),
        (torch.ops.aten.add.Tensor, "aten.add.Tensor"),
        (str.join, "builtins.str.join"),
        ((1, "a"), "tuple(1, 'a')"),
        ({"a": 1}, "{'a': 1}"),
        (dtensor.Shard(1), "dtensor.layout.placements.Shard Shard(dim=1"),
    ],
    ids=repr,
)
def test_what_is_said(value, said):
    assert describe(value).startswith(said)


def test_what_is_only_known_by_its_identity():
    class Held:
        pass

    for value in (Held(), torch.nn.Linear(1, 1), torch.ones(2), functools.partial(one, Held())):
        with pytest.raises(ValueError, match="can be known by its identity only"):
            describe(value)


def test_a_function_that_refers_to_itself():
    def f(n):
        return f(n - 1) if n else 0

    assert "itself" in describe(f)


def test_a_method_and_a_partial():
    assert "of torch.nn.modules.linear.Linear" in describe(torch.nn.Linear(1, 1).forward)
    assert describe(functools.partial(one, y=2)) == describe(functools.partial(one, y=2))
    assert describe(functools.partial(one, y=2)) != describe(functools.partial(one, y=3))


def test_a_bound_method_is_the_same_each_time_it_is_read():
    held = torch.nn.Linear(1, 1)
    holds = same_objects([("L['x'].forward", held.forward)], {})
    assert holds({"x": held})
    assert not holds({"x": torch.nn.Linear(1, 1)})


class Thing:
    act = staticmethod(one)


def test_stand_ins():
    wanted = [("L['x'].act", describe(one))]
    found, why = stand_ins(wanted, {"x": Thing}, {})
    assert (found, why) == ([("L['x'].act", one)], "")
    assert stand_ins(wanted, {"x": 1}, {})[1].startswith("the argument x.act does not exist here")
    assert "was " in stand_ins([("L['x']", "None")], {"x": 1}, {})[1]
    holds = same_objects(found, {})
    assert holds({"x": Thing})
    assert not holds({"x": type("Other", (), {"act": staticmethod(made(1))})})
    assert not holds({})
