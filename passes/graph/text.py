"""The canonical text of a graph, for golden tests, dumps and error messages: one line per node.

    %x: f32[4,8] = placeholder
    %h: f32[8,8] = dtensor.all_gather(%x, 0, 8, tp)
    return %h

Nodes are renamed in order of appearance, so that equal graphs print the same text whatever rewrites produced them.
Placeholders keep their names. A symbolic size prints as its expression; a group prints as its label if it has one.
Sizes are local. The placements, where known, follow them, one for each mesh axis: `f32[4,8]{S(0)R}`. A node that is
made to run after others (`ordered`) names these at its end. If `remark` returns text for a node, it follows the line:

    %h: f32[8,8]{R} = dtensor.all_gather(%x, 0, 8, tp)  # 128 bytes over tp, S(0)->R, explicit; train.py:12
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from dtensor.mesh.provenance import LAYOUT
from dtensor.torch_private.core import OpOverload

from . import ordered

REMARK = "  # "
"""Separates the line of a node from its remark."""

DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def text(
    graph: fx.Graph | fx.GraphModule,
    labels: Mapping[str, str] | None = None,
    remark: Callable[[fx.Node], str] | None = None,
) -> str:
    """Return the text of `graph`.

    Args:
        graph: the graph.
        labels: name of a process group -> the text to print for it.
        remark: returns the text to append to a node's line, or "".
    """
    graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
    printer = _Printer(graph, labels or {})
    nodes = [node for node in graph.nodes if not ordered.is_wrapper(node)]
    lines = [printer.line(node) for node in nodes]
    if remark is not None:
        said = [remark(node) for node in nodes]
        lines = [f"{line}{REMARK}{words}" if words else line for line, words in zip(lines, said, strict=True)]
    return "\n".join(lines)


def kind(val: Any) -> str:
    """Return the short type of a traced value, such as `f32[4,8]`; for a distributed tensor that of its local
    tensor."""
    if isinstance(val, torch.Tensor):
        local = getattr(val, "_local_tensor", None)
        if isinstance(local, torch.Tensor):
            return kind(local)
        name = DTYPES.get(val.dtype, str(val.dtype).removeprefix("torch."))
        return f"{name}[{','.join(str(n).replace(' ', '') for n in val.shape)}]"
    if isinstance(val, (tuple, list)):
        return f"({', '.join([kind(item) for item in val])})"
    if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"sym[{val}]".replace(" ", "")
    return "none" if val is None else type(val).__name__


def layout(node: fx.Node) -> str:
    """Return the placements of a node's result, such as `S(0)R`; "" where they are not known."""
    noted = node.meta.get(LAYOUT)
    if noted is None:
        placements = getattr(_traced(node), "placements", None) or ()
        noted = "".join([str(p).replace("P(sum)", "P") for p in placements])
    return noted


def _traced(node: fx.Node) -> Any:
    """The value of a node as AOTAutograd recorded it, else as Dynamo did."""
    return node.meta["val"] if "val" in node.meta else node.meta.get("example_value")


def target_name(target: Any) -> str:
    """Return the printed name of what a node calls: `aten.mm`, `aten.add.Tensor`, `mul`."""
    if isinstance(target, OpOverload):
        return str(target).removesuffix(".default")
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


class _Printer:
    def __init__(self, graph: fx.Graph, labels: Mapping[str, str]) -> None:
        self.labels = labels
        self.names: dict[fx.Node, str] = {}
        taken: set[str] = set()
        for node in graph.nodes:
            base = node.name if node.op == "placeholder" else _base(node)
            name, k = base, 0
            while name in taken:
                k += 1
                name = f"{base}_{k}"
            taken.add(name)
            self.names[node] = f"%{name}"

    def line(self, node: fx.Node) -> str:
        if node.op == "output":
            out = node.args[0]
            leaves = out if isinstance(out, (tuple, list)) else (out,)
            return "return " + ", ".join([self.arg(leaf) for leaf in leaves])
        placements = layout(node)
        known = kind(_traced(node)) + (f"{{{placements}}}" if placements else "")
        head = f"{self.names[node]}: {known} = "
        if node.op == "placeholder":
            return head + "placeholder"
        if node.op == "get_attr":
            return head + f"get_attr({node.target!r})"
        target, given = ordered.called(node)
        args = [self.arg(a) for a in given] + [f"{k}={self.arg(v)}" for k, v in node.kwargs.items()]
        after = f" after {self.arg(ordered.earlier(node))}" if target is not node.target else ""
        return f"{head}{target_name(target)}({', '.join(args)}){after}"

    def arg(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return self.names.get(arg, f"%{arg.name}?")  # not in the graph: what is printed may be invalid
        if isinstance(arg, str):
            return self.labels.get(arg) or repr(arg)
        if isinstance(arg, (tuple, list)):
            return f"[{', '.join([self.arg(item) for item in arg])}]"
        if isinstance(arg, torch.dtype) and arg in DTYPES:
            return DTYPES[arg]
        return str(arg).removeprefix("torch.")


def _base(node: fx.Node) -> str:
    if node.op == "get_attr":
        return str(node.target).replace(".", "_")
    target, _ = ordered.called(node)
    return target.overloadpacket.__name__.lstrip("_") if isinstance(target, OpOverload) else target_name(target)
