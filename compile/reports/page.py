"""The page of a dump: one self-contained index.html, for people.

    overview        what is sent, how long it takes, what is most exposed, and what to write against that
    collectives     a table to sort and filter, estimated beside measured times
    timeline        computation against communication, with what is exposed; memory below it
    graphs          each graph before the passes, and what each pass changed
    layers          what each module returns, in which placements, and what it sends
    ranks           where other ranks differ from the first
    compilation     graph breaks, recompilations

Everything that comes from the program is shown as text, never as markup (`rendering`). Of long graphs, only the visible
lines are in the page's DOM.
"""

import difflib
import re
from pathlib import Path
from typing import Any

from dtensor.passes.graph.text import REMARK
from dtensor.program.files import write_whole

from .differences import collective_line
from .reading import Dumped, read
from .remedies import with_remedies
from .rendering import rendered
from .summary import changed, measured_line, most_exposed, remedy, seconds, what, who

LINE = re.compile(r"%(?P<name>\S+): (?P<kind>\S+) = (?P<call>[^(]+)")
MODULE = re.compile(r" in (?P<module>\S+)$")
STAGE = re.compile(r"(\d\d_\w+)\.(\d\d)_(\w+)\.txt")

NAMED = 10
"""The number of exposed collectives in the overview."""

LONGEST = 20_000
"""Graphs with more lines are compared as sets of lines, without regard to order."""


def write_page(root: Path) -> Path:
    """Write the page of a dump into its folder, and return its path.

    Raises:
        ValueError: there is no dump.
        OSError: it cannot be written.
    """
    path = root / "index.html"
    write_whole(path, page(root))
    return path


def page(root: Path) -> str:
    """Return the HTML of the page of a dump.

    Raises:
        ValueError: there is no dump.
    """
    frames = read(root)
    first = min([f.rank for f in frames], default=0)
    mine = [f for f in frames if f.rank == first and f.manifest]
    exposed = most_exposed(mine, NAMED)
    graphs = [_graph_row(f, d) for f in mine if f.manifest for d in f.manifest["graphs"]]
    return rendered(
        "dump",
        {"frames": [_frame(f) for f in mine]},
        root=root.resolve().name,
        ranks=sorted({f.rank for f in frames}),
        graphs=graphs,
        measured=any(g["measured"] for g in graphs),
        exposed=[_told(c) for c in exposed],
        saved=[p | {"frame": f.name} for f in mine if f.manifest for p in f.manifest["passes"] if _matters(p)],
        differences=_rank_differences(frames, first),
        compilations=[_compilation(f) for f in frames if f.rank == first],
    )


def _told(c: dict[str, Any]) -> dict[str, Any]:
    texts = {"what": what(c), "who": who(c), "changed": changed(c), "measured": measured_line(c)}
    place = {key: c[key] for key in ("frame", "direction", "number", "times")}
    return texts | place | {"remedies": [remedy(r) for r in c["remedies"]]}


def _matters(p: dict[str, Any]) -> bool:
    return bool(p["removed"] or p["bytes_saved"])


def _graph_row(f: Dumped, direction: str) -> dict[str, Any]:
    assert f.manifest is not None
    g, t = f.manifest["graphs"][direction], f.manifest["totals"].get(direction, {})
    counted = " + ".join([f"{n} {op}" for op, n in t.get("count", {}).items()]) or "none"
    times = {key: seconds(g[key]) for key in ("seconds", "computing", "communicating", "exposed")}
    m = g.get("measured")
    return {
        "measured": _measured(m) if m else {},
        "frame": f.name,
        "direction": direction,
        "nodes": g["nodes"],
        "count": counted,
        "bytes": t.get("bytes", 0),
        "peak": g["peak_bytes"],
        "waits": g["exposed"] > 0,
        **times,
    }


def _measured(m: dict[str, Any]) -> dict[str, Any]:
    return {key: seconds(m[key]) for key in ("seconds", "sending", "exposed", "agreeing")} | {"runs": m["runs"]}


def _frame(f: Dumped) -> dict[str, Any]:
    """The data of a frame that the script shows."""
    assert f.manifest is not None
    keep = ("removed", "frame")
    collectives = [
        c | {"remedies": [r | {"text": remedy(r)} for r in c["remedies"]]} for c in with_remedies(f.manifest)
    ]
    graphs = {
        direction: {
            "seconds": g["seconds"],
            "memory": g["memory"],
            "spans": [
                [s["name"], int(s["communicates"]), s["start"], s["end"], s["exposed"], s["number"]] for s in g["spans"]
            ],
        }
        for direction, g in f.manifest["graphs"].items()
    }
    return {key: f.manifest[key] for key in keep} | {
        "name": f.name,
        "collectives": collectives,
        "graphs": graphs,
        "stages": _stages(f.folder),
        "layers": _layers(f.folder),
    }


def _stages(folder: Path) -> list[dict[str, Any]]:
    """The texts of the graphs: each before the passes, and what each pass changed."""
    shown: list[dict[str, Any]] = []
    before: dict[str, list[str]] = {}
    for path in sorted([*folder.glob("0*.txt")]):
        text = path.read_text(encoding="utf-8").splitlines()
        graph = path.name.split(".")[0]
        if graph in before:
            shown.append({"title": path.stem, "lines": compared(before[graph], text), "diff": True})
        else:
            shown.append({"title": path.stem, "lines": text, "diff": False})
        before[graph] = text
    return shown


def compared(a: list[str], b: list[str]) -> list[str]:
    """Return a unified diff of two texts of graphs."""
    if max(len(a), len(b)) > LONGEST:
        left, new = set(b), set(a)
        return [f"-{line}" for line in a if line not in left] + [f"+{line}" for line in b if line not in new]
    return list(difflib.unified_diff(a, b, lineterm="", n=2))[2:] or ["(no difference)"]


def _layers(folder: Path) -> list[dict[str, Any]]:
    """For each module of the forward, in order: the last value it computes, and what it sends."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted([*folder.glob("03_*.00_input.txt")]):
        for line in path.read_text(encoding="utf-8").splitlines():
            head, _, words = line.partition(REMARK)
            m, place = LINE.match(head), MODULE.search(words)
            if m is None or place is None:
                continue
            row = found.setdefault(place["module"], {"module": place["module"], "gives": "", "sends": []})
            if "{" in m["kind"]:
                row["gives"] = f"{m['name']}: {m['kind']}"
            if " bytes over " in words:
                row["sends"].append(f"{m['call']}: {words.split(';')[0]}")
    return list(found.values())


def _rank_differences(frames: list[Dumped], first: int) -> list[dict[str, Any]]:
    """The differences between what each other rank sends and what the first sends, frame by frame."""
    mine = {f.name: f for f in frames if f.rank == first}
    rows = []
    for f in frames:
        if f.rank == first:
            continue
        theirs = [collective_line(c) for c in f.manifest["collectives"]] if f.manifest else []
        own = mine.get(f.name)
        ours = [collective_line(c) for c in own.manifest["collectives"]] if own and own.manifest else []
        found = list(difflib.unified_diff(ours, theirs, f"rank{first}", f"rank{f.rank}", lineterm="", n=0))
        rows.append({"rank": f.rank, "frame": f.name, "lines": found})
    return rows


def _compilation(f: Dumped) -> dict[str, Any]:
    texts = {name: f.folder / f"{name}.txt" for name in ("graph_breaks", "recompiled")}
    read_texts = {name: p.read_text(encoding="utf-8") if p.exists() else "" for name, p in texts.items()}
    where = f.manifest["frame"] if f.manifest else {"file": "", "line": 0}
    return {"name": f.name, "where": f"{where['file']}:{where['line']}" if where["file"] else "", **read_texts}


__all__ = ["compared", "page", "write_page"]
