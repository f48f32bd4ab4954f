"""The timeline in Chrome's trace format, for chrome://tracing and Perfetto."""

from typing import Any

THREADS = {"computation": 1, "communication": 2, "exposed": 3}
"""The rows of a graph -> their thread ids."""


def chrome_trace(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the trace of all graphs of a manifest, one after the other in time. Each graph is shown as a process."""
    events: list[dict[str, Any]] = []
    offset = 0.0
    for pid, (direction, graph) in enumerate(manifest["graphs"].items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": direction}})
        for name, tid in THREADS.items():
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        mine = {c["number"]: c for c in manifest["collectives"] if c["direction"] == direction}
        for span in graph["spans"]:
            events += _events(span, pid, offset, mine.get(span["number"]))
        for at, held in graph["memory"]:
            events.append(
                {"ph": "C", "name": "bytes held", "pid": pid, "ts": (at + offset) * 1e6, "args": {"bytes": held}}
            )
        offset += graph["seconds"]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(span: dict[str, Any], pid: int, offset: float, c: dict[str, Any] | None) -> list[dict[str, Any]]:
    row = THREADS["communication" if span["communicates"] else "computation"]
    args = {} if c is None else {key: c[key] for key in ("axis", "bytes", "move", "how", "module", "file", "line")}
    found = [_event(span["name"], pid, row, span["start"] + offset, span["end"] - span["start"], args)]
    if span["exposed"]:
        start = span["end"] - span["exposed"] + offset
        found.append(_event(f"exposed {span['name']}", pid, THREADS["exposed"], start, span["exposed"], args))
    return found


def _event(name: str, pid: int, tid: int, start: float, took: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start * 1e6, "dur": took * 1e6, "args": args}


__all__ = ["chrome_trace"]
