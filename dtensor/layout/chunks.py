"""How a length is cut over the ranks of a mesh axis: as `torch.chunk` cuts."""

from typing import Any


def chunk_length(size: Any, parts: int, index: int) -> Any:
    """Length of chunk `index` when `size` elements are cut into `parts` as `torch.chunk` cuts; 0 past the end."""
    if size % parts == 0:
        return size // parts
    step = (size + parts - 1) // parts
    return min(step, max(size - index * step, 0))


__all__ = ["chunk_length"]
