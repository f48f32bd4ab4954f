"""`fake_ranks`: a single process acts as one rank of many.

This gives graphs, plans and sharding rules for any mesh without starting the other ranks.
"""

import contextlib
from typing import Any

import torch.distributed as dist

from ..torch_private.core import fake_store


@contextlib.contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Any:
    """Context manager with a default process group of `world_size` ranks, of which only this process exists.

    Collectives return at once, with this rank's own data or zeros in place of the data of other ranks. Shapes,
    placements, graphs and errors are as on a real mesh, but values are not.

    Args:
        world_size: number of ranks of the process group.
        rank: the rank of this process.

    Raises:
        ValueError: a default process group exists already (the message is torch's).

    Example:
        >>> with fake_ranks(8):
        ...     init_device_mesh("cpu", (2, 4)).get_coordinate()
        [0, 0]
    """
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()


__all__ = ["fake_ranks"]
