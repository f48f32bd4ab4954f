"""The remark behind a node's line of text: for a collective its bytes, axis and placements, and what requested it.

    4,096 bytes over tp, P->R, explicit; train.py:12 in layers.0.wo

For other nodes, the line of the user's code, or the class of the module.
"""

from collections.abc import Mapping
from typing import Any

from torch import fx

from dtensor.mesh.provenance import MOVE, PARAMETER, RECORD
from dtensor.passes.graph import ir
from dtensor.passes.graph.ordered import called
from dtensor.passes.graph.source import place

from ..estimates.traffic import Sent, is_wait, sent


def remark(node: fx.Node, labels: Mapping[str, str]) -> str:
    """Return the remark; "" if nothing is known. `labels` maps the names of process groups to those of axes."""
    if node.op in ("placeholder", "output", "get_attr"):
        return ""
    where, found = place(node), sent(node)
    return "; ".join(filter(None, [_said(node, found, labels), where])) if found is not None else where


def asked(node: fx.Node) -> str:
    """Whether the program requested a collective itself ("explicit") or an operator needed its operand in another
    layout ("implicit"). For nodes not traced from DTensors of this library, the call in Dynamo's graph decides;
    "unknown" without one."""
    if MOVE in node.meta:
        return "explicit" if node.meta[MOVE].asked else "implicit"
    calls = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack") or ()
    said = [f"{name} {getattr(target, '__name__', target)}" for name, target in calls]
    if not said:
        return "unknown"
    return "explicit" if any(word in said[-1] for word in EXPLICIT) else "implicit"


EXPLICIT = (
    "redistribute",
    "full_tensor",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "permute_tensor",
    "wait_tensor",
    "broadcast",
)
"""Parts of the names of calls by which a program requests communication."""


READERS = 4
"""The most operators before or after a collective that are named."""

CARRYING = frozenset(("cat", "stack", "split", "split_with_sizes", "clone", "_to_copy", "constant_pad_nd", "getitem"))
"""Operators, besides views, that pass on what a collective sends or gives: they join its parts, or convert them."""

REDUCING = frozenset(("sum", "amax", "amin", "prod", "div", "mul"))
"""Operators that belong to a reduce-scatter, or an average: ranks exchange the parts and reduce them, and divide."""


def readers(node: fx.Node) -> tuple[str, ...]:
    """Return the names of the first operators that compute with the result of a collective, at most `READERS`; "output"
    where the graph returns it."""
    record = node.meta.get(RECORD)
    reduces = record is not None and (record.op == "reduce_scatter" or record.reduce_op == "avg")
    carrying = CARRYING | REDUCING if reduces else CARRYING
    found, todo, seen = dict[str, None](), [node], {node}
    while todo and len(found) < READERS:
        for user in todo.pop(0).users:
            if user in seen:
                continue
            seen.add(user)
            name = _name(user)
            if is_wait(called(user)[0]) or name in carrying or (user.op == "call_function" and ir.aliases(user)):
                todo.append(user)
            else:
                found[name] = None
    return tuple(found)


def makers(node: fx.Node) -> tuple[str, ...]:
    """Return the names of the operators that computed what a collective sends, at most `READERS`; "" for inputs."""
    found, todo, seen = dict[str, None](), [node], {node}
    while todo and len(found) < READERS:
        for x in todo.pop(0).all_input_nodes:
            if x in seen:
                continue
            seen.add(x)
            if _name(x) in CARRYING or (x.op == "call_function" and ir.aliases(x)):
                todo.append(x)
            else:
                found[_name(x)] = None
    return tuple(found)


def sends_parameter(node: fx.Node) -> bool:
    """Whether what a collective sends is a parameter, or several of them."""
    todo, seen = list(node.all_input_nodes), set[fx.Node]()
    while todo:
        x = todo.pop()
        if x.op == "placeholder" and x not in seen and PARAMETER not in x.meta and _is_saved(x):
            return x.name.startswith("primals")
        if PARAMETER in x.meta:
            return True
        if x not in seen and (ir.aliases(x) or _name(x) in CARRYING):
            todo += x.all_input_nodes
        seen.add(x)
    return False


def _is_saved(x: fx.Node) -> bool:
    return any(n.name.startswith("tangents") for n in x.graph.find_nodes(op="placeholder"))


def _name(node: fx.Node) -> str:
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    return node.op if node.op == "output" else schema.name.split("::")[1] if schema else getattr(target, "__name__", "")


def _said(node: fx.Node, found: Sent, labels: Mapping[str, str]) -> str:
    words = [f"{found.bytes:,} bytes over {labels.get(found.group) or found.group}"]
    if MOVE in node.meta:
        words.append(str(node.meta[MOVE]))
    return ", ".join([*words, asked(node)])


__all__ = ["asked", "makers", "readers", "remark", "sends_parameter"]
