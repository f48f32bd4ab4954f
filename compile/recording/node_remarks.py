"""The remark behind a node's line of text: for a collective its bytes, axis and placements, and what requested it.

    4,096 bytes over tp, P->R, explicit; train.py:12 in layers.0.wo

For other nodes, the line of the user's code, or the class of the module.
"""

from collections.abc import Mapping

from torch import fx

from dtensor.mesh.provenance import MOVE
from dtensor.passes.graph.source import module, module_class, source

from ..estimates.traffic import Sent, sent


def remark(node: fx.Node, labels: Mapping[str, str]) -> str:
    """Return the remark; "" if nothing is known. `labels` maps the names of process groups to those of axes."""
    if node.op in ("placeholder", "output", "get_attr"):
        return ""
    where, found = place(node), sent(node)
    return "; ".join(filter(None, [_said(node, found, labels), where])) if found is not None else where


def place(node: fx.Node) -> str:
    """Return `train.py:12 in layers.0.wo`, or `nn.Linear in layers.0.wo` where no line is the user's, as far as it is
    known."""
    return " in ".join(filter(None, [str(source(node) or module_class(node)), module(node)]))


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


def _said(node: fx.Node, found: Sent, labels: Mapping[str, str]) -> str:
    words = [f"{found.bytes:,} bytes over {labels.get(found.group) or found.group}"]
    if MOVE in node.meta:
        words.append(str(node.meta[MOVE]))
    return ", ".join([*words, asked(node)])


__all__ = ["asked", "place", "remark"]
