"""Parameters that were added after `fully_shard`: refused, or averaged by a call of their own."""

import pytest
import torch
from torch import nn

from dtensor import ShardingError, init_device_mesh
from dtensor.parallel import fully_shard
from dtensor.testing import with_ranks

ROWS = torch.linspace(-1, 1, 16).view(4, 4)


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.low = base, nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            self.low.weight.fill_(0.1)

    def forward(self, x):
        return self.base(x) + self.low(x)


def base():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)


def trained(model, x):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model[1].low.weight


@with_ranks(2)
def test_they_are_refused_unless_sharded_too(rank):
    mesh, part = init_device_mesh("cpu", (2,)), ROWS.chunk(2)[rank]
    model = base()
    model[1] = Adapter(model[1])
    want = trained(model, ROWS)

    model = fully_shard(base(), mesh)
    model[1] = Adapter(model[1])
    with pytest.raises(ShardingError, match=r"1\.low\.weight was added to Sequential after fully_shard.* or call "):
        trained(model, part)

    fully_shard(model[1].low, mesh)
    torch.testing.assert_close(trained(model, part).full_tensor(), want)

    step = torch.optim.SGD([ignored := nn.Parameter(torch.ones(2))], 1.0).step
    model = base()
    model.register_parameter("ignored", ignored)
    fully_shard(model, mesh, ignored_params=[ignored])
    ignored.grad = torch.ones(2)
    step()
    assert ignored.tolist() == [0, 0]
