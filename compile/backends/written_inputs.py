"""Lets the backward read an input that the forward writes to as it was before.

Torch's partitioner (2.13) saves an input as is, even if the graph writes to it: with `(x * w * w).sum()` before
`w.sin_()`, the gradient is computed from the sine, even on a single device. Here such an input is copied first, and the
partitioner only sees the copy.
"""

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from dtensor.passes.graph import ir

aten: Any = torch.ops.aten


def copy_first(graph: fx.Graph) -> int:
    """Make a joint graph read copies of the inputs that it writes to and whose values reach its backward, in place.

    Returns:
        The number of inputs that were copied.
    """
    count = 0
    for write in graph.find_nodes(op="call_function", target=aten.copy_.default):
        given = write.args[0]
        if given.op != "placeholder" or not _reaches_backward(given):
            continue
        first = next(node for node in graph.nodes if node.op != "placeholder")
        copy = ir.insert(first, aten.clone.default, (given,), like=given)
        copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        kept = (write, copy, graph.output_node())
        for user in [user for user in given.users if user not in kept]:
            user.replace_input_with(given, copy)
        count += 1
    return count


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


__all__ = ["copy_first"]
