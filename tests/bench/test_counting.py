"""What the counting process group over gloo takes down, and sends again."""

import pytest
import torch
import torch.distributed as dist

from bench.counting import counted, silent
from bench.ranks import on_ranks
from dtensor.comm.start_collectives import OVER_GLOO
from dtensor.torch_private.core import c10d

WAIT = c10d.wait_tensor.default


def sends(rank, end=None):
    group = dist.group.WORLD.group_name  # pyright: ignore
    x = torch.full((2, 3), float(rank))

    def work():
        a, b = OVER_GLOO.all_to_all(x, [1, 1], [1, 1], group), OVER_GLOO.all_gather(x, 2, group)
        return WAIT(a).sum().item(), WAIT(b).sum().item(), WAIT(c10d.all_reduce(x, "sum", group)).sum().item()

    with counted() as counts:
        found = work()
    counts.replayed()
    with silent():
        alone = work()
    return found, alone, dict(counts.collectives), counts.bytes


@pytest.mark.nightly
def test_messages_are_counted_and_sent_again():
    """A row to the other rank, all of it, and a sum, of which a ring sends as much as it has; 12 bytes a row."""
    found, alone, collectives, sent = on_ranks(sends, 2)
    assert (found, collectives, sent) == ((3.0, 6.0, 6.0), {"send": 2, "all_reduce": 1}, 12 + 24 + 24)
    assert alone == (0.0, 0.0, 0.0)  # of the first rank, which holds zeros
