"""How a length is split over the ranks of a mesh axis: in the same way as `torch.chunk`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..torch_private.core import constant_in_traces

Lengths = dict[tuple[int, str], int]
"""(length, name of the group that it is split over) -> length of this rank's part."""

_noting: list[Lengths] = []


def chunk_length(size: Any, parts: int, index: int) -> Any:
    """Length of chunk `index` when `torch.chunk` splits `size` elements into `parts`; 0 past the last chunk."""
    if size % parts == 0:
        return size // parts
    step = (size + parts - 1) // parts
    return min(step, max(size - index * step, 0))


def own_length(size: int, parts: int, index: int, group: str) -> int:
    """`chunk_length` of this rank, which has this index in the group of that name ("" if its name is unknown): noted
    where it is not that of all ranks."""
    length = chunk_length(size, parts, index)
    if size % parts != 0:
        _note(size, group, length)
    return length


def note_place() -> None:
    """Note that what is traced depends on where in the mesh this rank is, whatever its lengths are."""
    _note(0, "", 0)


@constant_in_traces  # Dynamo, which traces the callers, calls it while it traces
def _note(size: int, group: str, length: int) -> None:
    for noted in _noting:
        noted[size, group] = length


@contextmanager
def uneven_noted() -> Iterator[Lengths]:
    """Collect in the context what is split unevenly, and how long this rank's part is.

    A trace depends on the rank through these alone. A length that is split over one group after another is noted with
    each; one over the group "" says that the trace holds for this rank only.
    """
    _noting.append(found := {})
    try:
        yield found
    finally:
        _noting[:] = [noted for noted in _noting if noted is not found]


__all__ = ["Lengths", "chunk_length", "note_place", "own_length", "uneven_noted"]
