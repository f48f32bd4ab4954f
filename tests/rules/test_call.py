"""Calls as rules see them: arguments by name, operands by position, outputs that are wanted, and names of rules."""

import pytest
import torch

from dtensor.layout.layout import Layout
from dtensor.mesh.tensor_spec import Spec
from dtensor.rules import lookup
from dtensor.rules.bind import rule_for
from dtensor.rules.call import (
    RULES,
    Call,
    LocalCall,
    Output,
    argument,
    base_name,
    is_in_place,
    positions,
    replaced,
    shape_for,
)
from dtensor.rules.families.pointwise import pointwise

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("func", "name"),
    [
        (aten.add.Tensor, "aten::add"),
        (aten.add_.Tensor, "aten::add"),
        (aten._foreach_add_.List, "aten::add"),
        (aten._foreach_addcdiv.Scalar, "aten::addcdiv"),
        (aten.copy_.default, "aten::copy"),
        (aten.transpose_copy.int, "aten::transpose"),
        (aten.view_copy.default, "aten::view_copy"),  # it has a rule by that name
        (aten._to_copy.default, "aten::_to_copy"),
        (aten.__and__.Tensor, "aten::__and__"),
    ],
)
def test_names_of_rules(func, name):
    assert base_name(func) == name


def test_what_is_in_place():
    assert is_in_place(aten.add_.Tensor)
    assert not is_in_place(aten.add.Tensor)
    assert not is_in_place(aten.add.out)
    assert not is_in_place(aten.__and__.Tensor)


def test_positions():
    found = positions(aten.add.Tensor)
    assert found == {"self": (0, None, False), "other": (1, None, False), "alpha": (2, 1, True)}
    assert positions(aten.add.Tensor) is found


def test_arguments_by_name():
    func = aten.native_layer_norm.default
    args = ("x", [3], "w")
    assert argument(func, args, {"bias": "b"}, "weight") == "w"
    assert argument(func, args, {"bias": "b"}, "bias") == "b"
    assert argument(aten.add.Tensor, ("x", "y"), {}, "alpha") == 1
    assert argument(aten.add.Tensor, ("x", "y"), {"alpha": 3}, "alpha") == 3
    with pytest.raises(KeyError):
        argument(func, args, {}, "alpha")


def test_changed_arguments():
    func = aten.sum.dim_IntList  # (self, dim, keepdim=False, *, dtype=None)
    assert replaced(func, ("x", [0]), {}, [("dim", [1])]) == (("x", [1]), {})
    assert replaced(func, ("x", [0]), {}, [("keepdim", True)]) == (("x", [0], True), {})
    assert replaced(func, ("x", [0]), {}, [("dtype", 7)]) == (("x", [0]), {"dtype": 7})
    assert replaced(func, ("x",), {"dim": [0]}, [("dim", [2])]) == (("x",), {"dim": [2]})
    assert replaced(func, ("x", [0]), {}, [("dtype", 7), ("dim", [1])]) == (("x", [1]), {"dtype": 7})
    assert replaced(func, ("x",), {"dim": [0]}, [("dim", [2]), ("keepdim", True)]) == (("x", None, True), {"dim": [2]})
    # Filled up with defaults as far as needed.
    pool = (
        aten.max_pool2d_with_indices.default
    )  # (self, kernel_size, stride=[], padding=0, dilation=1, ceil_mode=False)
    filled, keywords = replaced(pool, ("x", [2]), {}, [("dilation", 5)])
    assert keywords == {}
    assert [filled[0], filled[1], list(filled[2]), filled[4]] == ["x", [2], [], 5]
    assert len(filled) == 5
    given, kept = ("x", [0]), {"dtype": 1}
    replaced(func, given, kept, [("dim", [9]), ("dtype", 2)])
    assert (given, kept) == (("x", [0]), {"dtype": 1})


def test_a_local_call_runs_with_some_arguments_changed():
    x = torch.arange(6.0).reshape(2, 3)
    call = LocalCall(aten.sum.dim_IntList, (x, [0]), {}, None, None, {}, ())
    assert call["keepdim"] is False
    assert call.run().tolist() == [3.0, 5.0, 7.0]
    assert call.run(dim=[1], keepdim=True).tolist() == [[3.0], [12.0]]


def spec(*shape):
    return Spec(None, Layout.make(1, ((),) * len(shape), ()), shape, (1,) * len(shape), torch.float32, True)


def test_a_call_by_name():
    call = Call(aten.add_.Tensor, (spec(2), 3), {}, [spec(2)])
    assert (call.name, call["alpha"], call["other"]) == ("add", 1, 3)
    assert call.has("alpha")
    assert not call.has("beta")


def test_outputs_that_are_wanted():
    made = tuple(Output((n,), (1,), torch.float32) for n in (1, 2, 3))
    assert [o.ndim for o in made] == [1, 1, 1]
    assert Output((2, 3), (3, 1), torch.float32).ndim == 2
    args = (spec(2), spec(2), [3], spec(2), spec(2), None, None)
    backward = aten.native_layer_norm_backward.default
    for mask in ([True, False, True], [False, True, False]):
        call = Call(backward, (*args, mask), {}, [], made)
        assert call.wanted == tuple(o if m else None for o, m in zip(made, mask))
    assert Call(aten.add.Tensor, (1, 2), {}, [], made).wanted == made
    assert Call(backward, (*args, [False]), {}, [], made).wanted == (None, *made[1:])


def test_rules_by_overload_by_name_and_by_tag(monkeypatch):
    def one(call):
        raise NotImplementedError

    assert lookup.rule_of(aten.mm.default) is RULES["aten::mm"]
    assert lookup.rule_of(aten.sgn.default) is pointwise
    assert lookup.rule_of(aten.sgn_.default) is pointwise
    assert lookup.rule_of(aten.nonzero.default) is None
    assert lookup.rule_of(torch.ops.prims.sin.default) is None
    monkeypatch.setitem(RULES, "aten.mm.default", one)
    assert lookup.rule_of(aten.mm.default) is one
    assert lookup.rule_of(aten.mm.out) is not one


def test_registering(monkeypatch):
    monkeypatch.setattr("dtensor.rules.bind.RULES", {})
    monkeypatch.setattr("dtensor.rules.call.SHAPES", {})
    from dtensor.rules import bind, call

    @rule_for("one", "mine::two")
    def rule(call):
        raise NotImplementedError

    @shape_for("three")
    def shape(x):
        raise NotImplementedError

    assert {"aten::one": rule, "mine::two": rule} == bind.RULES
    assert {"aten::three": shape} == call.SHAPES


def test_values_are_frozen():
    with pytest.raises(AttributeError):
        Output((1,), (1,), torch.float32).shape = ()
