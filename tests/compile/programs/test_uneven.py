"""Uneven and empty shards compiled: local sizes differ between ranks, the order of the collectives must not."""

import torch
import torch.nn.functional as F

from dtensor import Partial, Replicate, Shard, init_device_mesh
from dtensor.testing import with_ranks
from dtensor.testing.rules.operators import Sample, disagreement


def t(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).requires_grad_()


CASES = {
    # The partitioner saved one operand of the backward gathered on one rank and not on the other.
    "saved operands": (torch.baddbmm, (t(5, 5, 10), t(5, 5, 5), t(5, 5, 10)), (Shard(0), Partial(), Shard(2))),
    # The second rank has no sample, so needs no bias; the first one waited for its part.
    "an empty shard": (F.conv3d, (t(1, 1, 4, 4, 4), t(1, 1, 4, 5, 3), t(1)), (Shard(2), Replicate(), Partial())),
    # The backward read the running variance on the ranks that have channels only.
    "an empty shard of what is not read": (
        F.batch_norm,
        (t(5, 1, 5), torch.zeros(1), torch.ones(1), t(1), t(1)),
        (Shard(1), Shard(0), Partial(), Shard(0), Replicate()),
    ),
    "lookups in an empty table": (F.embedding, (torch.tensor([0, 0]), t(1, 3)), (Shard(0), Shard(0))),
}


@with_ranks(2)
def test_collectives_keep_one_order(rank):
    mesh = init_device_mesh("cpu", (2,))
    for name, (call, args, placements) in CASES.items():
        options = {F.conv3d: {"padding": 1}, F.batch_norm: {"training": True}}.get(call, {})
        torch._dynamo.reset()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        where = tuple((p,) for p in placements)
        assert disagreement(Sample(name, call, args, options), mesh, where, compiled=compiled) is None, name
