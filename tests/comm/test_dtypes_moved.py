"""Data of every dtype goes through every function that moves it, also of dtypes that gloo does not know."""

import pytest
import torch

from dtensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from dtensor.testing import with_ranks

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
SOME = [torch.int16, torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.complex64, torch.bool]


class Held(torch.nn.Module):
    def __init__(self, x):
        super().__init__()
        self.register_buffer("x", x)


USES = {
    "distribute_tensor": lambda x, m, n: distribute_tensor(x, m, [Shard(0)]).full_tensor(),
    "distribute_tensor, other dim": lambda x, m, n: distribute_tensor(x, m, [Shard(1)]).full_tensor(),
    "distribute_tensor, no dims": lambda x, m, n: distribute_tensor(x[1, 1], m, None).full_tensor(),
    "distribute_module": lambda x, m, n: distribute_module(Held(x), m).x.full_tensor(),
    "from_local": lambda x, m, n: DTensor.from_local(x, m, [Replicate()], run_check=True).to_local(),
    "from_local, no dims": lambda x, m, n: DTensor.from_local(x[1, 1], m, [Replicate()], run_check=True).to_local(),
    "redistribute": lambda x, m, n: (
        distribute_tensor(x, m, [Shard(0)]).redistribute(placements=[Shard(1)]).full_tensor()
    ),
    "to another mesh": lambda x, m, n: (
        distribute_tensor(x, m, [Shard(0)]).redistribute(n, [Replicate(), Shard(1)]).full_tensor()
    ),
    "flip": lambda x, m, n: distribute_tensor(x, m, [Shard(0)]).flip(0).full_tensor().flip(0),
}
"""What moves data, and gives back a tensor or an element of it; on a mesh (2,) and one (1, 2)."""


def bytes_of(x):
    return x.contiguous().view(-1).view(torch.uint8)


def check(dtypes):
    meshes = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    for dtype in dtypes:
        raw = torch.arange(15 * dtype.itemsize, dtype=torch.uint8)
        x = (raw % 2 if dtype is torch.bool else raw).view(dtype).view(3, 5)
        for name, use in USES.items():
            wanted = x[1, 1] if "no dims" in name else x
            assert torch.equal(bytes_of(use(x, *meshes)), bytes_of(wanted)), (dtype, name)


@with_ranks(2)
def test_dtypes_that_gloo_lacks(rank):
    check(SOME)


def is_copied(dtype):
    """Whether torch's own CPU kernels copy tensors of a dtype, which quantized numbers are not."""
    try:
        torch.zeros(16, dtype=torch.uint8).view(dtype).clone()
    except (RuntimeError, NotImplementedError):
        return False
    return True


@pytest.mark.nightly
@with_ranks(2)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_all_dtypes(rank):
    dtypes = [dtype for dtype in DTYPES if is_copied(dtype)]
    assert len(dtypes) > 20
    check(dtypes)
