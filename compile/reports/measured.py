"""What collectives took when they ran: finds those of compiled graphs in a profile that torch.profiler wrote.

    Torch-Compiled Region: 0/0         a call of the frame with that compile id
      CompiledFunction                 its forward; the number is that of the backward, too
        _c10d_functional::all_reduce   a start
        _c10d_functional::wait_tensor  a wait
    CompiledFunctionBackward           its backward

The profile is a file in Chrome's trace format. In a run of a graph, collectives follow each other in the order of the
graph, which is how they are told apart: a run whose collectives are not those of the graph is left out.

A collective over a CPU backend takes the time from the beginning of its start until its last message has arrived, or
until the wait that blocked for it has returned; it is exposed where the thread that computes is in its start or its
wait. On a GPU it takes the time of its kernels, and is exposed where no other kernel runs beside them.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dtensor.comm.profiled import covered
from dtensor.errors import ArgumentError
from dtensor.runs.traces.events import AGREE, Slice, slices

from ..estimates.traffic import collective_named, is_wait_named

FILE, PROFILE = "measured.json", "profile.json"
"""The files of a rank: what was measured, and the profile that it was read from."""

FORMAT = "dtensor measured 1"

REGION, FORWARD, BACKWARD = "Torch-Compiled Region: ", "CompiledFunction", "CompiledFunctionBackward"
"""Torch's names of what a profile tells of compiled code."""

SUMS = {"sending": "seconds", "exposed": "exposed"}
"""What is said of a graph -> the entry of its collectives that is added up."""

SENT, KERNEL, NCCL = "gloo:", "kernel", "nccl"
"""Beginnings of the names of what gloo sends, the category of kernels, and how NCCL's begin."""


@dataclass(frozen=True)
class GraphRun:
    """One run of a graph.

    Attributes:
        frame: position of its frame among the manifests.
        direction: "forward", "backward" or "inference".
        seconds: how long it took on the host.
        agreeing: seconds in which it waited for the others to begin.
        collectives: pairs of seconds and exposed seconds, in the order of the graph.
    """

    frame: int
    direction: str
    seconds: float
    agreeing: float
    collectives: tuple[tuple[float, float], ...]


def events_of(path: Path) -> list[Slice]:
    """Return the slices of a profile, by their start.

    Raises:
        ValueError: the file is no trace.
        OSError: it cannot be read.
    """
    try:
        return slices(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"{path} is not a profile in Chrome's trace format ({error!r}); write one with "
            "torch.profiler.profile(...).export_chrome_trace"
        ) from error


def runs(events: Sequence[Slice], manifests: Sequence[dict[str, Any]]) -> Iterator[GraphRun]:
    """Yield the runs of the graphs of some frames that are in a profile."""
    frames = {m["frame"]["compile_id"].strip("[]"): k for k, m in enumerate(manifests)}
    profile, numbered = _Profile(events), dict[Any, int]()
    for e in events:
        frame = frames.get(e.name.removeprefix(REGION)) if e.name.startswith(REGION) else None
        if frame is not None:
            inner = [x for x in e.within() if x.name == FORWARD]
            numbered.update({x.args.get("Sequence number"): frame for x in inner})
            direction = next((d for d in ("forward", "inference") if d in manifests[frame]["graphs"]), "")
        elif e.name == BACKWARD:
            frame, direction = numbered.get(e.args.get("Sequence number")), "backward"
        else:
            continue
        found = None if frame is None else profile.run(e, frame, direction, manifests[frame])
        if found is not None:
            yield found


class _Profile:
    def __init__(self, events: Sequence[Slice]) -> None:
        self.messages = [e for e in events if e.name.startswith(SENT)]
        kernels = [e for e in events if e.category == KERNEL]
        self.launched: dict[Any, list[Slice]] = {}
        for e in kernels:
            if e.name.startswith(NCCL):
                self.launched.setdefault(e.args.get("External id"), []).append(e)
        self.computing = [e for e in kernels if not e.name.startswith(NCCL)]

    def run(self, e: Slice, frame: int, direction: str, manifest: dict[str, Any]) -> GraphRun | None:
        """The run of a graph that `e` is; None if other collectives run in it than are in the graph."""
        order = manifest["graphs"].get(direction, {}).get("order")
        sent = [c for c in manifest["collectives"] if c["direction"] == direction]
        inner = list(e.within())
        calls = list(_outermost([x for x in inner if collective_named(x.name) or is_wait_named(x.name)]))
        starts = [x for x in calls if collective_named(x.name)]
        if order is None or [collective_named(x.name) for x in starts] != [c["carried"] for c in sent]:
            return None
        waits: dict[int, list[Slice]] = {}
        numbers = [~k for k in order if k < 0]
        for k, x in zip(numbers, [x for x in calls if is_wait_named(x.name)]):
            waits.setdefault(k, []).append(x)
        free = [m for m in self.messages if e.start <= m.start <= e.end and not _within(m, inner, AGREE)]
        took = tuple([self.took(x, waits.get(k, []), free) for k, x in enumerate(starts)])
        agreeing = sum([x.seconds for x in _outermost([x for x in inner if x.name == AGREE])])
        return GraphRun(frame, direction, e.seconds, agreeing, took)

    def took(self, start: Slice, waits: list[Slice], free: list[Slice]) -> tuple[float, float]:
        """Seconds of a collective, and how many of them are exposed. Its messages are taken out of `free`."""
        called = {start.args.get("External id"), *[x.args.get("External id") for x in start.within()]} - {None}
        kernels = [k for number in called for k in self.launched.get(number, ())]
        if kernels:
            beside = [x for x in self.computing if x.event["pid"] == kernels[0].event["pid"]]
            took = covered([(k.start, k.end) for k in kernels])
            return took * 1e-6, (took - sum([_covered(k, beside) for k in kernels])) * 1e-6
        end = max([x.end for x in waits], default=start.end)
        mine = [m for m in free if start.start <= m.start <= start.end] or [m for m in free if m.start >= start.start][
            :1
        ]
        for m in mine:
            free.remove(m)
        arrived = max([m.end for m in mine], default=end)
        last = end if any(x.start < arrived for x in waits) else max(arrived, start.end)
        return (last - start.start) * 1e-6, start.seconds + sum([x.seconds for x in waits])


def _outermost(calls: Iterable[Slice]) -> Iterator[Slice]:
    """Of calls on one thread, by their start, those that are not inside another."""
    end = float("-inf")
    for e in calls:
        if e.start >= end:
            end = e.end
            yield e


def _within(m: Slice, spans: Iterable[Slice], name: str) -> bool:
    return any(x.name == name and x.start <= m.start <= x.end for x in spans)


def _covered(e: Slice, others: Iterable[Slice]) -> float:
    return covered([(max(e.start, x.start), min(e.end, x.end)) for x in others])


def measured(events: Sequence[Slice], names: Sequence[str], manifests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a profile says of the graphs of some frames: medians over the runs of each graph.

    Args:
        events: see `events_of`.
        names: names of the frames.
        manifests: their manifests.
    """
    found: dict[tuple[int, str], list[GraphRun]] = {}
    for run in runs(events, manifests):
        found.setdefault((run.frame, run.direction), []).append(run)
    return {
        "format": FORMAT,
        "graphs": [
            {
                "frame": names[frame],
                "direction": direction,
                "runs": len(of),
                "seconds": median([r.seconds for r in of]),
                "agreeing": median([r.agreeing for r in of]),
                "collectives": [
                    {"seconds": median([s for s, _ in c]), "exposed": median([x for _, x in c])}
                    for c in zip(*[r.collectives for r in of])
                ],
            }
            for (frame, direction), of in found.items()
        ],
    }


def attach(found: dict[str, Any], names: Sequence[str], manifests: Sequence[dict[str, Any]]) -> None:
    """Add what was measured to manifests, under `measured` of their graphs and collectives."""
    frames = dict(zip(names, manifests))
    for g in found["graphs"]:
        m = frames.get(g["frame"])
        mine = [c for c in m["collectives"] if c["direction"] == g["direction"]] if m is not None else []
        if m is not None and g["direction"] in m["graphs"] and len(mine) == len(g["collectives"]):
            sums = {to: sum([c[key] for c in g["collectives"]]) for to, key in SUMS.items()}
            own = {key: g[key] for key in ("runs", "agreeing")} | {"seconds": g["seconds"] - g["agreeing"]}
            m["graphs"][g["direction"]]["measured"] = own | sums
            for c, took in zip(mine, g["collectives"]):
                c["measured"] = took


__all__ = ["FILE", "PROFILE", "GraphRun", "attach", "events_of", "measured", "runs"]
