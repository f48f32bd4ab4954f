"""A dump in a few lines: how much it communicates, what is most exposed, who asked for it, what the passes did."""

from collections import Counter
from pathlib import Path
from typing import Any

from .reading import Dumped, communicating, read

MOST = 5
"""Collectives that are named."""

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def summary(root: Path, most: int = MOST) -> str:
    """The text of a dump; see `described`.

    Raises:
        ValueError: there is no dump.
    """
    return described(read(root), most)


def described(frames: list[Dumped], most: int = MOST) -> str:
    """The text of some frames, as their first rank sees them."""
    first = min([f.rank for f in frames], default=0)
    mine = [f for f in frames if f.rank == first]
    manifests = [f.manifest for f in mine if f.manifest]
    graphs = [(f, d, g) for f in mine if f.manifest for d, g in f.manifest["graphs"].items()]
    lines = [_head(frames, manifests), *_graphs(graphs), "", *exposed_lines(communicating(frames, first), most)]
    return "\n".join([*lines, *_passes(manifests)])


def exposed_lines(found: list[tuple[Dumped, dict[str, Any]]], most: int) -> list[str]:
    """The most exposed collectives, with who asked for them and what changed them."""
    if not found:
        return ["Nothing is communicated."]
    order = sorted(found, key=lambda pair: -pair[1]["exposed"])
    lines = ["Most exposed collectives (estimated time in which a rank only waits for it):"]
    for k, (_, c) in enumerate(order[:most], 1):
        lines += [f"{k:>3}. {what(c)}", f"     {who(c)}", f"     {changed(c)}"]
        lines += [f"     bytes = {c['formula']['bytes']}"] if c["formula"] else []
    return lines


def what(c: dict[str, Any]) -> str:
    """Such as `12 µs of 15 µs exposed: all_reduce over tp in forward, 4,096 bytes, P->R`."""
    move = f", {c['move']}" if c["move"] else ""
    return (
        f"{seconds(c['exposed'])} of {seconds(c['seconds'])} exposed: {c['op']} over {c['axis']} in {c['direction']}, "
        f"{c['bytes']:,} bytes{move}"
    )


def who(c: dict[str, Any]) -> str:
    """Who asked for a collective."""
    said = {"explicit": "asked for", "implicit": "not asked for (implicit)"}.get(c["how"], c["how"])
    where = f" at {c['file']}:{c['line']}" if c["file"] else ""
    module = f" in module {c['module']}" if c["module"] else ""
    return f"{said}{where}{module}" + (f": {c['code']}" if c["code"] else "")


def changed(c: dict[str, Any]) -> str:
    """What the passes made of it."""
    number = len(c["asked"])
    stands = f" (stands for {number} that the program asked for)" if number > 1 else ""
    return (f"changed by {', '.join(c['passes'])}" if c["passes"] else "changed by no pass") + stands


def seconds(s: float) -> str:
    """A time with a fitting unit, such as `12.3 µs`."""
    unit, name = next(((u, n) for u, n in UNITS if s >= u), UNITS[-1])
    return f"{s / unit:.3g} {name}"


def step_line(root: Path, mesh: dict[str, int]) -> str:
    """What one step takes on a mesh, as predicted: the graphs of each function's last compilation, one after the other.

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
        f"{breaks} graph {_plural('break', breaks)}, {again} of the frames compiled again"
    )


def _plural(word: str, n: int) -> str:
    return word if n == 1 else f"{word}s"


def _graphs(graphs: list[tuple[Dumped, str, dict[str, Any]]]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("", "collectives", "bytes", "step", "computing", "communicating", "exposed", "peak memory")
    ]
    for f, direction, g in graphs:
        assert f.manifest is not None
        t = f.manifest["totals"].get(direction, {"count": {}, "bytes": 0})
        counted = " + ".join([f"{n} {op}" for op, n in Counter(t["count"]).most_common()]) or "none"
        times = [seconds(g[key]) for key in ("seconds", "computing", "communicating", "exposed")]
        rows.append((f"{f.name} {direction}", counted, f"{t['bytes']:,}", *times, f"{g['peak_bytes']:,}"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join([cell.ljust(n) for cell, n in zip(row, widths)]).rstrip() for row in rows]


def _passes(manifests: list[dict[str, Any]]) -> list[str]:
    saved: dict[str, list[int]] = {}
    for m in manifests:
        for p in m["passes"]:
            found = saved.setdefault(p["pass"], [0, 0])
            found[0] += len(p["removed"])
            found[1] += p["bytes_saved"]
    lines = [f"  {name}: removed {n}, saved {b:,} bytes" for name, (n, b) in saved.items() if n or b]
    return ["", "What the passes removed, of the joint graph and of its parts:", *lines] if lines else []


__all__ = ["changed", "described", "exposed_lines", "seconds", "step_line", "summary", "what", "who"]
