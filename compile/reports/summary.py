"""A summary of a dump: how much it communicates, what is most exposed, what requested it, what the passes did."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dtensor.passes.functional.lower import Lower

from .reading import Dumped, read
from .remedies import with_remedies

MOST = 5
"""The number of collectives that are listed."""

ALIKE = ("op", "axis", "direction", "bytes", "move", "how", "file", "line")
"""The fields that are equal for the collectives of identical layers."""

NAMED = 2
"""The number of remedies that the text names for each."""

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def summary(root: Path, most: int = MOST) -> str:
    """Return the summary of a dump; see `described`.

    Raises:
        ValueError: there is no dump.
    """
    return described(read(root), most)


def described(frames: list[Dumped], most: int = MOST) -> str:
    """Return the summary of some frames, from the point of view of the first rank."""
    first = min([f.rank for f in frames], default=0)
    mine = [f for f in frames if f.rank == first]
    manifests = [f.manifest for f in mine if f.manifest]
    graphs = [(f, d, g) for f in mine if f.manifest for d, g in f.manifest["graphs"].items()]
    lines = [_head(frames, manifests), *_graphs(graphs), *_decided(mine), "", *exposed_lines(mine, most)]
    return "\n".join([*lines, *_passes(manifests)])


def exposed_lines(frames: list[Dumped], most: int) -> list[str]:
    """Return lines for the most exposed collectives of one rank, with what requested and what changed them."""
    found = most_exposed(frames, most)
    if not found:
        return ["Nothing is communicated."]
    lines = ["Most exposed collectives (estimated time in which a rank only waits for it; identical layers together):"]
    for k, c in enumerate(found, 1):
        lines += [f"{k:>3}. {what(c)}"]
        more = [*filter(None, [measured_line(c)]), who(c), changed(c), *map(remedy, c["remedies"][:NAMED])]
        lines += [f"     {line}" for line in more]
        lines += [f"     bytes = {c['formula']['bytes']}"] if c["formula"] else []
    return lines


def most_exposed(frames: Iterable[Dumped], most: int) -> list[dict[str, Any]]:
    """Return the most exposed collectives of one rank with their remedies. Those that differ only in the numbers of
    their modules, as in identical layers, are merged into one, with their count as `times`, their times and savings
    added up, and the name of the frame and the number of the first as `frame` and `number`."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for f, c in ((frame, c) for frame in frames if frame.manifest for c in with_remedies(frame.manifest)):
        alike = *(c[key] for key in ALIKE), NUMBER.sub("*", c["module"]), tuple(c["passes"]), len(c["asked"])
        groups.setdefault((f.name, *alike), []).append(c | {"frame": f.name})
    merged = sorted([_merged(group) for group in groups.values()], key=lambda c: -c["exposed"])
    return [c for k, c in enumerate(merged[:most]) if c["exposed"] or not k]


def _merged(group: list[dict[str, Any]]) -> dict[str, Any]:
    modules = {c["module"] for c in group}
    module = group[0]["module"] if len(modules) == 1 else NUMBER.sub("*", group[0]["module"])
    times: dict[str, Any] = {key: sum([c[key] for c in group]) for key in ("exposed", "seconds")}
    if all("measured" in c for c in group):
        times["measured"] = {key: sum([c["measured"][key] for c in group]) for key in ("exposed", "seconds")}
    told: dict[str, dict[str, Any]] = {}
    for c in group:
        for r in c["remedies"]:
            before = told.get(r["write"])
            told[r["write"]] = r | {"saves": r["saves"] + (before["saves"] if before else 0.0)}
    kept = sorted(told.values(), key=lambda r: -r["saves"])
    kept = [r for r in kept if r["write"]] or kept
    return group[0] | times | {"module": module, "times": len(group), "remedies": kept}


def measured_line(c: dict[str, Any]) -> str:
    """Return what was measured of a collective, or of several merged; "" if nothing was."""
    m = c.get("measured")
    return f"measured: {seconds(m['exposed'])} exposed, of {seconds(m['seconds'])}" if m else ""


def remedy(r: dict[str, Any]) -> str:
    """Return what to write and what it saves, or why there is nothing to write."""
    if not r["write"]:
        return f"to write: none; {r['why']}"
    step = f", {seconds(r['step'])} of the step" if r["step"] > r["saves"] else ""
    return f"to write: {r['write']} saves {seconds(r['saves'])}{step}; {r['why']}"


def what(c: dict[str, Any]) -> str:
    """Return text such as `12 µs of 15 µs exposed: 2 all_reduce over tp in forward, 4,096 bytes each, P->R`."""
    move, times = f", {c['move']}" if c["move"] else "", c.get("times", 1)
    count, each = (f"{times} ", " each") if times > 1 else ("", "")
    return (
        f"{seconds(c['exposed'])} of {seconds(c['seconds'])} exposed: {count}{c['op']} over {c['axis']} in "
        f"{c['direction']}, {c['bytes']:,} bytes{each}{move}"
    )


def who(c: dict[str, Any]) -> str:
    """Return where a collective was requested."""
    said = {"explicit": "requested", "implicit": "not requested (implicit)"}.get(c["how"], c["how"])
    where = f" at {c['file']}:{c['line']}" if c["file"] else f" by {c['class']}" if c["class"] else ""
    module = f" in {c['module']}" if c["module"] else ""
    return f"{said}{where}{module}" + (f": {c['code']}" if c["code"] else "")


def changed(c: dict[str, Any]) -> str:
    """Return what the passes did to it. (`lower` splits every collective into its start and its wait.)"""
    number, by = len(c["asked"]), [name for name in c["passes"] if name != Lower.name]
    stands = f" (replaces {number} that the program requested)" if number > 1 else ""
    split = "split into start and wait" if Lower.name in c["passes"] else ""
    return "; ".join(filter(None, [f"changed by {', '.join(by)}{stands}" if by else "", split])) or "changed by no pass"


def seconds(s: float) -> str:
    """Return a time with a suitable unit, such as `12.3 µs`."""
    unit, name = next(((u, n) for u, n in UNITS if s >= u), UNITS[-1])
    return f"{s / unit:.3g} {name}"


def step_line(root: Path, mesh: dict[str, int]) -> str:
    """Return what one step is predicted to take on a mesh: the graphs of each function's last compilation, one after
    another.

    Raises:
        ValueError: there is no dump.
    """
    last = {f.name[4:]: f.manifest for f in read(root) if f.manifest}
    graphs = [g for m in last.values() for g in m["graphs"].values()]
    took, waited = (sum([g[key] for g in graphs]) for key in ("seconds", "exposed"))
    peak = max([g["peak_bytes"] for g in graphs], default=0)
    sizes = " x ".join([f"{name}={n}" for name, n in mesh.items()])
    return (
        f"\n\nOn {sizes} one step takes about {seconds(took)}, of which "
        f"{seconds(waited)} are exposed communication; its graphs hold at most {peak:,} bytes on a rank "
        "(optimizer state not counted)."
    )


def _head(frames: list[Dumped], manifests: list[dict[str, Any]]) -> str:
    ranks, breaks = {f.rank for f in frames}, sum([len(m["graph_breaks"]) for m in manifests])
    again = sum([bool(m["recompiled"]) for m in manifests])
    return (
        f"{len(ranks)} {_plural('rank', len(ranks))}, {len(manifests)} compiled {_plural('frame', len(manifests))}, "
        f"{breaks} graph {_plural('break', breaks)}, {again} of the frames recompiled"
    )


def _plural(word: str, n: int) -> str:
    return word if n == 1 else f"{word}s"


def _graphs(graphs: list[tuple[Dumped, str, dict[str, Any]]]) -> list[str]:
    any_measured = any("measured" in g for *_, g in graphs)
    head = ["", "collectives", "bytes", "step", "computing", "communicating", "exposed", "peak memory"]
    rows = [tuple(head + (["measured", "exposed", "waiting to begin"] if any_measured else []))]
    for f, direction, g in graphs:
        assert f.manifest is not None
        t = f.manifest["totals"].get(direction, {"count": {}, "bytes": 0})
        m = g.get("measured")
        counted = " + ".join([f"{n} {op}" for op, n in Counter(t["count"]).most_common()]) or "none"
        times = [seconds(g[key]) for key in ("seconds", "computing", "communicating", "exposed")]
        row = [f"{f.name} {direction}", counted, f"{t['bytes']:,}", *times, f"{g['peak_bytes']:,}"]
        row += [seconds(m[key]) if m else "-" for key in ("seconds", "exposed", "agreeing")] if any_measured else []
        rows.append(tuple(row))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join([cell.ljust(n) for cell, n in zip(row, widths)]).rstrip() for row in rows]


def _decided(frames: list[Dumped]) -> list[str]:
    """Lines that say for which frames layouts were decided for the whole graph."""
    lines: list[str] = []
    for f in frames:
        d = (f.manifest or {}).get("decided")
        if d and d["why"]:
            lines.append(f"{f.name}: each operator chose its layouts: {d['why']}")
        elif d:
            missed = f"; {d['missed']} others chose for themselves" if d["missed"] else ""
            lines.append(
                f"{f.name}: layouts of {d['operators']} operators were decided together; by the model of cost no "
                f"others save more than {d['gap']:.2%}{missed}"
            )
    return lines


def _passes(manifests: list[dict[str, Any]]) -> list[str]:
    saved: dict[str, list[int]] = {}
    for m in manifests:
        for p in m["passes"]:
            found = saved.setdefault(p["pass"], [0, 0])
            found[0] += len(p["removed"])
            found[1] += p["bytes_saved"]
    lines = [f"  {name}: removed {n}, saved {b:,} bytes" for name, (n, b) in saved.items() if n or b]
    return ["", "What the passes removed from the joint graph and from its parts:", *lines] if lines else []


__all__ = [
    "changed",
    "described",
    "exposed_lines",
    "measured_line",
    "most_exposed",
    "remedy",
    "seconds",
    "step_line",
    "summary",
    "what",
]
__all__ += ["who"]
