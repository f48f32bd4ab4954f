"""Where a node came from: the line of the user's code, and the module that computed it.

Both are read from what Dynamo and AOTAutograd leave in `node.meta`. A line of the user's code is one in neither torch
nor this library: a parallel style calls `redistribute` in its own file, but the user wants to see the layer. Where no
line is the user's, as in an `nn.Sequential`, the class of the module stands for it.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from dtensor.program.source_lines import is_users, not_generated, takes_steps

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n?(?P<code>[^\n]*)')
TORCHS = "torch.nn.modules."
MODULE = re.compile(r"^L\['\w+'\]\.?|_modules\['(\w+)'\]\.?")


@dataclass(frozen=True)
class Source:
    """A line of code: its file, its number and its text."""

    file: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


def source(node: fx.Node) -> Source | None:
    """Return the innermost line of the user's code that the node came from; None if there is none."""
    users = [m for m in FRAME.finditer(node.meta.get("stack_trace") or "") if is_users(m["file"])]
    return Source(users[-1]["file"], int(users[-1]["line"]), users[-1]["code"].strip()) if users else None


def module(node: fx.Node) -> str:
    """Return the path of the innermost module that computed the node, such as `layers.0.attention.wo`; "" if
    unknown."""
    path, _ = _innermost(node)
    return MODULE.sub(lambda m: f"{m[1]}." if m[1] else "", path).strip(".")


def module_class(node: fx.Node) -> str:
    """Return the class of the innermost module that computed the node, such as `nn.Linear`; "" if unknown."""
    _, kind = _innermost(node)
    cls = None if isinstance(kind, str) else not_generated(kind)
    whole = kind if cls is None else f"{cls.__module__}.{cls.__qualname__}"
    name = whole.rpartition(".")[2]
    return f"nn.{name}" if whole.startswith(TORCHS) else name


def place(node: fx.Node) -> str:
    """Return `train.py:12 in layers.0.wo`, or `nn.Linear in layers.0.wo` where no line is the user's, as far as it is
    known."""
    return " in ".join(filter(None, [str(source(node) or module_class(node)), module(node)]))


def is_of_optimizer(node: fx.Node) -> bool:
    """Whether the step of an optimizer called the operator."""
    return any(takes_steps(m["file"]) for m in FRAME.finditer(node.meta.get("stack_trace") or ""))


def tell_modules(graph: fx.Graph) -> None:
    """Record on nodes of the backward the module of the forward node whose gradient they compute, where torch did not.
    Both have the same sequence number."""
    forward = {node.meta.get("seq_nr"): node for node in graph.nodes if node.meta.get("nn_module_stack")}
    for node in graph.nodes:
        found = forward.get(node.meta.get("seq_nr", -1))
        if found is not None and not node.meta.get("nn_module_stack"):
            node.meta.setdefault("fwd_nn_module_stack", found.meta["nn_module_stack"])


def _innermost(node: fx.Node) -> tuple[str, Any]:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return next(reversed(stack.values()), ("", ""))


__all__ = ["Source", "is_of_optimizer", "module", "module_class", "place", "source", "tell_modules"]
