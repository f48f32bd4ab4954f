"""Copies of inputs: the backward reads an input that the forward writes to as it was before."""

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..graph import ir, steps
from ..stages import MARKED, Compilation, Pass

aten: Any = torch.ops.aten


class CopyWritten(Pass):
    """Makes a joint graph read copies of the inputs that it writes to and whose values reach its backward.

    Before:

        %mul: f32[4] = aten.mul.Tensor(%x, %w)                                     forward
        %sin: f32[4] = aten.sin(%w)
        %mul_1: f32[4] = aten.mul.Tensor(%tangent, %w)                             backward
        %copy_: f32[4] = aten.copy_(%w, %sin)

    After:

        %clone: f32[4] = aten.clone(%w)
        %mul: f32[4] = aten.mul.Tensor(%x, %clone)                                 forward
        %sin: f32[4] = aten.sin(%clone)
        %mul_1: f32[4] = aten.mul.Tensor(%tangent, %clone)                         backward
        %copy_: f32[4] = aten.copy_(%w, %sin)

    Torch's partitioner (2.13) saves an input as is, even if the graph writes to it: with `(x * w * w).sum()` before
    `w.sin_()`, the gradient is computed from the sine, even on a single device. Here the partitioner only sees the
    copy, which is marked to be saved.
    """

    name = "copy_written"
    stage = "divide"
    exactness = "bitwise"
    when = "where there is a backward"
    required = "the backward would read an input after it was written to"
    anywhere = True

    def taking(self, compilation: Compilation) -> Pass | None:
        return self if compilation.graph == MARKED else None

    def __call__(self, graph: fx.Graph) -> int:
        count = 0
        for write in graph.find_nodes(op="call_function", target=aten.copy_.default):
            given = write.args[0]
            kept = {write, graph.output_node(), *[user for user in given.users if _is_copy(user)]}
            readers = [user for user in given.users if user not in kept]
            if given.op != "placeholder" or not readers or not _reaches_backward(given):
                continue
            first = next(node for node in graph.nodes if node.op != "placeholder")
            copy = ir.insert(first, aten.clone.default, (given,), like=given)
            copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            for user in readers:
                steps.take(user)
                user.replace_input_with(given, copy)
            count += 1
        return count


def _is_copy(node: fx.Node) -> bool:
    return node.target is aten.clone.default and node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE


def _reaches_backward(node: fx.Node) -> bool:
    found, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            if ir.in_backward(user):
                return True
            if user not in found:
                found.add(user)
                todo.append(user)
    return False


__all__ = ["CopyWritten"]
