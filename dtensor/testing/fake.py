"""One process that acts as a rank of many: graphs, plans and rules for any mesh, without the other ranks."""

import contextlib
from typing import Any

import torch.distributed as dist

from ..torch_private.core import fake_store


@contextlib.contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Any:
    """Context with a default process group of `world_size` ranks of which only this one, `rank`, exists.

    Collectives return at once, with this rank's own data or zeros in place of the other ranks': shapes, placements,
    graphs and refusals are as on a real mesh, values are not.

    Raises:
        ValueError: there is a default process group already (torch's message).

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
