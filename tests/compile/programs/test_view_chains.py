"""Random chains of views and writes on sharded dimensions, eager and compiled: one device's values."""

import warnings

import pytest
import torch

from dtensor import Shard, distribute_tensor, init_device_mesh
from dtensor.testing import with_ranks

from .view_chains import given, outcomes


@with_ranks(2)
def test_a_write_to_a_chunk_of_a_base_that_was_written_to(rank):
    """The other chunk is in the same copy, and nobody holds it."""
    mesh = init_device_mesh("cpu", (2,))

    def f(x):
        part = x.chunk(2, 1)[1]
        x.add_(1)
        part.mul_(2)
        return part * 1

    want, x = given(), distribute_tensor(given(), mesh, [Shard(1)])
    parts = f(want), torch.compile(f, backend="aot_eager", fullgraph=True)(x).full_tensor()
    assert torch.equal(*parts)
    assert torch.equal(x.full_tensor(), want)


@pytest.mark.parametrize(("compiled", "count"), [(True, 4), (False, 40)])
@with_ranks(2)
def test_chains(rank, compiled, count):
    assert outcomes(range(count), init_device_mesh("cpu", (2,)), compiled) == {"right": count}


@pytest.mark.nightly
@pytest.mark.parametrize("compiled", [True, False])
@with_ranks(2)
def test_many_chains(rank, compiled):
    warnings.simplefilter("ignore")
    assert outcomes(range(40, 440), init_device_mesh("cpu", (2,)), compiled) == {"right": 400}
