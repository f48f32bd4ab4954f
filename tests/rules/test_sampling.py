"""Drawing a shard of a random tensor block by block: from a sequence that shows which number went where."""

import itertools
from math import prod

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from dtensor import init_device_mesh
from dtensor.layout.layout import Layout
from dtensor.mesh.tensor_spec import Spec, contiguous_stride
from dtensor.rules.sampling import sample
from dtensor.testing import fake_ranks, run_threads
from dtensor.testing.rules.candidates import cut


def counting():
    """A generator of the numbers 0, 1, 2, …, and how many were drawn at a time."""
    lengths = []

    def draw(size, dtype, device):
        start, count = sum(lengths), size if isinstance(size, int) else prod(size)
        lengths.append(count)
        return torch.arange(start, start + count, dtype=dtype, device=device).view(size)

    return draw, lengths


def drawn(rank, shape, text, block):
    mesh = init_device_mesh("cpu", (2, 2))
    spec = Spec.make(mesh, Layout.parse(text, len(shape)), shape, contiguous_stride(shape), torch.float64)
    draw, lengths = counting()
    return sample(draw, spec, block), lengths


@pytest.mark.parametrize("shape", [(17,), (33,), (7, 13), (5, 3, 7)])
def test_each_shard_gets_its_numbers_of_the_sequence(shape):
    whole = torch.arange(prod(shape), dtype=torch.float64).view(shape)
    for first, second in itertools.product((None, *range(len(shape))), repeat=2):
        text = "".join("R" if dim is None else f"S({dim})" for dim in (first, second))
        for block in (16, 32, 48, 1 << 10):
            for rank, (local, lengths) in enumerate(run_threads(drawn, 4, shape, text, block)):
                wanted = cut(cut(whole, first, 2)[rank // 2], second, 2)[rank % 2]
                assert torch.equal(local, wanted), (text, block, rank)
                assert sum(lengths) == prod(shape)
                # The last block may be longer, but is never shorter.
                assert all(n == block for n in lengths[:-1])
                assert len(lengths) == 1 or block <= lengths[-1] < 2 * block
                assert len(lengths) == max(prod(shape) // block, 1)


@pytest.mark.parametrize("block", [16, 1 << 10])
def test_a_rank_outside_of_the_mesh_draws_as_many_and_keeps_none(block):
    with fake_ranks(4, rank=3):
        mesh = DeviceMesh("cpu", [0, 1])
        draw, lengths = counting()
        spec = Spec.make(mesh, Layout.parse("S(0)", 1), (40,), (1,), torch.float64)
        assert sample(draw, spec, block).shape == (0,)
        assert sum(lengths) == 40
