"""What torch.profiler is told of collectives, while it runs: their names, and which compiled graph begins.

    all_gather S(0)->R over dp: up.weight (train.py:25)            around an eager collective, or the start of one
    wait: all_gather S(0)->R over dp: up.weight (train.py:25)      around the wait for it
    dtensor graph: forward of MLP.forward (train.py:12)            where a compiled graph begins

The collectives of a compiled graph are operators of torch, which know no names. They come in an order that is known
when it is compiled: `GRAPHS` has their names, and `dtensor.runs.traces` writes these into a trace. Without a profiler
a collective, and a graph, ask one question of torch, which takes a tenth of a microsecond.
"""

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

GRAPH = "dtensor graph: "
"""The beginning of the name of a mark where a compiled graph begins."""

WAIT = "wait: "
"""The beginning of the name of a wait."""

MOST = 1 << 16
"""The number of names that are kept; one more, and all are forgotten."""

Described = dict[str, Any]
"""What is known of a collective: "op", "move" (placements before and after), "axis", "of" (the parameter or module),
"line" (of the user's code, else the module's class), "stage" ("forward", "backward", ...) and "graph" ("" in eager
code); and of one in a graph "carried" (the operator that starts it) and "elements" (what this rank sends; None if that
is symbolic)."""


class Graph(NamedTuple):
    """A compiled graph: its name, such as "forward of MLP.forward (train.py:12)", and its collectives in order."""

    name: str
    collectives: list[Described]


NAMES: dict[str, Described] = {}
"""The eager collectives that were named, by name."""

GRAPHS: dict[str, Graph] = {}
"""The compiled graphs that were marked, by the name of the mark."""

namer: Callable[[str, torch.Tensor, tuple[Any, ...]], Described] | None = None
"""Describes an eager collective by its operator, tensor and other arguments; `dtensor.runs.traces` sets it."""


def name_of(found: Described) -> str:
    """The name of a collective."""
    over = f" over {found['axis']}" if found["axis"] else ""
    line = f" ({found['line']})" if found["line"] else ""
    where = ": ".join(filter(None, [f"{found['op']} {found['move']}".strip() + over, found["of"] + line]))
    return where.replace(":  (", " (")


def named(op: str, x: torch.Tensor, args: tuple[Any, ...]) -> str:
    """The name of an eager collective that begins now."""
    found: Described = {"op": op, "move": "", "axis": str(args[-1]), "of": "", "line": "", "stage": "", "graph": ""}
    if namer is not None:
        found = namer(op, x, args)
    name = name_of(found)
    if len(NAMES) >= MOST:
        NAMES.clear()
    NAMES[name] = found
    return name


def mark_graph(said: str) -> None:
    """Mark in the profile that a compiled graph begins. `said` is that of `dtensor::agree`."""
    with record_function(_graph(said)):
        pass


def packed(graph: Graph) -> str:
    """A graph as short text: it is an argument of an operator, which copies it in every call."""
    return b64encode(zlib.compress(json.dumps(graph).encode(), 9)).decode()


@lru_cache(4096)
def _graph(said: str) -> str:
    _, _, text = json.loads(said)
    graph = Graph(*json.loads(zlib.decompress(b64decode(text))))
    known = [each for each in GRAPHS.values() if each.name == graph.name]
    name = GRAPH + graph.name + (f" #{len(known) + 1}" if known else "")
    GRAPHS[name] = graph
    return name


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """What intervals (begin, end) cover together, in their unit; those that end before they begin cover nothing."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


__all__ = [
    "GRAPH",
    "GRAPHS",
    "NAMES",
    "WAIT",
    "Described",
    "Graph",
    "covered",
    "mark_graph",
    "name_of",
    "named",
    "packed",
]
