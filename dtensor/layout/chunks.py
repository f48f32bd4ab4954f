"""How a length is split over the ranks of a mesh axis: in the same way as `torch.chunk`."""

from typing import Any


def chunk_length(size: Any, parts: int, index: int) -> Any:
    """Length of chunk `index` when `torch.chunk` splits `size` elements into `parts`; 0 past the last chunk."""
    if size % parts == 0:
        return size // parts
    step = (size + parts - 1) // parts
    return min(step, max(size - index * step, 0))


__all__ = ["chunk_length"]
