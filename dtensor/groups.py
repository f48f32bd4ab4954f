"""Process groups by name, and how their ranks cut a length: what operators and sizes of shards ask."""

import torch

from ._torch import resolve_process_group


def group_size(group: str) -> int:
    """Number of ranks of the named process group."""
    return resolve_process_group(group).size()


def group_rank(group: str) -> int:
    """This process's rank within the named process group."""
    return resolve_process_group(group).rank()


def group_ranks(group: str) -> tuple[int, ...]:
    """Global ranks of the named process group, in group order."""
    return tuple(torch.distributed.get_process_group_ranks(resolve_process_group(group)))


def chunk_length(size, parts: int, index: int):
    """Length of chunk `index` when `size` elements are cut into `parts` as `torch.chunk` cuts; 0 past the end."""
    if size % parts == 0:
        return size // parts
    step = (size + parts - 1) // parts
    return min(step, max(size - index * step, 0))


__all__ = ["chunk_length", "group_rank", "group_ranks", "group_size"]
