"""The steps of a pass: each change of what a graph computes, or of the order in which it does, counted.

Passes take every step through `ir.redirect`, `node_order.rearrange` and `ordered.after`, which call `take`. Inside
`limited(k)` a pass is stopped before its step k + 1. The graph is then the one after k steps, with calls without users
left in it, so a wrong step can be found by bisection, whatever the pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import fx


class Stopped(Exception):
    """A pass was stopped before a step beyond the limit. Passes must let it through."""


@dataclass
class Steps:
    """The steps that were taken.

    Attributes:
        most: number of steps after which the pass is stopped; None for no limit.
        taken: the name of the node that each step replaced or moved, in order.
    """

    most: int | None = None
    taken: list[str] = field(default_factory=list[str])


_current: ContextVar[Steps | None] = ContextVar("dtensor_steps", default=None)


@contextmanager
def limited(most: int | None = None) -> Iterator[Steps]:
    """Count the steps that passes take in this context, and stop a pass after `most` of them.

    Raises:
        Stopped: inside, by the pass, before its step `most` + 1.
    """
    steps = Steps(most)
    token = _current.set(steps)
    try:
        yield steps
    finally:
        _current.reset(token)


def take(node: fx.Node) -> None:
    """Count a step that replaces or moves `node`; called before it is taken.

    Raises:
        Stopped: the step is beyond the limit.
    """
    steps = _current.get()
    if steps is None:
        return
    if steps.most is not None and len(steps.taken) >= steps.most:
        raise Stopped
    steps.taken.append(node.name)


__all__ = ["Steps", "Stopped", "limited", "take"]
