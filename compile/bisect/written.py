"""A program as Python that builds it: one line for each node."""

import keyword
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from dtensor.mesh.provenance import ORIGIN, RECORD
from dtensor.passes.graph import ir
from dtensor.passes.graph.count import CollectiveInfo
from dtensor.torch_private.core import OpOverload

from .program import Kind, Program, ProgramStep, Ref
from .rebuild import COLLECTIVES

TAKEN = frozenset(
    ("g", "torch", "operator", "Builder", "Case", "CASE", "CollectiveInfo", "Link", "Mesh", "before", "after")
)
"""Names that have a meaning in the file."""


def function(name: str, program: Program, labels: Mapping[str, str], says: str) -> str:
    """Return the text of a function `name` that builds `program` with a `Builder`.

    Args:
        name: name of the function.
        program: the program.
        labels: name of a process group -> its label in the file.
        says: the docstring.
    """
    return "\n".join([f"def {name}(g: Builder) -> fx.Graph:", f'    """{says}"""', *_Writer(program, labels).lines()])


class _Writer:
    def __init__(self, program: Program, labels: Mapping[str, str]) -> None:
        self.program, self.labels = program, labels
        self.names = _variables([s.name for s in program.steps])

    def lines(self) -> Iterable[str]:
        """The lines of the body: inputs first."""
        for step in sorted(self.program.steps, key=lambda s: s.target is not None):
            remark = f"  # {step.origin}" if step.origin else ""
            yield f"    {self.names[step.name]} = {self.made(step)}{remark}"
        yield f"    return g.output({', '.join([self.literal(x) for x in self.program.outputs])})"

    def made(self, step: ProgramStep) -> str:
        """The call of the builder."""
        meta = {key: self._labelled(key, item) for key, item in step.meta.items()}
        if step.target is None:
            return f"g.input({step.name!r}, {self.tensor(step.kind)}{f', meta={self.literal(meta)}' if meta else ''})"
        args = step.args
        if step.target in COLLECTIVES:
            args = (*args[:-1], self.labels.get(args[-1], args[-1]))
        given = [repr(step.name), target(step.target), self.literal(args)]
        rest = [self.literal(dict(step.kwargs)), self.literal(meta)]
        while rest and rest[-1] == "{}":
            rest.pop()
        return f"g.call({', '.join([*given, *rest])})"

    def _labelled(self, key: str, item: Any) -> Any:
        if key == RECORD and isinstance(item, CollectiveInfo):
            return replace(item, group=self.labels.get(item.group, item.group))
        if key == ORIGIN:
            op, args = item
            return op, (*args[:-1], self.labels.get(args[-1], args[-1]))
        return item

    def tensor(self, kind: Kind) -> str:
        """The arguments that describe a tensor."""
        plain = tuple(ir.dense_strides(kind.shape)) == kind.strides
        parts = [str(list(kind.shape))]
        if kind.dtype != torch.float32 or not plain:
            parts.append(str(kind.dtype))
        return ", ".join(parts if plain else [*parts, str(list(kind.strides))])

    def literal(self, x: Any) -> str:
        """An expression for an argument."""
        if isinstance(x, Ref):
            return self.names[x.name]
        if isinstance(x, Kind):
            return f"g.fake({self.tensor(x)})"
        if isinstance(x, tuple):
            return f"({', '.join(map(self.literal, x))}{',' if len(x) == 1 else ''})"
        if isinstance(x, list):
            return f"[{', '.join(map(self.literal, x))}]"
        if isinstance(x, dict):
            return "{" + ", ".join([f"{key!r}: {self.literal(item)}" for key, item in x.items()]) + "}"
        if isinstance(x, float) and not math.isfinite(x):
            return f"float({str(x)!r})"
        if isinstance(x, torch.device):
            return f"torch.device({str(x)!r})"
        return repr(x)


def target(x: Any) -> str:
    """Return an expression for an operator."""
    if isinstance(x, OpOverload):
        name = str(x) if "." in str(x).split("::")[-1] else f"{x}.default"
        return f"torch.ops.{name}"
    return f"operator.{x.__name__}"


def _variables(names: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        plain = name if name.isidentifier() and not keyword.iskeyword(name) else f"x_{len(found)}"
        while plain in TAKEN or plain in found.values():
            plain += "_"
        found[name] = plain
    return found


__all__ = ["function", "target"]
