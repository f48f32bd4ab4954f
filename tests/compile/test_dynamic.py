"""Symbolic sizes: a view keeps its shard under a guard on divisibility, and one graph serves all sizes that pass it."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor import DTensor, Shard, init_device_mesh


@pytest.fixture
def mesh():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()
    torch._dynamo.reset()


def rows(mesh, n):
    return DTensor.from_local(torch.arange(n / 2 * 6).view(n // 2, 6), mesh, [Shard(0)])


VIEWS = {
    "split": lambda x: x.view(x.shape[0] // 2, 2, 6),
    "merge": lambda x: x.view(x.shape[0] * 6),
    "flatten and back": lambda x: (x + 1).flatten().view(-1, 3, 2).transpose(1, 2),
    "heads": lambda x: x.view(x.shape[0] // 4, 4, 3, 2).transpose(1, 2).reshape(x.shape[0] // 4, 3, 8),
}


@pytest.mark.parametrize("name", VIEWS)
def test_one_graph_for_sizes_that_divide(mesh, name):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(VIEWS[name], backend=counter, fullgraph=True)
    for n in (8, 16, 24, 40, 64):
        x = rows(mesh, n)
        found = compiled(x)
        assert found.placements == (Shard(0),)
        assert torch.equal(found.to_local(), VIEWS[name](x.to_local()))
    assert counter.frame_count <= 2


def test_another_graph_where_the_guard_fails(mesh):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(VIEWS["split"], backend=counter, fullgraph=True)
    for n in (8, 16, 24):
        compiled(rows(mesh, n))
    graphs = counter.frame_count
    found = compiled(rows(mesh, 10))
    # The five rows are not cut evenly: the shard moves to the columns, which is cheaper than a gather.
    assert (found.shape, found.placements) == ((5, 2, 6), (Shard(2),))
    assert counter.frame_count == graphs + 1
