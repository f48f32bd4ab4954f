"""No redistribution sends more than torch.distributed.tensor does for the same placements on the same mesh."""

import logging
from itertools import product

import pytest
import torch
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import init_device_mesh as unprepared

import dtensor as ours
from dtensor.testing import CountCollectives, fake_ranks


class Sent(CountCollectives):
    """Counts what either library sends."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, theirs.DTensor) for t in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture
def world():
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    with fake_ranks(8):
        yield


def placed(lib, names):
    return [lib.Shard(p) if isinstance(p, int) else lib.Partial() if p == "P" else lib.Replicate() for p in names]


def sent(lib, mesh, src, dst, shape):
    local = list(shape)
    for n, p in zip(mesh.shape, src):
        if isinstance(p, int):
            local[p] //= n
    x = lib.DTensor.from_local(
        torch.zeros(local), mesh, placed(lib, src), shape=torch.Size(shape), stride=(shape[1], 1)
    )
    with Sent() as seen:
        y = x.redistribute(mesh, placed(lib, dst))
    assert list(map(repr, y.placements)) == list(map(repr, placed(lib, dst)))
    return seen


@pytest.mark.parametrize(("sizes", "every"), [((2,), 1), ((2, 2), 1), ((1, 2), 3), ((2, 2, 2), 31)], ids=str)
@pytest.mark.parametrize("shape", [(256, 512), (8, 16)], ids=str)
def test_never_more_than_torch(world, sizes, every, shape):
    mesh, plain = ours.init_device_mesh("cpu", sizes), unprepared("cpu", sizes)
    names = product([0, 1, "R", "P"], repeat=len(sizes))
    pairs = [p for p in product(list(names), repeat=2) if all(b != "P" or a == "P" for a, b in zip(*p))]
    less = 0
    for src, dst in pairs[::every]:
        a, b = sent(ours, mesh, src, dst, shape), sent(theirs, plain, src, dst, shape)
        assert a.bytes <= b.bytes, f"{src} -> {dst}: {a.collectives} against {b.collectives}"
        less += a.bytes < b.bytes
    assert less > 0
