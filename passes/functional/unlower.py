"""The inverse of `lower`: recognises the start/wait pair and the glue that were made from one operator.

`lower` records the operator and its arguments in the start it makes. Lowering them once more gives the pattern to look
for; if the graph around the start still matches it, the operator is put back. This is the only way back for uneven
shards: a slice that removes padding from a gather's result does not show whether some rank added the padding.
"""

from typing import Any

from torch import fx

from dtensor.mesh.provenance import ORIGIN

from ..graph import ir
from .lower import lowered


def unlower(start: fx.Node) -> bool:
    """Put back the operator that `start` was lowered from, if all nodes it became are still there and have no other
    users."""
    if ORIGIN not in start.meta:
        return False
    op, args = start.meta[ORIGIN]
    body = lowered(op, args)
    (out,) = [node.args[0] for node in body.nodes if node.op == "output"]
    steps = [node for node in body.nodes if node.op == "call_function"]
    (begin,) = [node for node in steps if node.target in ir.STARTS]
    match = _Match()
    if not match.unify(begin, start) or not all(match.find(step) for step in steps):
        return False
    holders = [match.known.get(node) for node in body.nodes if node.op == "placeholder"]
    inner = {match.known[step] for step in steps}
    result = match.known[out]
    after = [match.known[step] for step in steps[steps.index(begin) :]]
    if None in holders or ir.memory_order(ir.value(result)) is None:
        return False
    if any(user not in inner for node in after if node is not result for user in node.users):
        return False
    if any(ir.mutates(node) for node in _between(min(inner), result)):
        return False
    _put_back(start, op, _with_nodes(args, holders), result, inner)
    return True


def _put_back(start: fx.Node, op: str, args: tuple[Any, ...], result: fx.Node, inner: set[fx.Node]) -> None:
    new = ir.insert(start, ir.TARGETS[op], args, like=start)
    gone = sorted(inner - {result}, reverse=True)
    ir.replace(result, new)
    for node in gone:
        if not node.users:
            node.graph.erase_node(node)


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    nodes = [first]
    while nodes[-1] is not last:
        nodes.append(nodes[-1].next)
    return nodes


def _with_nodes(args: tuple[Any, ...], holders: list[Any]) -> tuple[Any, ...]:
    """`args` with the placeholder values replaced by nodes."""
    given = iter(holders)
    return tuple([arg if isinstance(arg, (int, str, list, tuple)) else next(given) for arg in args])


class _Match:
    """A mapping from the pattern's nodes to nodes of the graph."""

    def __init__(self) -> None:
        self.known: dict[fx.Node, fx.Node] = {}

    def unify(self, a: Any, b: Any) -> bool:
        """Whether `b` of the graph matches `a` of the pattern, given the mapping so far; extends the mapping."""
        if isinstance(a, (list, tuple)):
            return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(self.unify, a, b))
        if not isinstance(a, fx.Node):
            return type(a) is type(b) and a == b
        if a in self.known or not isinstance(b, fx.Node):
            return self.known.get(a) is b
        if a.op == "call_function" and (a.target is not b.target or not self.unify(a.args, b.args)):
            return False
        if a.op == "call_function" and a.kwargs != b.kwargs:
            return False
        self.known[a] = b
        return True

    def find(self, step: fx.Node) -> bool:
        """Find the node of the graph that matches `step`, a user of nodes found before."""
        if step in self.known:
            return True
        inputs = [x for x in step.all_input_nodes if x in self.known]
        users = [user for user in self.known[inputs[0]].users if user.target is step.target] if inputs else []
        return any(self.unify(step, user) for user in users)


__all__ = ["unlower"]
