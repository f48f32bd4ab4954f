"""Inputs that a joint graph writes to, and whose values its backward reads."""

import torch
from expecttest import assert_expected_inline

from dtensor.passes import CopyWritten

aten = torch.ops.aten


def joint(bench, f, *shapes):
    """The graph of `f(x, w, tangent)`; what reads the tangent belongs to the backward."""
    gm = bench.trace(f, *shapes)
    late = set()
    for node in gm.graph.nodes:
        if node.op != "output" and (node.name == "tangent_1" or not late.isdisjoint(node.all_input_nodes)):
            late.add(node)
            node.meta["partitioner_tag"] = "is_backward"
    return gm


def test_the_backward_reads_a_copy(bench):
    def f(x, w, tangent):
        out, grad = x * w, tangent * w
        aten.copy_(w, w.sin())
        return out, grad

    gm = joint(bench, f, (4,), (4,), (4,))
    assert bench.apply(CopyWritten(), gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4] = placeholder
%w_1: f32[4] = placeholder
%tangent_1: f32[4] = placeholder
%clone: f32[4] = aten.clone(%w_1)
%mul: f32[4] = aten.mul.Tensor(%x_1, %clone)
%mul_1: f32[4] = aten.mul.Tensor(%tangent_1, %clone)
%sin: f32[4] = aten.sin(%clone)
%copy_: f32[4] = aten.copy_(%w_1, %sin)
return %mul, %mul_1""",
    )


def test_an_input_that_the_backward_does_not_read_is_not_copied(bench):
    def f(x, w, tangent):
        out = x * w
        aten.copy_(w, w.sin())
        return out, tangent * x

    assert bench.keeps(CopyWritten(), joint(bench, f, (4,), (4,), (4,)))
    assert bench.keeps(CopyWritten(), joint(bench, lambda x, w, tangent: (x * w, tangent * w), (4,), (4,), (4,)))
