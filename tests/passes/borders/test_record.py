"""The operators by which a compiled graph is recorded; `tests/runs/records` has what is recorded."""

import torch
from expecttest import assert_expected_inline
from torch import nn

from dtensor.passes import Compilation, Record
from dtensor.passes.stages import INFERENCE


class Noted:
    """Taps that note what they are told."""

    def __init__(self):
        self.sites = []

    def graph(self, direction):
        return 7

    def site(self, *known):
        self.sites.append(known)
        return len(self.sites) - 1

    def holds_new_value(self, op):
        return op != "aten::detach"


def program(bench):
    return bench.trace(lambda x: (x * 2).detach().relu(), (4,))


def test_inputs_and_results_are_tapped(bench):
    gm, taps = program(bench), Noted()
    assert bench.apply(Record(taps), gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4] = placeholder
%empty: f32[1] = aten.empty.memory_format([1])
%record_begin: none = dtensor.record_begin(%empty, 7)
%record: none = dtensor.record(%x_1, %empty, 0)
%mul: f32[4] = aten.mul.Tensor(%x_1, 2)
%record_1: none = dtensor.record(%mul, %empty, 1)
%detach: f32[4] = aten.detach(%mul)
%relu: f32[4] = aten.relu(%detach)
%record_2: none = dtensor.record(%relu, %empty, 2)
%record_end: none = dtensor.record_end(%empty)
return %relu""",
    )
    assert [(site[0], site[3], site[5], site[7]) for site in taps.sites] == [
        ("forward", "input", "input", ()),
        ("forward", "aten::mul", "op", (0,)),
        ("forward", "aten::relu", "op", (1,)),
    ]


def test_phases_of_a_whole_step(bench):
    """What Dynamo traced of a backward, what an optimizer called, and what comes between, as eager mode has it."""
    gm, taps = bench.trace(lambda x: (x * 2).relu().sin().cos(), (4,)), Noted()
    _, mul, relu, sin, cos, _ = gm.graph.nodes
    for node in (relu, sin, cos):
        node.meta["partitioner_tag"] = "is_backward"
    mul.meta["nn_module_stack"] = {"a": ("L['self'].up", nn.Linear)}
    relu.meta["autograd_backward"] = True
    cos.meta["stack_trace"] = f'  File "{torch.optim.__file__}", line 1, in sgd\n    param.add_(grad)\n'
    Record(taps, INFERENCE)(gm.graph)
    assert [(site[0], site[1], site[3]) for site in taps.sites[1:]] == [
        ("forward", "up", "aten::mul"),
        ("backward", "", "aten::relu"),
        ("forward", "", "aten::sin"),
        ("optimizer", "", "aten::cos"),
    ]


def test_without_a_recorder_nothing_is_tapped(bench):
    assert bench.keeps(Record(), program(bench))
    assert Record().taking(Compilation("forward")) is None
    assert Record().taking(Compilation("forward", within=True, taps=Noted())) is None
