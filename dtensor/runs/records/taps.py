"""Taps: the operators by which a compiled graph hands values to the recorder.

    dtensor::record_begin   the graph starts; operators that run until its end are its own
    dtensor::record         a value of the graph, or an input of it
    dtensor::record_end

`dtensor.passes.borders.record` puts them in, after all passes. Each value has a `Site`, which is what is known
of it when the graph is compiled; its number is in the graph. All of them write to one tensor, which keeps them in the
code and in order.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ...comm.start_collectives import ANY_ORDER
from ...mesh.operator_library import library
from ...mesh.tensor_spec import Spec
from .recorder import Recorder, recorder


@dataclass(frozen=True)
class Site:
    """A value of a compiled graph.

    Attributes:
        phase: "forward" or "backward".
        module: path of the module, relative to what was compiled.
        line: line of the user's code.
        op: name of the operator.
        number: which of its results.
        kind: "op", "move" or "input".
        spec: how the value is distributed; None for a plain tensor.
        inputs: the sites that it was computed from.
    """

    phase: str
    module: str
    line: str
    op: str
    number: int
    kind: str
    spec: Spec | None
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """A compiled graph: what it is a part of, and "forward", "backward" or "inference"."""

    frame: object
    direction: str


UNNUMBERED = -1
"""The number of a result if it is unknown which of several it is."""

SITES: list[Site] = []
"""All sites of this process, by number."""
GRAPHS: list[Graph] = []
"""All graphs with taps, by number."""


def _begin(token: torch.Tensor, graph: int) -> None:
    here = recorder()
    if here is None:
        return
    of = GRAPHS[graph]
    if of.direction == "backward":
        waiting = here.prefixes.get(id(of.frame))
        here.prefix = waiting.pop() if waiting else ""
    else:
        here.prefix = here.places.module()
        if of.direction == "forward":
            here.prefixes.setdefault(id(of.frame), []).append(here.prefix)
    here.inside = True


def _end(token: torch.Tensor) -> None:
    here = recorder()
    if here is not None:
        here.inside = False


def _record(x: torch.Tensor, token: torch.Tensor, number: int) -> None:
    here = recorder()
    if here is None or not here.open:
        return
    site = SITES[number]
    given: Any = x if site.spec is None else here.wrapped(x, site.spec)
    with torch.no_grad():
        here.sites[number] = _known(here, given, site) if site.kind == "input" else _computed(here, given, site)


def _known(here: Recorder, x: Any, site: Site) -> int:
    return here.known(x, here.at(site.phase, site.module, site.line), "a compiled graph", site.number)


def _computed(here: Recorder, x: Any, site: Site) -> int:
    place = here.at(site.phase, site.module, site.line)
    inputs = list(dict.fromkeys([here.sites[i] for i in site.inputs if i in here.sites]))
    return here.value(x, place.phase, place.module, place.line, site.op, site.number, inputs, kind=site.kind)


def site(new: Site) -> int:
    """Register a site; returns its number."""
    SITES.append(new)
    return len(SITES) - 1


def graph(frame: object, direction: str) -> int:
    """Register a graph; returns its number."""
    GRAPHS.append(Graph(frame, direction))
    return len(GRAPHS) - 1


library.define("record_begin(Tensor(a!) token, int graph) -> ()")
library.define("record(Tensor x, Tensor(a!) token, int site) -> ()", tags=ANY_ORDER)
library.define("record_end(Tensor(a!) token) -> ()")
for _name, _run in (("record_begin", _begin), ("record", _record), ("record_end", _end)):
    library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dtensor::{_name}", lambda *given: None, lib=library)

__all__ = ["GRAPHS", "SITES", "UNNUMBERED", "Graph", "Site", "graph", "site"]
