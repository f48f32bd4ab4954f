"""Draws the grids of `visualize` with matplotlib, which is optional and imported when a picture is asked for."""

import importlib.util
from collections.abc import Sequence
from typing import Any

COLORS = ("#9ec5f4", "#f7c69b", "#a8dcb5", "#f2aeb1", "#c9b8ec", "#d8c3a5", "#f3c4e3", "#bfe3e8", "#dfe59c", "#c8c8c8")
"""Fill of the cells. Cells with the same holders have the same color."""

SIDE = 3.0
"""Inches of the longer side of a grid; the shorter one is at least a `RATIO` of it."""

RATIO = 0.25

LINE, LETTER = 0.14, 0.075
"""Inches of a line of text and of a letter; smaller cells have no text."""

MANY = 24
"""For as many cells along a dimension a grid is made large enough for their text."""


def is_possible() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def drawn(title: str, dims: tuple[int, ...], grids: Sequence[Any], empty: str) -> Any:
    """The figure for the grids of a `Visualization`, beside each other.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    if not is_possible():
        raise ModuleNotFoundError(
            "a picture needs matplotlib, which is not installed; write: pip install 'dtensor-compile[plot]', "
            "or print(...) for a drawing with letters"
        )
    from matplotlib.figure import Figure  # optional, and slow to import

    columns = min(len(grids), 4)
    rows = -(-len(grids) // columns)
    sizes = [_size(grid, dims) for grid in grids]
    width, height = max(w for w, _ in sizes), max(h for _, h in sizes)
    figure = Figure(figsize=(columns * (width + 0.7), rows * (height + 0.6) + 0.4))
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    holders = list(dict.fromkeys(text for grid in grids for row in grid.holders for text in row))
    colors = {text: COLORS[i % len(COLORS)] for i, text in enumerate(holders)}
    for ax in axes[len(grids) :]:
        ax.set_visible(False)
    for grid, ax in zip(grids, axes):
        _draw(ax, grid, dims, colors, _size(grid, dims))
    figure.suptitle(title.replace(": ", ":\n", 1), fontsize=9)
    if empty:
        figure.text(0.5, 0.0, empty, ha="center", va="top", fontsize=8)
    figure.tight_layout()
    return figure


def _lengths(grid: Any) -> tuple[int, int]:
    """How many rows and columns of the tensor a grid shows."""
    return max(1, grid.rows[-1][1]), max(1, grid.columns[-1][1])


def _size(grid: Any, dims: tuple[int, ...]) -> tuple[float, float]:
    """Width and height in inches: those of the tensor, as far as that leaves room for the text."""
    down, across = _lengths(grid)
    ratio = max(RATIO, min(1 / RATIO, down / across)) if dims else RATIO
    width, height = (SIDE, SIDE * ratio) if ratio <= 1 else (SIDE / ratio, SIDE)
    longest = max(len(text) for row in grid.holders for text in row)
    width = max(width, LETTER * (longest + 1) * min(len(grid.columns), MANY))
    return width, max(height, 2 * LINE * min(len(grid.rows), MANY))


def _draw(ax: Any, grid: Any, dims: tuple[int, ...], colors: dict[str, str], size: tuple[float, float]) -> None:
    from matplotlib.patches import Rectangle  # optional, and slow to import

    down, across = _lengths(grid)
    for (top, bottom), row in zip(grid.rows, grid.holders):
        for (left, right), text in zip(grid.columns, row):
            wide, high = right - left or 1, bottom - top or 1
            partial = any(sign in text for sign in ("+", "×", "("))
            hatch: dict[str, Any] = {"hatch": "//", "edgecolor": "white"} if partial else {"edgecolor": "none"}
            ax.add_patch(Rectangle((left, top), wide, high, facecolor=colors[text], linewidth=0, **hatch))
            ax.add_patch(Rectangle((left, top), wide, high, fill=False, edgecolor="black", linewidth=0.8))
            if size[1] * high / down >= LINE and size[0] * wide / across >= LETTER * len(text):
                ax.text(left + wide / 2, top + high / 2, text, ha="center", va="center", fontsize=8)
    ax.set_xlim(0, across)
    ax.set_ylim(down, 0)
    ax.set_title(grid.title, fontsize=8)
    for axis, ranges, shown in ((ax.xaxis, grid.columns, bool(dims)), (ax.yaxis, grid.rows, len(dims) == 2)):
        ends = sorted({end for each in ranges for end in each}) if shown else []
        axis.set_ticks(ends if len(ends) <= 20 else [ends[0], ends[-1]])
        axis.set_tick_params(labelsize=7, length=2)
    ax.xaxis.tick_top()
    if len(dims) == 2:
        ax.set_ylabel(f"dim {dims[0]}", fontsize=7)
    if dims:
        ax.set_xlabel(f"dim {dims[-1]}", fontsize=7)
        ax.xaxis.set_label_position("top")


__all__ = ["drawn", "is_possible"]
