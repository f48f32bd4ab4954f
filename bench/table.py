"""Markdown tables of records: a section for each case, a row for each figure, a column for each peer.

A cell holds the ratio to the peer, with its quartiles if it was timed; below one is better. Ratios above one are bold.
If a peer, or this library, cannot run something, the cell refers to a numbered note. A summary is above each table. A
case that was run with several versions of torch has a column for each peer and version; its values are those of the
first.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from .record import Record

Key = tuple[str, ...]
BEHIND = 1.005
"""Larger ratios are shown in bold."""

UNITS = {"bytes": lambda v: f"{v:,.0f} B", "ms": lambda v: f"{v:,.2f} ms", "µs": lambda v: f"{v:,.1f} µs"}


def latest(records: Sequence[Record]) -> list[Record]:
    """Return the last record of each figure, in the order in which the figures first appear.

    If a case was run with several versions of torch, the names of peers include the version.
    """
    found: dict[Key, Record] = {}
    for r in records:
        found[*_key(r), r.peer, _torch(r)] = r
    versions = {(r.case, _torch(r)) for r in found.values()}
    several = {case for case, n in Counter(case for case, _ in versions).items() if n > 1}
    return [replace(r, peer=f"{r.peer} ({_torch(r)})") if r.peer and r.case in several else r for r in found.values()]


def _torch(r: Record) -> str:
    """Return the version of torch, such as "2.13"."""
    return ".".join((r.versions or {}).get("torch", "").split(".")[:2])


def _key(r: Record) -> Key:
    return r.case, r.model, r.plan, str(r.ranks), r.link, r.figure, r.side


def markdown(records: Sequence[Record], pictures: Mapping[str, Path] | None = None) -> str:
    """Return the records as markdown; `pictures` are the plots to show under the headings of their cases."""
    records, lines = latest(records), []
    for case in dict.fromkeys(r.case for r in records):
        mine = [r for r in records if r.case == case]
        lines += [f"## {case}", ""]
        if pictures and case in pictures:
            lines += [f"![{case}: ratios to each peer]({pictures[case].as_posix()})", ""]
        if verdict := _verdict(mine):
            lines += [verdict, ""]
        lines += [*_table(mine), ""]
    return "\n".join(lines + _where(records)) + "\n"


def _verdict(records: Sequence[Record]) -> str:
    """Summarize each peer: the number of figures not behind it, the median ratio, and the worst figure."""
    said = []
    for peer in dict.fromkeys(r.peer for r in records):
        found = [(r.ratio, r) for r in records if r.peer == peer and r.ratio is not None]
        if not found:
            continue
        behind = [ratio for ratio, _ in found if ratio > BEHIND]
        text = f"{len(found) - len(behind)} of {len(found)} figures not behind {peer}"
        text += f", median {median([ratio for ratio, _ in found]):.2f}"
        if behind:
            worst, where = max(found, key=lambda pair: pair[0])
            text += f", worst {worst:.2f} ({' '.join(filter(None, [where.model, where.plan, where.figure]))})"
        said.append(text)
    return "; ".join(said) + "." if said else ""


def _table(records: Sequence[Record]) -> list[str]:
    peers = [p for p in dict.fromkeys(r.peer for r in records) if p]
    head = [n for n in ("model", "plan", "ranks", "link") if len({getattr(r, n) for r in records}) > 1]
    head += ["figure", "side"] if len({r.side for r in records}) > 1 else ["figure"]
    lines = ["| " + " | ".join([*head, "value", *peers]) + " |", "|" + "---|" * (len(head) + 1 + len(peers))]
    notes: list[str] = []
    for key in dict.fromkeys(map(_key, records)):
        row = [r for r in records if _key(r) == key]
        cells = [str(getattr(row[0], n)) for n in head]
        value = next((r for r in row if r.value is not None), row[0])
        cells.append(_value(value.value, value.unit) if value.value is not None or value.peer else _noted(value, notes))
        by_peer = {r.peer: r for r in row}
        cells += [_cell(by_peer[p], notes) if p in by_peer else "" for p in peers]
        lines.append("| " + " | ".join(cells) + " |")
    return lines + ([""] if notes else []) + [f"{n}. {note}" for n, note in enumerate(notes, 1)]


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return UNITS[unit](value) if unit in UNITS else f"{value:,.4g} {unit}".strip()


def _cell(r: Record, notes: list[str]) -> str:
    if r.ratio is None:
        return _noted(r, notes) if r.value is None else f"to {_value(r.peer_value, r.unit)}"
    text = f"**{r.ratio:.2f}**" if r.ratio > BEHIND else f"{r.ratio:.2f}"
    return text + (f" ({r.spread[0]:.2f} to {r.spread[1]:.2f})" if r.spread else "")


def _noted(r: Record, notes: list[str]) -> str:
    note = " ".join(r.note.split()).replace("|", "\\|") or "not measured"
    if note not in notes:
        notes.append(note)
    return f"({notes.index(note) + 1})"


def _where(records: Sequence[Record]) -> list[str]:
    seen = {str((r.machine, r.versions)): r for r in records if r.machine}
    lines = []
    for r in seen.values():
        machine = ", ".join(f"{k} {v}" for k, v in (r.machine or {}).items())
        lines.append(f"Measured on: {machine}; {', '.join(f'{k} {v}' for k, v in (r.versions or {}).items())}.")
    return lines


__all__ = ["latest", "markdown"]
