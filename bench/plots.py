"""Plots of records: the ratios of each case, a dot with quartiles for each peer, on a logarithmic axis."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .record import OURS, Record
from .table import latest

MOST_ROWS = 60
"""The most figures in a plot; if a case has more, figures of steps take precedence."""


def draw(records: Sequence[Record], folder: Path) -> dict[str, Path]:
    """Write a plot for each case that has ratios, and return case -> file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    plt = importlib.import_module("matplotlib.pyplot")  # imported here, so that cases run without it
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    kept = [r for r in latest(records) if r.ratio]
    for case in dict.fromkeys(r.case for r in kept):
        figure = _draw([r for r in kept if r.case == case], plt)
        found[case] = folder / f"{case}.svg"
        with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": case}):  # text stays text; reproducible
            figure.savefig(found[case], metadata={"Date": None})
        plt.close(figure)
    return found


def _label(r: Record) -> str:
    side = "" if r.side == OURS else r.side
    words = [side, r.model, r.plan, f"{r.ranks} ranks" if r.ranks > 1 else "", r.link, r.figure]
    return " ".join(w for w in words if w)


def _draw(records: list[Record], plt: Any) -> Any:
    rows = list(dict.fromkeys(_label(r) for r in sorted(records, key=lambda r: "step" not in r.figure)))[:MOST_ROWS]
    peers = list(dict.fromkeys(r.peer for r in records))
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.26 * len(rows)), layout="constrained")
    for k, peer in enumerate(peers):
        mine = [r for r in records if r.peer == peer and _label(r) in rows]
        y = [rows.index(_label(r)) + 0.16 * (k - (len(peers) - 1) / 2) for r in mine]
        ratios = [r.ratio or 0.0 for r in mine]
        spreads = [r.spread or (x, x) for r, x in zip(mine, ratios)]
        error = [[max(0.0, x - a) for x, (a, _) in zip(ratios, spreads)]]
        error += [[max(0.0, b - x) for x, (_, b) in zip(ratios, spreads)]]
        axes.errorbar(ratios, y, xerr=error, fmt="o", markersize=4, label=peer)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", yticks=range(len(rows)), yticklabels=rows, xlabel="ratio to the peer; left is better")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=7, loc="best")
    return figure


__all__ = ["draw"]
