"""The names of a graph's collectives, for a profile of its runs: see `dtensor.comm.profiled`.

They are put into the graph with the agreement, so that code from caches, packages and other ranks has them, too.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dtensor.comm.profiled import Described, Graph, packed
from dtensor.job.groups import canonical
from dtensor.mesh.provenance import MOVE, PARTS, TRACED
from dtensor.program.source_lines import is_users

from ..graph import ir
from ..graph.count import describe
from ..graph.source import module, module_class, source
from ..stages import Compilation

SHOWN = 3
"""Modules that the name of a bucket lists."""


def graph_named(found: Sequence[tuple[fx.Node, str]], compilation: Compilation) -> str:
    """Return the name of a graph and a `Described` of each of its collectives, in order, as `profiled.packed` text.

    Args:
        found: the collectives of a graph, each with its group.
        compilation: what is known of the graph.
    """
    name = f"{compilation.graph} of {compilation.name}"
    return packed(Graph(name, [_described(node, group, compilation) for node, group in found]))


def _described(node: fx.Node, group: str, compilation: Compilation) -> Described:
    info = describe(node)
    target: Any = node.target
    assert info is not None, "a collective of a graph is known"
    line = source(node)
    return {
        "op": info.op,
        "move": str(node.meta.get(MOVE, "")),
        "axis": canonical(group).removeprefix("mesh."),
        "of": _modules(node, compilation),
        "line": str(line) if line is not None and is_users(line.file) else module_class(node),
        "stage": compilation.graph,
        "graph": compilation.name,
        "carried": str(target._schema.name).split("::")[1],
        "elements": _elements(node),
    }


def _modules(node: fx.Node, compilation: Compilation) -> str:
    """The module that a collective is for; of a bucket the number of tensors, and the first modules."""
    asked = [compilation.module_of(n) for n in node.meta.get(TRACED, ())]
    modules = list(dict.fromkeys([path for path in (*asked, module(node)) if path]))
    parts = len(node.meta.get(PARTS, ()))
    shown = ", ".join(modules[:SHOWN]) + (", …" if len(modules) > SHOWN else "")
    return f"{parts} tensors of {shown or 'the model'}" if parts > 1 else shown


def _elements(node: fx.Node) -> int | None:
    """The number of elements that this rank sends; None if it is symbolic."""
    sent = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
    values = [ir.value(x) for x in sent if isinstance(x, fx.Node)]
    sizes = [n for x in values if isinstance(x, torch.Tensor) for n in x.shape]
    if not all(isinstance(n, int) for n in sizes):
        return None
    return sum([math.prod(x.shape) for x in values if isinstance(x, torch.Tensor)])


__all__ = ["graph_named"]
