"""Whole values: puts the shards that ranks kept (`dtensor.record(values=...)`) together, to find the worst element."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .values import RecordedRun, RecordedValue

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Worst:
    """The element of two tensors that differs most.

    Attributes:
        index: its index in the global tensor.
        a, b: its value in each.
        count: how many elements differ by more than `near` times as much as the largest of A allows.
        size: number of elements.
        around: the values next to it along the last dim, in each.
    """

    index: tuple[int, ...]
    a: float | complex
    b: float | complex
    count: int
    size: int
    around: tuple[list[Any], list[Any]]

    def __str__(self) -> str:
        at = ", ".join(map(str, self.index))
        around = [", ".join(f"{x:.6g}" for x in values) for values in self.around]
        return (
            f"element [{at}] is {self.a:.9g} in A and {self.b:.9g} in B; "
            f"{self.count:,} of {self.size:,} elements differ\n"
            f"around it    A: {around[0]}\n             B: {around[1]}"
        )


def worst(a: RecordedValue, b: RecordedValue, run_a: RecordedRun, run_b: RecordedRun, rank: int = 0) -> Worst | None:
    """The worst element of a value that both runs kept whole; None if one of them did not, or is not known globally.

    Args:
        a, b: the value in each run.
        run_a, run_b: the runs.
        rank: whose copy to look at where ranks hold plain tensors.
    """
    x, y = whole(a, run_a.folder, rank), whole(b, run_b.folder, rank)
    if x is None or y is None or x.shape != y.shape or not x.size:
        return None
    with np.errstate(invalid="ignore"):
        apart = np.abs(y.astype(np.complex128) - x.astype(np.complex128))
    apart = np.where(np.isnan(apart), np.inf, apart)
    index = tuple([int(i) for i in np.unravel_index(int(np.argmax(apart)), x.shape)])
    scale = float(np.abs(x[np.isfinite(x)]).max(initial=0.0))
    *rest, last = index or (0,)
    rows = (x.reshape(-1) if not index else x[tuple(rest)], y.reshape(-1) if not index else y[tuple(rest)])
    near = slice(max(last - 2, 0), last + 3)
    around = tuple([[v.item() for v in np.atleast_1d(row)[near]] for row in rows])
    count = int((apart > 1e-6 * scale).sum())
    return Worst(index, x[index].item(), y[index].item(), count, x.size, (around[0], around[1]))


def whole(value: RecordedValue, folder: Path, rank: int = 0) -> Array | None:
    """The global tensor, of plain tensors that of `rank`; None if a rank did not keep its part."""
    found: Array | None = None
    for part in value.parts.values():
        name = part.line.get("v")
        if not name:
            return None
        local = np.load(folder / name)
        spec = part.spec
        if spec is None:
            if len(value.parts) == 1 or part.rank == rank:
                return local
            continue
        if any(op not in ("sum", "avg") for op in spec.partial.values()):
            return None
        if any(spec.coordinate(part.rank)[a] for a in spec.replicated):
            continue  # a copy
        mean = float(np.prod([spec.mesh.shape[a] for a, op in spec.partial.items() if op == "avg"] or [1]))
        if found is None:
            found = np.zeros(spec.shape, dtype=local.dtype if mean == 1 else np.result_type(local, np.float64))
        found[tuple([slice(x, y) for x, y in spec.box(part.rank)])] += local if mean == 1 else local / mean
    return found


__all__ = ["Worst", "whole", "worst"]
