"""Operators along a dimension and reductions over one: every candidate by brute force."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from dtensor import Replicate, Shard, distribute_tensor
from dtensor.testing import with_threads
from dtensor.testing.rules.candidates import booleans as mask
from dtensor.testing.rules.candidates import case as c
from dtensor.testing.rules.candidates import floats as f
from dtensor.testing.rules.candidates import integers as ints
from tests.rules.checking import check

aten = torch.ops.aten


def along_cases():
    x = f(5, 6, 4)
    for op in (aten.cumprod, aten.cummax, aten.cummin, aten.logcumsumexp, aten.sort, aten._safe_softmax):
        yield c(op.default, x, -1, at_least=3)
    yield c(aten.topk.default, x, 2, 1, at_least=3)
    yield c(aten.kthvalue.default, x, 2, 0, at_least=3)
    yield c(aten.mode.default, ints(3, 5, 6), 0, at_least=2)
    yield c(aten.median.dim, x, 1, at_least=3)
    yield c(aten.rot90.default, x, 1, [0, 2], at_least=4)
    yield c(aten.glu.default, x, 1, at_least=3)
    yield c(aten.glu_backward.default, f(5, 3, 4), x, 1, at_least=5)
    yield c(aten.linalg_cross.default, f(5, 3, 4), f(1, 3, 4), at_least=6, dim=1)
    yield c(aten.linalg_cross.default, f(1, 3, 4), f(0, 3, 4), at_least=6, dim=1)
    yield c(aten.cumsum.default, f(), 0, at_least=3)
    yield c(aten.renorm.default, x, 2, 1, 1.0, at_least=2)


def searching_cases():
    rows, flat = f(5, 6).sort(-1).values, f(6).sort().values
    yield c(aten.searchsorted.Tensor, rows, f(5, 4), at_least=3)
    yield c(aten.searchsorted.Tensor, flat, f(5, 4), at_least=2)
    yield c(aten.searchsorted.Tensor, rows, f(5, 4), at_least=3, sorter=torch.arange(6).expand(5, 6).contiguous())
    yield c(aten.searchsorted.Scalar, flat, 0.7)
    yield c(aten.bucketize.Tensor, f(5, 4), flat, at_least=3)
    yield c(aten.isin.Tensor_Tensor, ints(4, 5, 4), ints(4, 3), at_least=3)
    yield c(aten.isin.Tensor_Scalar, ints(4, 5, 4), 2, at_least=3)


def fourier_cases():
    x = f(5, 6, 4)
    z = torch.complex(x, f(5, 6, 4))
    yield c(aten._fft_r2c.default, x, [2], 0, True, at_least=5)
    yield c(aten._fft_r2c.default, x, [1, 2], 0, True, at_least=4)
    yield c(aten._fft_c2c.default, z, [2], 0, True, at_least=5)
    yield c(aten._fft_c2r.default, z, [0], 0, 8, at_least=5)


def reduction_cases():
    x = f(5, 6, 2) - 1
    for op in (aten.any, aten.all):
        yield c(op.default, mask(5, 6), at_least=3)
        yield c(op.dim, mask(5, 6), 0, at_least=3)
        yield c(op.dims, x, [0, 2], True, at_least=4)
    for over, keep in (([0], False), ([1, 2], True), ([0, 1, 2], False)):
        yield c(aten.logsumexp.default, x, over, keep, at_least=4)
        for op in (aten.var, aten.std, aten.var_mean, aten.std_mean):
            yield c(op.correction, x, over, at_least=4, correction=0, keepdim=keep)
    yield c(aten.logsumexp.default, torch.full((5, 6), float("-inf"), dtype=torch.float64), [0], at_least=3)
    yield c(aten.logsumexp.default, ints(4, 5, 6), [0], at_least=3)
    yield c(aten.var.default, x, False, at_least=4)
    yield c(aten.std.dim, x, [1], True, at_least=4)
    yield c(aten.var.correction, torch.complex(x, x + 1), [0], at_least=3)
    yield c(aten.var.correction, f(1), [0], correction=0, at_least=2)
    for n, correction in ((1, 1), (1, 2), (2, 3)):  # fewer than are taken off
        yield c(aten.var.correction, f(n, 4), [0], correction=correction, at_least=3)
    for keep in (False, True):  # on more ranks than there are rows, columns, or both
        for op in (aten.amax.default, aten.amin.default, aten.sum.dim_IntList, aten.mean.dim, aten.logsumexp.default):
            yield from [c(op, f(2, 3), over, keep, at_least=3) for over in ([0], [-1], [0, 1])]
        yield from [c(aten.prod.dim_int, f(2, 3), dim, keep, at_least=3) for dim in (0, 1)]
    yield from [c(op, mask(3, 5), [0], at_least=2) for op in (aten.amax.default, aten.amin.default)]
    yield c(aten.nansum.default, x, [0], at_least=4)
    yield c(aten.prod.default, mask(5, 6))
    yield c(aten.histc.default, f(5, 6), 4, 0, 2, at_least=3)
    yield c(aten.histc.default, f(5, 6), 4)
    yield c(aten.trace.default, f(5, 6), at_least=3)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("group", [along_cases, searching_cases, fourier_cases, reduction_cases])
def test_every_candidate_is_right(group, n):
    check(group, n)


@with_threads(2)
def test_variance_of_a_large_mean_is_not_lost(rank):
    """Sums of squares would cancel: the mean is taken out first."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(6.0) + 10000
    placed = distribute_tensor(x, mesh, [Shard(0)])
    assert placed.var().placements == (Replicate(),)
    assert placed.var().full_tensor() == 3.5
    assert placed.logsumexp(0).full_tensor() == x.logsumexp(0)


@with_threads(2)
def test_fourier_transform_of_a_sharded_batch_stays_sharded(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = torch.sin(torch.arange(24.0)).reshape(4, 6)
    found = torch.fft.irfft(torch.fft.rfft(distribute_tensor(x, mesh, [Shard(0)])))
    assert found.placements == (Shard(0),)
    torch.testing.assert_close(found.full_tensor(), x)
