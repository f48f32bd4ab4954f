"""Where a node came from: the line of the user's code, and the module that computed it.

Both are read from what Dynamo and AOTAutograd leave in `node.meta`. A line of the user's code is one in neither torch
nor this library: a parallel style calls `redistribute` in its own file, but the user wants to see the layer.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from dtensor.mesh.source_lines import is_users

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n?(?P<code>[^\n]*)')
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
    """Return the innermost line of the user's code that the node came from, else the innermost line of any code; None
    if unknown."""
    found = list(FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not found:
        return None
    users = [m for m in found if is_users(m["file"])]
    m = (users or found)[-1]
    return Source(m["file"], int(m["line"]), m["code"].strip())


def module(node: fx.Node) -> str:
    """Return the path of the innermost module that computed the node, such as `layers.0.attention.wo`; "" if
    unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return MODULE.sub(lambda m: f"{m[1]}." if m[1] else "", paths[-1]).strip(".") if paths else ""


__all__ = ["Source", "module", "source"]
