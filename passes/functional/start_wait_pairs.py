"""Reads start/wait pairs of functional collectives: what is sent, over which group, and where it is waited for."""

from dataclasses import dataclass
from operator import floordiv, getitem, mul
from typing import Any

import torch
from torch import fx

from dtensor.job.groups import canonical, group_size

from ..graph import ir
from . import glue


@dataclass(frozen=True)
class Pair:
    """One tensor `x` sent by `start`.

    Attributes:
        start: the start, plain or coalesced.
        x: the tensor that is sent.
        started: what `wait` waits for: the start itself, or one item of a coalesced start.
        wait: the wait.
        given: the arguments between tensor and group.
        group: name of the process group.
        n: number of ranks in the group.
    """

    start: fx.Node
    x: fx.Node
    started: fx.Node
    wait: fx.Node
    given: tuple[Any, ...]
    group: str
    n: int


def pairs(start: fx.Node) -> list[Pair]:
    """Return the pairs of `start`, if each tensor is waited for exactly once and immediately, with no computation in
    between.

    Otherwise the list is empty. It is also empty if the group is not a name: where one rank compiles for all, the group
    is an input of the graph.
    """
    sent: Any = start.args[0]
    *given, group = start.args[1:]
    if start.kwargs or not isinstance(group, str):
        return []
    found: list[Pair] = []
    for x, started in _started(start, sent):
        waits = glue.readers(started)
        if len(waits) != 1 or waits[0].target is not ir.WAIT or not _at_once(start, waits[0]):
            return []
        found.append(Pair(start, x, started, waits[0], tuple(given), canonical(group), group_size(group)))
    return found


def _started(start: fx.Node, sent: Any) -> list[tuple[fx.Node, fx.Node]]:
    if isinstance(sent, fx.Node):
        return [(sent, start)]
    items: dict[Any, fx.Node] = {user.args[1]: user for user in start.users if user.target is getitem}
    return [(sent[k], items[k]) for k in sorted(items)] if len(items) == len(start.users) else []


def _at_once(start: fx.Node, wait: fx.Node) -> bool:
    """Whether no write, and nothing that computes a tensor, stands between a start and its wait."""
    node = start.next
    while node is not wait:
        computes = isinstance(ir.value(node), (torch.Tensor, tuple, list)) and not ir.aliases(node)
        if ir.mutates(node) or (computes and node.op == "call_function" and node.target not in ir.STARTS):
            return False
        node = node.next
    return True


ROWS: dict[str, Any] = {"all_gather": mul, "reduce_scatter": floordiv}
"""Collective -> the function that gives the number of rows received, from the number of rows sent and the number of
ranks."""


def tell_sizes(pair: Pair) -> None:
    """Replace queries for sizes of the received tensor by expressions on sizes of the sent tensor."""
    rows = ROWS.get(ir.STARTS[pair.start.target])
    for node in (pair.started, pair.wait):
        for ask in [user for user in node.users if user.target is glue.SIZE]:
            size = ir.insert(pair.start, glue.SIZE, (pair.x, ask.args[1]), like=ask)
            if ask.args[1] == 0 and rows is not None:
                size = ir.insert(pair.start, rows, (size, pair.n), like=ask)
            ir.redirect(ask, size)
            ask.graph.erase_node(ask)


__all__ = ["ROWS", "Pair", "pairs", "tell_sizes"]
