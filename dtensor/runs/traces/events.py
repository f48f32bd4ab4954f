"""Rewrites the trace of one rank: names for collectives, a slice for each compiled graph, a row of communication.

    torch.profiler's events -> slices of each thread, nested -> named -> events in Chrome's format

The operators that start a collective in a compiled graph are those of torch, without a name, and a trace does not show
their groups. They are found by the order that was known when the graph was compiled: after the mark of a graph, each
start takes the first name that is left of the same operator and number of elements, and each wait belongs to the first
start that it can be for. (So an order that Inductor changed mixes up collectives of one kind and size at most.)

Slices of a thread nest. Those that do not (gloo's, which last until a message has arrived) have rows of their own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Any

from ...comm.profiled import WAIT, Described, Graph, covered, name_of

Event = dict[str, Any]

AGREE = "dtensor::agree"
"""The operator in front of a compiled graph, in which the graph's mark is, in modes of a profiler more than once."""

COMPILES = " (dynamo_timed)"
"""The end of torch's names of what happens while code is compiled, when nothing is sent."""

STARTS = {
    "dtensor::all_gather_start": "all_gather",
    "dtensor::all_to_all_start": "all_to_all",
    "dtensor::all_reduce_start": "all_reduce",
    "dtensor::collective_permute_start": "collective_permute",
    **{
        f"_c10d_functional::{name}{variant}": op
        for name, op in (
            ("all_gather_into_tensor", "all_gather"),
            ("reduce_scatter_tensor", "reduce_scatter"),
            ("all_reduce", "all_reduce"),
            ("all_to_all_single", "all_to_all"),
            ("broadcast", "broadcast"),
        )
        for variant in ("", "_", "_out", "_coalesced", "_coalesced_", "_coalesced_out")
    },
}
"""Operators that start a collective -> the collective."""

WAITS = ("_c10d_functional::wait_tensor", "dtensor::wait_for_all")
VARIANTS = ("_out", "_", "_coalesced")

SLACK = 0.002
"""Microseconds by which torch's rounded times may overlap."""

FIRST_ROW = 1 << 30
"""The number of the first row (thread) that is not one of the program's."""

STEP = "dtensor: "
"""The beginning of the name of the mark at the end of a step."""

COLLECTIVE, GRAPH = "collective", "graph"
"""Categories of our slices."""


@dataclass(eq=False)
class Slice:
    """A stretch of time on a thread. Times are microseconds, as in the file."""

    event: Event
    start: float
    end: float
    children: "list[Slice]" = field(default_factory=list)

    @property
    def name(self) -> str:
        """What the trace calls it."""
        return self.event["name"]

    @property
    def category(self) -> str:
        """Its category, such as "cpu_op" or "kernel"."""
        return self.event.get("cat", "")

    @property
    def args(self) -> dict[str, Any]:
        """What else the trace says of it."""
        return self.event.get("args", {})

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end - self.start) * 1e-6

    def within(self) -> "Iterator[Slice]":
        """The slices inside, by start."""
        for child in self.children:
            yield child
            yield from child.within()


@dataclass
class _Flight:
    """A collective that has started and was not waited for."""

    name: str
    found: Described
    started: Slice
    arrives: float


def rewritten(events: Iterable[Event], names: Mapping[str, Described], graphs: Mapping[str, Graph]) -> list[Event]:
    """Return the events of a rank with the names of this library.

    Args:
        events: those that torch.profiler wrote.
        names: eager collectives, by their names in the trace.
        graphs: compiled graphs, by the names of their marks.
    """
    rows: dict[tuple[Any, Any], list[Event]] = {}
    others, numbers = list[Event](), count(FIRST_ROW)
    for e in events:
        if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation"):
            rows.setdefault((e["pid"], e["tid"]), []).append(e)
        elif e.get("cat") != "Trace" and e["ph"] != "i":
            others.append(e)
    made, sent, steps, apart = list[Event](), list[Event](), list[Event](), list[Event]()
    ids = dict[Any, str]()
    for (pid, tid), mine in rows.items():
        roots, overlapping = nested(mine)
        named = _Thread(pid, tid, names, graphs)
        for root in roots:
            named.walk(root)
        made += [*mine, *named.graphs]
        sent += named.sent
        steps += _steps(roots)
        apart += overlapping
        ids |= named.ids
    for e in others:
        _name_kernel(e, ids)
    for what, each in (("steps", steps), ("communication", sent), ("gloo", apart)):
        others += _rows(what, each, numbers)
    return [*others, *sorted([*made, *steps, *sent], key=lambda e: (e["ts"], -e["dur"]))]


def nested(events: Iterable[Event]) -> tuple[list[Slice], list[Event]]:
    """Return the outermost slices of a thread, with those inside, and the events that overlap others partly."""
    roots, apart, stack = list[Slice](), list[Event](), list[Slice]()
    for e in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        new = Slice(e, e["ts"], e["ts"] + e["dur"])
        while stack and stack[-1].end <= new.start + SLACK:
            stack.pop()
        if stack and new.end > stack[-1].end + SLACK:
            apart.append(e)
            continue
        if stack and new.end > stack[-1].end:
            new.end = stack[-1].end
            e["dur"] = new.end - new.start
        (stack[-1].children if stack else roots).append(new)
        stack.append(new)
    return roots, apart


def slices(events: Iterable[Event]) -> list[Slice]:
    """Return all that is in a profile by start; what lies inside another slice of its thread is among its children."""
    rows: dict[tuple[Any, Any], list[Event]] = {}
    for e in events:
        if e.get("ph") == "X":
            rows.setdefault((e["pid"], e["tid"]), []).append(e)
    every = list[Slice]()
    for mine in rows.values():
        roots, apart = nested(mine)
        every += [Slice(e, e["ts"], e["ts"] + e["dur"]) for e in apart]
        for root in roots:
            every += [root, *root.within()]
    return sorted(every, key=lambda e: (e.start, -e.end))


def _steps(roots: Sequence[Slice]) -> list[Event]:
    """The steps of a thread. One ends with the outermost slice in which it is marked, such as that of an optimizer."""
    found, start = list[Event](), roots[0].start if roots else 0.0
    for root in roots:
        marks = [x.name for x in (root, *root.within()) if x.name.startswith(STEP)]
        if marks:
            found.append(_event(root, marks[-1].removeprefix(STEP), "step", start, root.end, {}))
            start = root.end
    return found


class _Thread:
    """Names the slices of one thread."""

    def __init__(self, pid: Any, tid: Any, names: Mapping[str, Described], graphs: Mapping[str, Graph]) -> None:
        self.pid, self.tid, self.names, self.known = pid, tid, names, graphs
        self.graphs: list[Event] = []
        self.sent: list[Event] = []
        self.ids: dict[Any, str] = {}
        self.flights: list[_Flight] = []
        self.left: list[Described] = []
        self.until: float = 0.0

    def walk(self, at: Slice) -> None:
        """Name a slice and those inside."""
        if at.name.endswith(COMPILES):
            return
        if at.start >= self.until:
            self.left = []
        if at.name in self.names:
            self.start(at, self.names[at.name], at.name)
        elif at.name.startswith(WAIT) and at.name.removeprefix(WAIT) in self.names:
            self.land(at, next((f for f in self.flights if WAIT + f.name == at.name), None))
        elif at.name in STARTS:
            found = self.take(at)
            self.start(at, found, name_of(found))
        elif at.name in WAITS:
            self.land(at, self.waited(at))
        else:
            for child in at.children:
                if child.name == AGREE:
                    mark = next((x for x in child.within() if x.name in self.known), None)
                    if mark is not None:
                        self.begin(self.known[mark.name], child, at.end)
                else:
                    self.walk(child)

    def begin(self, graph: Graph, at: Slice, end: float) -> None:
        """A compiled graph begins, which lasts as long as what called it."""
        self.left, self.until = list(graph.collectives), end
        self.graphs.append(_event(at, graph.name, GRAPH, at.start, end, {"collectives": len(graph.collectives)}))

    def take(self, at: Slice) -> Described:
        """What the start of a collective is, of those that are left of the graph."""
        operator, elements = at.name.split("::")[1], _elements(at)
        alike = [d for d in self.left if _base(d["carried"]) == _base(operator)]
        exact = [d for d in alike if elements is not None and d["elements"] == elements]
        found = next(iter(exact or alike), None)
        if found is None:
            return {"op": STARTS[at.name], "move": "", "axis": "", "of": "", "line": "", "stage": "", "graph": ""}
        self.left.remove(found)
        return found

    def start(self, at: Slice, found: Described, name: str) -> None:
        self.flights.append(_Flight(name, found, at, _arrives(at)))
        at.event |= {"name": name, "cat": COLLECTIVE}
        at.event["args"] = at.args | _said(found)
        for each in (at, *at.within()):
            if (known := each.args.get("External id")) is not None:
                self.ids[known] = name

    def waited(self, at: Slice) -> _Flight | None:
        """What a wait is for: the first collective whose result has as many elements, else the first."""
        got = _elements(at)
        exact = [f for f in self.flights if got is not None and f.arrives == got]
        return next(iter(exact or self.flights), None)

    def land(self, at: Slice, flight: _Flight | None) -> None:
        if flight is None:
            return
        self.flights.remove(flight)
        at.event |= {"name": WAIT + flight.name, "cat": COLLECTIVE}
        at.event["args"] = at.args | _said(flight.found)
        args = {**_said(flight.found), "waited_us": at.end - at.start}
        self.sent.append(_event(at, flight.name, COLLECTIVE, flight.started.start, at.end, args))


def _event(like: Slice, name: str, category: str, start: float, end: float, args: dict[str, Any]) -> Event:
    """A slice on the thread of another one."""
    pid, tid = like.event["pid"], like.event["tid"]
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": end - start} | {
        "args": args
    }


def exposed(events: Iterable[Event]) -> float:
    """Return the seconds for which a rank only waited for communication, for each step of its rewritten trace.

    On GPUs that is the time in which kernels of collectives run and no others do; elsewhere that of the waits.
    """
    events = list(events)
    steps = max(1, len([e for e in events if e.get("cat") == "step"]))
    kernels = [e for e in events if e.get("cat") == "kernel"]
    if not kernels:
        return sum([e["args"]["waited_us"] for e in events if "waited_us" in e.get("args", {})]) / steps / 1e6
    alone = 0.0
    for pid in {e["pid"] for e in kernels}:
        mine = [(e["ts"], e["ts"] + e["dur"], "kernel" in e["args"]) for e in kernels if e["pid"] == pid]
        computing = covered([(a, b) for a, b, sends in mine if not sends])
        alone += covered([(a, b) for a, b, _ in mine]) - computing
    return alone / steps / 1e6


def _said(found: Described) -> dict[str, Any]:
    return {key: found[key] for key in ("op", "move", "axis", "of", "line", "stage", "graph") if found[key]}


def _base(operator: str) -> str:
    """An operator's name without the suffixes of its variants."""
    for variant in VARIANTS:
        operator = operator.removesuffix(variant)
    return operator


def _elements(at: Slice) -> int | None:
    """The number of elements of the first argument; None if the profile has no shapes."""
    dims = at.args.get("Input Dims")
    return _count(dims[0]) if dims else None


def _count(dims: Any) -> int:
    return sum(map(_count, dims)) if dims and isinstance(dims[0], (list, tuple)) else prod(dims)


def _arrives(at: Slice) -> float:
    """The number of elements that a collective gives, as far as its arguments tell; NaN if they do not."""
    sent, op = _elements(at), STARTS.get(at.name)
    sizes = [int(x) for x in at.args.get("Concrete Inputs") or [] if str(x).isdigit()]
    if sent is None or op is None:
        return float("nan")
    if op == "all_gather" and sizes:
        return sent * sizes[0]
    return sent / sizes[0] if op == "reduce_scatter" and sizes else sent


def _rows(what: str, events: Sequence[Event], numbers: Iterator[int]) -> list[Event]:
    """Put events that overlap into as few rows as it takes, and return the names of these."""
    rows: list[tuple[Any, int, float]] = []
    for e in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        at = next((k for k, (pid, _, end) in enumerate(rows) if pid == e["pid"] and end <= e["ts"] + SLACK), None)
        if at is None:
            at = len(rows)
            rows.append((e["pid"], next(numbers), 0.0))
        pid, e["tid"], _ = rows[at]
        rows[at] = pid, e["tid"], e["ts"] + e["dur"]
    return [
        {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}
        for pid, tid, _ in rows
        for name, args in (("thread_name", {"name": what}), ("thread_sort_index", {"sort_index": tid}))
    ]


def _name_kernel(e: Event, ids: Mapping[Any, str]) -> None:
    """Name a kernel of NCCL after the collective that it is of."""
    args = e.get("args", {})
    if e.get("cat") == "kernel" and "nccl" in str(e.get("name")).lower() and args.get("External id") in ids:
        args["kernel"], e["name"] = e["name"], ids[args["External id"]]


__all__ = ["COLLECTIVE", "GRAPH", "STEP", "Slice", "exposed", "nested", "rewritten", "slices"]
