"""Puts the traced kernel of an operator in the place of its call."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import fx

from dtensor.torch_private.core import make_fx
from dtensor.torch_private.symbolic_sizes import sizes_before_strides

from ..graph import ir


class Bodies:
    """Traced kernels, each once for all calls that are alike."""

    def __init__(self) -> None:
        self.known: dict[Hashable, fx.Graph] = {}

    def inline(self, node: fx.Node, kernel: Callable[..., torch.Tensor]) -> list[fx.Node]:
        """Replace `node` by its kernel; returns the new nodes, which have the provenance of `node`."""
        given = iter([x for x in node.args if isinstance(x, fx.Node)])
        args = tuple([ir.value(x) if isinstance(x, fx.Node) else x for x in node.args])
        likeness = kernel, ir.likeness(args)
        before = self.known.get(likeness)
        # A kernel traced on symbolic sizes has results whose sizes depend on these symbols.
        body = traced(kernel, args) if before is None or not _is_static(args) else before
        self.known[likeness] = body
        known: dict[fx.Node, Any] = {}
        made: list[fx.Node] = []
        origin = ir.provenance(node)
        with ir.inside(ir.fake_mode(node)), node.graph.inserting_before(node):
            for step in body.nodes:
                if step.op == "placeholder":
                    known[step] = next(given)
                elif step.op != "output":
                    new = known[step] = node.graph.node_copy(step, known.__getitem__)
                    # Two calls must not share a value: others recognise shared memory by it.
                    new.meta = {**origin, "val": ir.evaluated(new) if body is before else ir.value(step)}
                    made.append(new)
        ir.replace(node, known[body.output_node().args[0]])  # pyright: ignore
        return made


def _is_static(args: tuple[Any, ...]) -> bool:
    lengths = [n for x in args if isinstance(x, torch.Tensor) for n in x.shape]
    return not any(isinstance(n, torch.SymInt) for n in (*args, *lengths))


def traced(kernel: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> fx.Graph:
    """Trace a kernel on `args`. Its placeholders are the tensors and symbolic sizes among them, in order."""
    values: list[Any] = [arg for arg in args if isinstance(arg, (torch.Tensor, torch.SymInt))]
    with values[0].fake_mode:
        return make_fx(partial(_call, kernel, args))(*values).graph


def _call(kernel: Any, args: tuple[Any, ...], *values: Any) -> Any:
    """Call `kernel` on `args`, with `values` in place of the tensors and symbolic sizes."""
    sizes_before_strides(values)
    given = iter(values)
    return kernel(*[next(given) if isinstance(arg, (torch.Tensor, torch.SymInt)) else arg for arg in args])


__all__ = ["Bodies", "traced"]
