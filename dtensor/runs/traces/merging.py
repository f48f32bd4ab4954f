"""One trace of all ranks: each rank is a process, and times are those of one clock.

Clocks of different hosts differ by milliseconds. An all-reduce ends on all its ranks at about the same time, so the
ranks of a host are moved by the median of what theirs ended later than those of the first host.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ...errors import RecordError
from ...program.files import write_whole
from .events import COLLECTIVE, Event

TRACE = "trace.json"
"""The file of all ranks, in the folder of theirs."""

PROCESSES = 64
"""The most processes (threads of the program, GPUs) that a rank has in a trace."""


def path_of(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank{rank:05d}.json"


def merge(folder: Path) -> Path:
    """Write one trace of the ranks whose traces are in `folder`, and return its path.

    Raises:
        RecordError: it holds no trace, not those of all ranks, or a damaged one.
        OSError: the file cannot be written.
    """
    paths = sorted(folder.glob("rank*.json"))
    if not paths:
        raise RecordError(f"{folder} holds no traces; name the folder that was given to dtensor.trace")
    ranks = sorted([_read(path) for path in paths], key=lambda r: r["rank"])
    absent = sorted(set(range(ranks[0]["world"])) - {r["rank"] for r in ranks})
    if absent:
        raise RecordError(
            f"{folder} lacks the traces of ranks {absent} of {ranks[0]['world']}; copy them there (each rank writes "
            "its own), or trace again"
        )
    write_whole(folder / TRACE, json.dumps(merged(ranks)))
    return folder / TRACE


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        return {"rank": found["dtensor"]["rank"], "world": found["dtensor"]["world"], **found}
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is damaged, or no trace of dtensor.trace ({error}); trace again") from error


def merged(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the trace of ranks whose traces are given, in Chrome's format."""
    first = min([r.get("baseTimeNanoseconds", 0) for r in ranks])
    moved = later(ranks)
    events: list[Event] = []
    for r, late in zip(ranks, moved, strict=True):
        shift = (r.get("baseTimeNanoseconds", 0) - first) / 1000 - late
        events += _of_rank(r, shift)
    start = min([e["ts"] for e in events if e["ph"] != "M"], default=0.0)
    for e in events:
        if e["ph"] != "M":
            e["ts"] = round(e["ts"] - start, 3)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _of_rank(r: dict[str, Any], shift: float) -> list[Event]:
    """The events of a rank, whose processes are numbered so that no other rank has them."""
    given = r["traceEvents"]
    used = dict.fromkeys([e["pid"] for e in given if e["ph"] == "X"])
    pids = {pid: r["rank"] * PROCESSES + k for k, pid in enumerate(used)}
    named = {e["pid"]: e["args"].get("labels", "") for e in given if e["ph"] == "M" and e["name"] == "process_labels"}
    made = [
        {**e, "pid": pids[e["pid"]]} for e in given if e["pid"] in pids and not str(e["name"]).startswith("process_")
    ]
    for e in made:
        if e["ph"] != "M":
            e["ts"] += shift
        if e["ph"] in "sft" and "id" in e:
            e["id"] = f"{r['rank']}.{e['id']}"
    for pid, number in pids.items():
        what = str(named.get(pid, "")) or "program"
        name = f"rank {r['rank']}" + ("" if what in ("CPU", "program") else f", {what}")
        labels = f"{r.get('host_name', '')} process {pid}".strip()
        for key, args in (
            ("process_name", {"name": name}),
            ("process_labels", {"labels": labels}),
            ("process_sort_index", {"sort_index": number}),
        ):
            made.append({"ph": "M", "name": key, "pid": number, "tid": 0, "ts": 0, "args": args})
    return made


def later(ranks: Sequence[dict[str, Any]]) -> list[float]:
    """Return for each rank the microseconds by which its clock is ahead of that of the first rank; 0.0 on its host."""
    reference = _ends(ranks[0])
    found: dict[str, list[float]] = {}
    for r in ranks:
        if r.get("host_name") != ranks[0].get("host_name"):
            ends = _ends(r)
            both = [ends[key] - reference[key] for key in ends if key in reference]
            found.setdefault(r.get("host_name", ""), []).extend(both)
    hosts = {host: median(both) if both else 0.0 for host, both in found.items()}
    return [hosts.get(r.get("host_name", ""), 0.0) for r in ranks]


def _ends(r: dict[str, Any]) -> dict[tuple[str, int], float]:
    """(name of an all-reduce, how often it came before) -> when it ended, in microseconds."""
    base, count, found = r.get("baseTimeNanoseconds", 0) / 1000, dict[str, int](), dict[tuple[str, int], float]()
    for e in r["traceEvents"]:
        if e.get("cat") == COLLECTIVE and "waited_us" in e["args"] and e["args"].get("op") == "all_reduce":
            k = count[e["name"]] = count.get(e["name"], -1) + 1
            found[e["name"], k] = base + e["ts"] + e["dur"]
    return found


__all__ = ["TRACE", "later", "merge", "merged", "path_of"]
