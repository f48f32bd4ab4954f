"""`visualize`: who holds which part of a tensor, drawn as text and as a picture.

    DTensor, or shape, mesh and placements -> pieces: a box of the tensor, and its holders -> grids -> text, picture

A grid shows two dimensions, those that are cut; of what is cut in more, each part of the others has a grid of its own.
Nothing is communicated: what is shown follows from the layout, and is the same on all ranks.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..errors import ArgumentTypeError
from ..layout.layout import Layout
from ..layout.placements import as_placements
from .picture import drawn, is_possible
from .tensor import DTensor

Box = tuple[tuple[int, int], ...]
"""(begin, end) along each dimension."""

SIGNS = {"sum": " + ", "product": " × "}
"""Reduction of a partial axis -> what stands between its terms; others are written as functions: max(0, 1)."""

TERMS = 4
"""As many terms of a partial value, or ranks with a copy that do not follow each other, are written out."""

LINES = 24
"""As many rows of a grid are shown; of more, the first and the last ones."""


@dataclass(frozen=True)
class Grid:
    """Pieces of a tensor along two dimensions.

    Attributes:
        title: which part of the tensor it is, such as "[0:2, :, :]"; "" if it is all of it.
        rows, columns: (begin, end) of the pieces along each of the two; a dimension that is not there has one, (0, 1).
        holders: text for each row and column, such as "ranks 0, 1".
    """

    title: str
    rows: tuple[tuple[int, int], ...]
    columns: tuple[tuple[int, int], ...]
    holders: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Visualization:
    """Who holds which part of a tensor. `str` draws it with letters; notebooks show the picture.

    Attributes:
        title: dtype, shape, mesh and placements.
        ndim: number of dimensions of the tensor.
        dims: the dimensions that rows and columns show; fewer for tensors with fewer.
        grids: the parts.
        empty: which ranks hold nothing; "" if there are none.
    """

    title: str
    ndim: int
    dims: tuple[int, ...]
    grids: tuple[Grid, ...]
    empty: str

    def __str__(self) -> str:
        return self.text(shutil.get_terminal_size((100, 24)).columns)

    __repr__ = __str__

    def text(self, width: int = 100) -> str:
        """The drawing as text. Grids that are wider than `width` characters become lists."""
        lines = [self.title]
        if self.ndim > 2:
            lines.append(f"down: dim {self.dims[0]}, across: dim {self.dims[1]}")
        for grid in self.grids:
            lines += [grid.title] if grid.title else []
            lines += _lines(grid, self.dims, width)
        return "\n".join([*lines, *([self.empty] if self.empty else [])])

    def figure(self) -> Any:
        """The picture, a matplotlib.figure.Figure. Sizes in it are those of the tensor, up to a factor of four.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        return drawn(self.title, self.dims, self.grids, self.empty)

    def save(self, path: str | Path) -> None:
        """Write the picture to a file, whose ending (.png, .svg, .pdf) says how.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: matplotlib does not know the ending.
        """
        self.figure().savefig(path, bbox_inches="tight")

    def _repr_png_(self) -> bytes | None:
        """For notebooks."""
        if not is_possible():
            return None
        file = BytesIO()
        self.figure().savefig(file, format="png", bbox_inches="tight", dpi=100)
        return file.getvalue()


def visualize(x: Any, mesh: DeviceMesh | None = None, placements: Sequence[Any] | None = None) -> Visualization:
    """Show which rank holds which part of `x`. Nothing is communicated.

    "ranks 0, 1" hold copies (replicated); of "ranks 0 + 1" each holds a term of a sum (partial).

    Args:
        x: a DTensor; or the shape of a tensor that does not exist yet, with `mesh` and `placements`.
        mesh: a DeviceMesh; or sizes of axes, such as (2, 4) or {"dp": 2, "tp": 4}, for which no ranks are needed.
        placements: one for each axis; None for replicated.

    Returns:
        What `print` draws with letters, a notebook as a picture, and `save(path)` into a file.

    Raises:
        TypeError: `x` is neither, a shape comes without a mesh, or a DTensor with one.
        PlacementError: the placements do not fit.

    Example:
        >>> print(dtensor.visualize((5, 6), {"dp": 2, "tp": 2}, [Shard(0), Shard(1)]))
        (5, 6) on a mesh dp=2, tp=2: Shard(0) over dp, Shard(1) over tp
              0:3      3:6
            ┌────────┬────────┐
        0:3 │ rank 0 │ rank 1 │
            ├────────┼────────┤
        3:5 │ rank 2 │ rank 3 │
            └────────┴────────┘
    """
    if isinstance(x, DTensor):
        if mesh is not None or placements is not None:
            raise ArgumentTypeError(
                "a DTensor has a mesh and placements; write visualize(x), or visualize(x.shape, mesh, …)"
            )
        spec = x._spec
        shape, layout, kind = tuple(map(int, spec.shape)), spec.layout, f"{x.dtype} ".removeprefix("torch.")
        names, sizes, ranks = _axes(x.device_mesh)
    else:
        shape, kind = _checked_shape(x), ""
        if mesh is None:
            raise ArgumentTypeError(
                "a shape needs a mesh and placements: visualize((8, 6), mesh, [Shard(0)]), where mesh may also be "
                'sizes, such as {"tp": 2}'
            )
        names, sizes, ranks = _axes(mesh)
        layout = Layout.of(as_placements(placements, len(sizes), len(shape)), len(shape))
    pieces, nothing = _pieces(shape, layout, sizes, ranks)
    dims = _shown_dims(pieces, shape)
    on = ", ".join(f"{name}={size}" for name, size in zip(names, sizes))
    how = ", ".join(f"{_written(p)} over {name}" for name, p in zip(names, layout.placements))
    title = f"{kind}{shape} on a mesh {on}: {how}"
    empty = f"{ranks_text(nothing)}: nothing" if nothing else ""
    return Visualization(title, len(shape), dims, _grids(pieces, dims, shape), empty)


def _checked_shape(x: Any) -> tuple[int, ...]:
    if isinstance(x, (tuple, list)) and all(isinstance(n, int) and n >= 0 for n in x):
        return tuple(x)
    what = "a plain tensor, which every rank has for itself" if hasattr(x, "untyped_storage") else repr(x)
    raise ArgumentTypeError(
        f"visualize takes a DTensor, or the shape of a tensor with a mesh and placements; got {what}"
    )


def _axes(mesh: DeviceMesh) -> tuple[tuple[str, ...], tuple[int, ...], list[int]]:
    """Names and sizes of the axes of a mesh, and its ranks with the last axis fastest."""
    if hasattr(mesh, "device_type"):
        sizes, ranks, names = tuple(mesh.shape), mesh.mesh.flatten().tolist(), mesh.mesh_dim_names
    else:
        names = tuple(mesh) if isinstance(mesh, Mapping) else None
        sizes = tuple(mesh.values()) if isinstance(mesh, Mapping) else mesh
        if not isinstance(sizes, (tuple, list)) or not all(isinstance(n, int) and n > 0 for n in sizes) or not sizes:
            raise ArgumentTypeError(
                f'mesh must be a DeviceMesh or sizes, such as (2, 4) or {{"dp": 2, "tp": 4}}; got {mesh!r}'
            )
        ranks = list(range(prod(sizes)))
    return tuple(names or [f"axis {i}" for i in range(len(sizes))]), tuple(sizes), ranks


def _written(placement: Any) -> str:
    """As users write it; in what order axes cut is told where it matters."""
    if placement.is_shard():
        cut = "" if placement.cut is None else f", cut={placement.cut}"
        return f"Shard({placement.dim}{cut})"
    if placement.is_partial():
        return f"Partial({'' if placement.reduce_op == 'sum' else repr(placement.reduce_op)})".replace("'", '"')
    return "Replicate()"


def _pieces(
    shape: tuple[int, ...], layout: Layout, sizes: tuple[int, ...], ranks: list[int]
) -> tuple[dict[Box, str], list[int]]:
    """Box -> its holders, and the ranks that hold nothing."""
    partial = dict(layout.partial)
    holders: dict[Box, dict[tuple[int, ...], dict[tuple[int, ...], int]]] = {}
    nothing = []
    for rank, at in zip(ranks, product(*map(range, sizes))):
        box = layout.local_box(shape, sizes, at)
        if any(begin == end for (begin, end), size in zip(box, shape) if size):
            nothing.append(rank)
            continue
        copy = tuple([i for axis, i in enumerate(at) if axis not in partial])
        term = tuple([at[axis] for axis in partial])
        holders.setdefault(box, {}).setdefault(copy, {})[term] = rank
    ops = tuple(partial.values())
    texts = {box: _holders([_combined(terms, ops) for terms in copies.values()]) for box, copies in holders.items()}
    return texts, nothing


def _combined(terms: dict[tuple[int, ...], int], ops: tuple[str, ...]) -> str:
    """A value of which ranks hold terms: over the first partial axis, of what each of its indices stands for."""
    if not ops:
        return str(terms[()])
    parts: dict[int, dict[tuple[int, ...], int]] = {}
    for (first, *rest), rank in terms.items():
        parts.setdefault(first, {})[tuple(rest)] = rank
    texts = [_combined(part, ops[1:]) for part in parts.values()]
    if len(texts) > TERMS:
        texts = [*texts[:2], "…", texts[-1]]
    sign = SIGNS.get(ops[0])
    if sign is None:
        return f"{ops[0]}({', '.join(texts)})"
    other = ops[1:] and ops[1] in SIGNS and ops[1] != ops[0]
    return sign.join([f"({text})" if other else text for text in texts])


def _holders(copies: list[str]) -> str:
    if all(copy.isdigit() for copy in copies):
        return ranks_text(sorted(map(int, copies)))
    shown = copies if len(copies) <= TERMS else [*copies[:2], "…", copies[-1]]
    return f"ranks {', '.join(shown)}"


def ranks_text(ranks: list[int]) -> str:
    """[0] -> "rank 0", [0, 1] -> "ranks 0, 1", [0, 1, 2, 3, 6] -> "ranks 0-3, 6"; the numbers ascend."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    shown = [f"{p[0]}-{p[-1]}" if len(p) > 2 else ", ".join(map(str, p)) for p in parts]
    if len(shown) > TERMS:
        shown = [*shown[:2], "…", shown[-1]]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}"


def _shown_dims(pieces: dict[Box, str], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions for rows and columns: the last two that are cut, or one that is cut and a neighbour."""
    ndim = len(shape)
    cut = [dim for dim in range(ndim) if len({box[dim] for box in pieces}) > 1]
    if ndim < 2:
        return tuple(range(ndim))
    if len(cut) >= 2:
        return cut[-2], cut[-1]
    if cut and cut[0] < ndim - 1:
        return cut[0], ndim - 1
    return ndim - 2, ndim - 1


def _grids(pieces: dict[Box, str], dims: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Grid, ...]:
    whole = tuple([(0, size) for size in shape])
    grids: dict[Box, dict[tuple[Any, ...], str]] = {}
    for box, holders in pieces.items():
        outer = tuple([part for dim, part in enumerate(box) if dim not in dims])
        rows, columns = ([(0, 1), (0, 1)] + [box[dim] for dim in dims])[-2:]
        grids.setdefault(outer, {})[rows, columns] = holders
    made = []
    for outer, cells in sorted(grids.items()):
        others = iter(outer)
        parts = [":" if dim in dims else _range(next(others), whole[dim]) for dim in range(len(shape))]
        rows, columns = (tuple(sorted({cell[i] for cell in cells})) for i in (0, 1))
        holders = tuple([tuple([cells.get((r, c), "") for c in columns]) for r in rows])
        made.append(Grid(f"[{', '.join(parts)}]" if len(grids) > 1 else "", rows, columns, holders))
    return tuple(made)


def _range(part: tuple[int, int], whole: tuple[int, int]) -> str:
    return ":" if part == whole else f"{part[0]}:{part[1]}"


def _lines(grid: Grid, dims: tuple[int, ...], width: int) -> list[str]:
    """A grid as text: boxes if they fit, or else a list."""
    left = [f"{b}:{e}" for b, e in grid.rows] if len(dims) == 2 else ["" for _ in grid.rows]
    top = [f"{b}:{e}" for b, e in grid.columns] if dims else ["" for _ in grid.columns]
    widths = [max(len(t), *[len(row[i]) for row in grid.holders]) for i, t in enumerate(top)]
    margin = max(map(len, left))
    if margin + sum(widths) + 3 * len(widths) + 2 > width:
        return _list(grid, left, top)
    indent = f"{'':{margin}} " if margin else ""

    def line(begin: str, between: str, end: str) -> str:
        return indent + begin + between.join(["─" * (w + 2) for w in widths]) + end

    rows = [
        (f"{label:>{margin}} " if margin else "") + "│" + "│".join([f" {h:^{w}} " for h, w in zip(row, widths)]) + "│"
        for label, row in zip(left, grid.holders)
    ]
    rule = line("├", "┼", "┤")
    drawn_ = [rows[0], *[text for row in rows[1:] for text in (rule, row)]]
    if len(rows) > LINES:
        half = LINES // 2
        drawn_ = [*drawn_[: 2 * half], f"{indent}… {len(rows) - 2 * half} more", *drawn_[-2 * half :]]
    head = [(indent + " " + " ".join([f" {t:<{w}} " for t, w in zip(top, widths)])).rstrip()] if dims else []
    return [*head, line("┌", "┬", "┐"), *drawn_, line("└", "┴", "┘")]


def _list(grid: Grid, left: list[str], top: list[str]) -> list[str]:
    found = [
        (f"[{', '.join([part for part in (row, column) if part])}]", holders)
        for row, texts in zip(left, grid.holders)
        for column, holders in zip(top, texts)
    ]
    margin = max(len(place) for place, _ in found)
    lines = [f"  {place:<{margin}}  {holders}" for place, holders in found]
    if len(lines) > LINES:
        half = LINES // 2
        lines = [*lines[:half], f"  … {len(lines) - 2 * half} more", *lines[-half:]]
    return lines


__all__ = ["Grid", "Visualization", "ranks_text", "visualize"]
