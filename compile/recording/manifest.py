"""The manifest of a frame: everything it communicates, what requested it, what the passes did, and what it may cost.

There is one JSON file for each frame and rank. `bytes` are those that this rank puts on the wire, `sent` those that it
passes to the process group. Times are estimates (`dtensor.compile.estimates.timeline`), in seconds from the start of
the graph.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import prod
from typing import Any

from dtensor.mesh.provenance import Moved
from dtensor.parallel.decisions.files import NAME
from dtensor.passes.graph.source import Source

from ..estimates.chrome import chrome_trace
from .folder import is_wanted, write
from .frames import Alternative, Asked, Change, Collective, Frame, Story
from .labels import labels

FORMAT = "dtensor manifest 1"
"""Identifies the format in the file."""

POINTS = 4000
"""Longer memory curves are thinned out, to no fewer points than this."""


def write_manifest(frame: Frame) -> None:
    """Write manifest.json and trace.json if the frame is dumped."""
    if is_wanted(frame):
        made = manifest(frame)
        write(frame, "manifest.json", json.dumps(made, indent=1))
        if frame.decided is not None and frame.decided.text:
            write(frame, NAME, frame.decided.text)
        write(frame, "trace.json", json.dumps(chrome_trace(made)))


def manifest(frame: Frame) -> dict[str, Any]:
    """Return the content of manifest.json."""
    names = labels()
    ran = [story for story in frame.stories.values() if story.timeline is not None]
    collectives = [_collective(k, c, story, frame, names) for story in ran for k, c in enumerate(story.sent)]
    return {
        "format": FORMAT,
        "frame": {"name": frame.name, "file": frame.file, "line": frame.line, "compile_id": frame.compile_id},
        "graphs": {story.direction: _graph(story) for story in ran},
        "collectives": collectives,
        "removed": _removed(frame, names),
        "passes": [_change(change) for change in frame.changes],
        "alternatives": [_alternative(a) for a in frame.alternatives],
        "decided": asdict(replace(frame.decided, text="")) | {"gap": frame.decided.gap} if frame.decided else None,
        "graph_breaks": frame.breaks,
        "recompiled": frame.recompiled,
        "totals": totals(collectives),
    }


def totals(collectives: list[dict[str, Any]]) -> dict[str, Any]:
    """Return for each direction the count of each operator, and the sums of bytes and seconds."""
    found: dict[str, Any] = {}
    for direction in dict.fromkeys([c["direction"] for c in collectives]):
        mine = [c for c in collectives if c["direction"] == direction]
        found[direction] = {"count": dict(Counter([c["op"] for c in mine]))} | {
            key: sum([c[key] for c in mine]) for key in ("bytes", "sent", "seconds", "exposed")
        }
    return found


def _graph(story: Story) -> dict[str, Any]:
    t = story.timeline
    assert t is not None
    return {
        "nodes": story.nodes,
        "stages": story.stages,
        "seconds": t.seconds,
        "computing": t.computing,
        "communicating": t.communicating,
        "exposed": t.exposed,
        "peak_bytes": t.peak,
        "memory": t.memory[:: max(1, len(t.memory) // POINTS)],
        "spans": [asdict(span) for span in t.spans],
        "order": t.order,
        "gaps": t.gaps,
        "taken": t.taken,
    }


def _collective(k: int, c: Collective, story: Story, frame: Frame, names: dict[str, str]) -> dict[str, Any]:
    s, moves = c.sent, [frame.asked[n].moved for n in c.asked if n in frame.asked]
    return {
        "number": k,
        "direction": story.direction,
        "op": s.op,
        "carried": s.carried,
        "reduce_op": s.reduce_op,
        "axis": _axis(s.group, [m for m in moves if m and prod([m.sizes[a] for a in m.axes]) == len(s.ranks)], names),
        "group": s.group,
        "ranks": list(s.ranks),
        "dtype": s.dtype,
        "shapes": [list(shape) for shape in s.shapes],
        "bytes": s.bytes,
        "sent": s.buffer,
        "how": c.how,
        "move": c.move,
        **_place(c),
        "asked": list(c.asked),
        "passes": list(c.passes),
        "start": c.start,
        "end": c.end,
        "seconds": c.end - c.start,
        "fixed": c.fixed,
        "link": asdict(c.link),
        "exposed": c.exposed,
        "parameter": c.parameter,
        "makers": list(c.makers),
        "readers": list(c.readers),
        "formula": None if c.formula is None else {"bytes": str(c.formula.bytes), "seconds": str(c.formula.seconds)},
    }


def _axis(group: str, moves: Sequence[Moved], names: dict[str, str]) -> str:
    """The name of a group. Meshes that share it may have other names: that of the mesh that was traced counts."""
    traced = {",".join([m.names[a] for a in m.axes]) for m in moves} if group in names else set()
    return traced.pop() if len(traced) == 1 else names.get(group, group)


def _place(x: Asked | Collective) -> dict[str, Any]:
    where = x.where or Source("", 0, "")
    return {"file": where.file, "line": where.line, "code": where.code, "module": x.module, "class": x.kind}


def _removed(frame: Frame, names: dict[str, str]) -> list[dict[str, Any]]:
    """The collectives that the program requested and that no graph sends."""
    left = {n for story in frame.stories.values() for c in story.sent for n in c.asked}
    by = {n: change for change in frame.changes for n in change.removed}
    return [_gone(a, by.get(n), names) for n, a in frame.asked.items() if n not in left]


def _gone(a: Asked, by: Change | None, names: dict[str, str]) -> dict[str, Any]:
    return {
        "asked": a.number,
        "op": a.op,
        "axis": _axis(a.group, [a.moved] if a.moved else [], names),
        "bytes": a.bytes,
        "how": a.how,
        "move": a.move,
        **_place(a),
        "direction": "backward" if a.backward else "forward",
        "pass": by.name if by is not None else "partition",
    }


def _alternative(a: Alternative) -> dict[str, Any]:
    exposed: dict[str, dict[str, float]] = {direction: {} for direction in a.seconds}
    for (direction, number), seconds in a.exposed.items():
        exposed[direction][str(number)] = seconds
    return {"option": a.option, "seconds": a.seconds, "peak": a.peak, "exposed": exposed, "failed": a.failed}


def _change(c: Change) -> dict[str, Any]:
    return {
        "pass": c.name,
        "direction": c.direction,
        "stage": c.stage,
        "made": c.made,
        "gone": c.gone,
        "removed": list(c.removed),
        "bytes_before": c.before,
        "bytes_after": c.after,
        "bytes_saved": c.before - c.after,
    }


__all__ = ["FORMAT", "manifest", "totals", "write_manifest"]
