"""Fingerprints: a few numbers of a tensor that are the same however the tensor is sharded.

    shard, its place in the global tensor -> [nonfinite, squares, total, sums along dim 0, sums along dim 1, ...]

All of them are sums over the elements, in float64, so the fingerprint of a global tensor is the sum of those of its
shards, and that of a sum of partial tensors is the sum of theirs (but for the squares). `nonfinite` counts NaN and
infinities, which count as zeros below; `squares` is the sum of squares. For each dim, the indices are cut into at most
`BUCKETS` ranges, and the elements of each range are added, each times a random sign for every *other* dim, a function
of that dim and of the index. `total` adds up all elements with the signs of all dims.

Differences of fingerprints are fingerprints of differences. The expectation of the sum of the squares of one dim's sums
is the sum of the squares of the elements (the estimator of Alon, Matias and Szegedy, 1996), so `norm` estimates the
Frobenius norm of a difference, and ranges whose sums differ show where in the tensor it lies.
"""

import functools
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

BUCKETS = 32
"""The most ranges that a dim is cut into."""
STATISTICS = 3
"""The numbers in front of the sums: nonfinite, squares, total."""
NONFINITE, SQUARES, TOTAL = range(STATISTICS)

Vector = npt.NDArray[np.float64]


def parts(shape: Sequence[int]) -> tuple[int, ...]:
    """The number of ranges of each dim."""
    return tuple([min(n, BUCKETS) for n in shape])


def length(shape: Sequence[int]) -> int:
    """The length of the fingerprint of a tensor of that global shape."""
    return STATISTICS + sum(parts(shape))


def seen_shape(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of the tensor that is summed: a complex number is two real ones, and a scalar a vector of one."""
    return (*shape, 2) if dtype.is_complex else tuple(shape) or (1,)


def fingerprint(local: torch.Tensor, shape: Sequence[int], offsets: Sequence[int]) -> torch.Tensor:
    """Return the fingerprint of a shard.

    Args:
        local: the shard; not a DTensor.
        shape: the shape of the global tensor.
        offsets: index of the shard's first element in each dim.

    Returns:
        A float64 tensor of `length(seen_shape(shape, local.dtype))` elements on the device of `local`.
    """
    shape = seen_shape(shape, local.dtype)
    x = local.detach()
    if x.is_complex():
        x, offsets = torch.view_as_real(x.resolve_conj()), (*offsets, 0)
    if not x.numel():
        return torch.zeros(length(shape), dtype=torch.float64, device=x.device)
    at = tuple(offsets) or (0,)
    sizes = tuple(x.shape) or (1,)
    rest = x.to(torch.float64, memory_format=torch.contiguous_format).reshape(-1)
    squares = torch.dot(rest, rest)
    bad = torch.zeros_like(squares)
    if rest.device.type != "cpu" or not math.isfinite(squares.item()):
        finite = rest.isfinite()
        bad = rest.numel() - finite.sum(dtype=torch.float64)
        rest = torch.where(finite, rest, 0.0)
        squares = torch.dot(rest, rest)
    sums = []
    for dim in reversed(range(len(sizes))):
        rows = rest.reshape(-1, sizes[dim])
        along = rows[0] if rows.shape[0] == 1 else _signs_before(sizes, at, dim, rows.device) @ rows
        ranges = _ranges(shape[dim], at[dim], sizes[dim], rows.device)
        sums.append(along if ranges is None else _spread(min(shape[dim], BUCKETS), ranges, along))
        rest = rows @ _signs(dim, at[dim], sizes[dim], rows.device)
    return torch.cat([torch.stack([bad, squares, rest[0]]), *reversed(sums)])


def _spread(count: int, ranges: torch.Tensor, along: torch.Tensor) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64, device=along.device).index_add_(0, ranges, along)


@functools.lru_cache(maxsize=4096)
def _signs(dim: int, offset: int, size: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(signs(dim, offset, size)).to(device)


@functools.lru_cache(maxsize=1024)
def _signs_before(sizes: tuple[int, ...], at: tuple[int, ...], dim: int, device: torch.device) -> torch.Tensor:
    """The products of the signs of all dims before `dim`, flattened."""
    found = torch.ones(1, dtype=torch.float64, device=device)
    for d in range(dim):
        found = torch.outer(found, _signs(d, at[d], sizes[d], device)).reshape(-1)
    return found


@functools.lru_cache(maxsize=4096)
def _ranges(length: int, offset: int, size: int, device: torch.device) -> torch.Tensor | None:
    """The range of each index of the shard; None if there is one range for each and the shard has all of them."""
    if size == length and length <= BUCKETS:
        return None
    return torch.from_numpy(ranges(length, offset, size)).to(device)


def signs(dim: int, offset: int, size: int) -> Vector:
    """The signs of `size` indices of a dim from `offset` on (by the mixing function of splitmix64, Steele et al.,
    2014)."""
    z = np.arange(offset, offset + size, dtype=np.uint64) + np.uint64((dim + 1) << 40)
    z = (z + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return 1.0 - 2.0 * ((z ^ (z >> np.uint64(31))) & np.uint64(1)).astype(np.float64)


def ranges(length: int, offset: int, size: int) -> npt.NDArray[np.int64]:
    """The number of the range that each of `size` indices from `offset` on belongs to."""
    return np.arange(offset, offset + size, dtype=np.int64) * min(length, BUCKETS) // max(length, 1)


def bounds(length: int, k: int) -> tuple[int, int]:
    """The first index of range `k`, and the first one after it."""
    count = min(length, BUCKETS)
    return -(-k * length // count), -(-(k + 1) * length // count)


def sums(vector: Vector, shape: Sequence[int]) -> list[Vector]:
    """The sums of each dim in a fingerprint."""
    cuts = np.cumsum([STATISTICS, *parts(shape)])
    return [vector[a:b] for a, b in pairwise(cuts)]


def norm(vector: Vector, shape: Sequence[int]) -> float:
    """Estimate the Frobenius norm from the sums: the largest estimate of a dim. Sums that are NaN are not known. Use
    it for differences, whose squares are not known."""
    estimates = [float(np.sqrt(np.dot(s, s))) for s in sums(vector, shape)]
    return max([0.0, *[n for n in estimates if not np.isnan(n)]])


__all__ = ["BUCKETS", "NONFINITE", "SQUARES", "STATISTICS", "TOTAL", "bounds", "fingerprint", "length", "norm", "parts"]
__all__ += ["ranges", "seen_shape", "signs", "sums"]
