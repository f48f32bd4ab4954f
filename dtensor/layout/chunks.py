"""How a length is split over the ranks of a mesh axis: in the same way as `torch.chunk`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_noting: list[list[tuple[Any, int]]] = []


def chunk_length(size: Any, parts: int, index: int) -> Any:
    """Length of chunk `index` when `torch.chunk` splits `size` elements into `parts`; 0 past the last chunk."""
    if size % parts == 0:
        return size // parts
    for noted in _noting:
        noted.append((size, parts))
    step = (size + parts - 1) // parts
    return min(step, max(size - index * step, 0))


@contextmanager
def uneven_noted() -> Iterator[list[tuple[Any, int]]]:
    """Collect what is split unevenly in the context: (size, parts). Only then do lengths depend on the rank."""
    _noting.append(found := [])
    try:
        yield found
    finally:
        _noting.remove(found)


__all__ = ["chunk_length", "uneven_noted"]
