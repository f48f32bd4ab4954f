"""Builds a graph node by node, with the values that the passes read; the scripts that a bisection leaves use it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from dtensor.mesh.provenance import ORIGIN, RECORD
from dtensor.passes.graph import ir
from dtensor.passes.graph.count import CollectiveInfo
from dtensor.torch_private.core import FakeTensorMode

COLLECTIVES = frozenset((*ir.TARGETS.values(), *ir.STARTS))


class Builder:
    """Builds one graph of static sizes on the CPU.

    Args:
        groups: label of a process group -> its name in this process; the graph is written with labels. Names that it
            does not contain stay as they are.
    """

    def __init__(self, groups: Mapping[str, str] | None = None) -> None:
        self.graph: fx.Graph = fx.Graph()
        self.groups: Mapping[str, str] = groups or {}
        self.mode: FakeTensorMode = FakeTensorMode()

    def input(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        strides: Sequence[int] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> fx.Node:
        """Add an input tensor; `strides` are those of a contiguous tensor unless given."""
        node = self.graph.placeholder(name)
        node.meta.update(self._noted(meta), val=self.fake(shape, dtype, strides))
        return node

    def call(
        self,
        name: str,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> fx.Node:
        """Add the call `target(*args, **kwargs)` and compute what kind of value it gives.

        Raises:
            Exception: whatever the operator raises for such arguments.
        """
        if target in COLLECTIVES:
            args = (*args[:-1], self._group(args[-1]))
        node = self.graph.create_node("call_function", target, args, dict(kwargs or {}), name=name)
        node.meta.update(self._noted(meta))
        with ir.inside(self.mode):
            node.meta["val"] = ir.evaluated(node)
        return node

    def output(self, *values: Any) -> fx.Graph:
        """Let the graph return `values`, and return the graph."""
        self.graph.output(tuple(values))
        return self.graph

    def fake(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, strides: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return a tensor without data, such as the notes of a node hold."""
        with self.mode:
            return torch.empty_strided(tuple(shape), tuple(strides or ir.dense_strides(shape)), dtype=dtype)

    def _noted(self, meta: Mapping[str, Any] | None) -> dict[str, Any]:
        noted = dict(meta or {})
        info, origin = noted.get(RECORD), noted.get(ORIGIN)
        if isinstance(info, CollectiveInfo):
            noted[RECORD] = replace(info, group=self._group(info.group))
        if origin is not None:
            op, args = origin
            noted[ORIGIN] = op, (*args[:-1], self._group(args[-1]))
        return noted

    def _group(self, label: str) -> str:
        return self.groups.get(label, label)


__all__ = ["COLLECTIVES", "Builder"]
