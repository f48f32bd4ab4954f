"""Fingerprints: a few numbers of a tensor that are the same however the tensor is sharded.

    shard, its place in the global tensor -> nonfinite, squares, total, sums along dim 0, sums along dim 1, ...

All of them are sums over the elements, in float64, so the fingerprint of a global tensor is the sum of those of its
shards, and that of a sum of partial tensors is the sum of theirs (but for the squares). `nonfinite` counts NaN and
infinities, which count as zeros below; `squares` is the sum of squares. For each dim, the indices are cut into at most
`BUCKETS` ranges, and the elements of each range are added (`KINDS`):

    signed    each element times a random sign for every other dim, a function of that dim, its length and the index
    cosine    of dim 0: as above, times the cosine of the index; it tells elements of one range apart
    sine      of dim 0: with the sine. With both, the sums of a part that begins elsewhere are those, rotated
    rows      of other dims: as "signed", without the signs of dim 0. So they add up over parts of a batch

`total` adds up all elements with the signs of all dims.

Differences of fingerprints are fingerprints of differences. The expectation of the sum of the squares of one dim's
signed sums is the sum of the squares of the elements (the estimator of Alon, Matias and Szegedy, 1996), so `norm`
estimates the Frobenius norm of a difference, and ranges whose sums differ show where in the tensor it lies.
"""

import functools
import math
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

BUCKETS = 32
"""The most ranges that a dim is cut into."""
STATISTICS = 3
"""The numbers in front of the sums: nonfinite, squares, total."""
NONFINITE, SQUARES, TOTAL = range(STATISTICS)
TURN = round((3.0 - math.sqrt(5.0)) / 2.0 * 2.0**53) << 11
"""By how much the angle grows from one index of dim 0 to the next, in 2^-64 of a turn: the golden angle. As an integer,
so that angles of large indices are as exact as those of small ones."""
CHANCE = 8.0
"""How many times too small an estimate of a norm may be."""
CHOICES = 16
"""So many choices of signs are looked at for each dim."""
BLOCK = 1 << 20
"""How many elements are summed at once, if dim 0 can be cut: as many float64 as the sums take of memory."""

Vector = npt.NDArray[np.float64]


def parts(shape: Sequence[int]) -> tuple[int, ...]:
    """The number of ranges of each dim."""
    return tuple([min(n, BUCKETS) for n in shape])


def length(shape: Sequence[int]) -> int:
    """The length of the fingerprint of a tensor of that global shape."""
    return STATISTICS + sum([len(kinds(dim)) * n for dim, n in enumerate(parts(shape))])


def kinds(dim: int) -> tuple[str, ...]:
    """The kinds of sums along a dim, in order."""
    return ("signed", "cosine", "sine") if dim == 0 else ("signed", "rows")


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
    x, at = x.reshape(tuple(x.shape) or (1,)), tuple(offsets) or (0,)
    rows = max(BLOCK * x.shape[0] // x.numel(), 1)
    if rows >= x.shape[0]:
        return _of_block(x, shape, at)
    found = torch.zeros(length(shape), dtype=torch.float64, device=x.device)
    for k in range(0, x.shape[0], rows):
        found += _of_block(x[k : k + rows], shape, (at[0] + k, *at[1:]))
    return found


def _of_block(x: torch.Tensor, shape: tuple[int, ...], at: tuple[int, ...]) -> torch.Tensor:
    """The fingerprint of what begins at `at`, in one go."""
    sizes = tuple(x.shape)
    rest = _in_float64(x)
    squares = torch.dot(rest, rest)
    bad = torch.zeros_like(squares)
    if rest.device.type != "cpu" or not math.isfinite(squares.item()):
        finite = rest.isfinite()
        bad = rest.numel() - finite.sum(dtype=torch.float64)
        rest = torch.where(finite, rest, 0.0)
        squares = torch.dot(rest, rest)
    sums: list[torch.Tensor] = []
    for dim in reversed(range(len(sizes))):
        rows = rest.reshape(-1, sizes[dim])
        if dim:
            along = _signs_and_ones(at[0], sizes[0], shape[0], rows.device) @ _middle(rows, sizes, at, shape, dim)
        else:
            along = rows * _turns(sizes[0], rows.device)
        found = _by_range(along, shape[dim], at[dim])
        sums.append((found if dim else _turned(at[0], rows.device) @ found).reshape(-1))
        rest = rows @ _signs(dim, at[dim], sizes[dim], shape[dim], rows.device)
    return torch.cat([torch.stack([bad, squares, rest[0]]), *reversed(sums)])


_scratch = threading.local()


def _in_float64(x: torch.Tensor) -> torch.Tensor:
    """The elements of a part, in a row. On a CPU in memory that the next part of this thread uses again, for making
    large tensors takes longer there than filling them."""
    if x.device.type != "cpu" or x.numel() > BLOCK:
        return x.to(torch.float64, memory_format=torch.contiguous_format).reshape(-1)
    if not hasattr(_scratch, "memory"):
        with torch.inference_mode(False):
            _scratch.memory = torch.empty(BLOCK, dtype=torch.float64)
    found = _scratch.memory[: x.numel()]
    found.view(x.shape).copy_(x)
    return found


def _middle(
    rows: torch.Tensor, sizes: tuple[int, ...], at: tuple[int, ...], shape: tuple[int, ...], dim: int
) -> torch.Tensor:
    """Sums over the dims between dim 0 and `dim`, with their signs: (first dim, this dim)."""
    if dim == 1:
        return rows
    return _signs_between(sizes, at, shape, dim, rows.device) @ rows.view(sizes[0], -1, sizes[dim])


def _by_range(along: torch.Tensor, length: int, offset: int) -> torch.Tensor:
    """The sums of the ranges of a dim of that length; `along` are those of the indices from `offset` on."""
    kinds, size = along.shape
    count = min(length, BUCKETS)
    each = length // count
    if length % count or offset % each or size % each:
        return along.new_zeros(kinds, count).index_add_(1, _ranges(length, offset, size, along.device), along)
    known = along if each == 1 else along.view(kinds, -1, each).sum(2)
    return known if size == length else F.pad(known, (offset // each, count - (offset + size) // each))


@functools.lru_cache(maxsize=1024)
def _turns(size: int, device: torch.device) -> torch.Tensor:
    """Ones, and the cosines and sines of the first indices."""
    found = angles(0, size)
    return torch.from_numpy(np.stack([np.ones(size), np.cos(found), np.sin(found)])).to(device)


@functools.lru_cache(maxsize=4096)
def _turned(offset: int, device: torch.device) -> torch.Tensor:
    """The matrix that makes sums of a part that begins at 0 those of one that begins at `offset`."""
    (angle,) = angles(offset, 1)
    c, s = math.cos(angle), math.sin(angle)
    return torch.tensor([[1.0, 0.0, 0.0], [0.0, c, -s], [0.0, s, c]], dtype=torch.float64, device=device)


@functools.lru_cache(maxsize=4096)
def _signs(dim: int, offset: int, size: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(signs(dim, offset, size, length)).to(device)


@functools.lru_cache(maxsize=4096)
def _signs_and_ones(offset: int, size: int, length: int, device: torch.device) -> torch.Tensor:
    """The signs of `size` indices of dim 0 from `offset` on, and ones."""
    found = _signs(0, offset, size, length, device)
    return torch.stack([found, torch.ones_like(found)])


@functools.lru_cache(maxsize=1024)
def _signs_between(
    sizes: tuple[int, ...], at: tuple[int, ...], shape: tuple[int, ...], dim: int, device: torch.device
) -> torch.Tensor:
    """The products of the signs of all dims from 1 on before `dim`, flattened."""
    found = torch.ones(1, dtype=torch.float64, device=device)
    for d in range(1, dim):
        found = torch.outer(found, _signs(d, at[d], sizes[d], shape[d], device)).reshape(-1)
    return found


@functools.lru_cache(maxsize=4096)
def _ranges(length: int, offset: int, size: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(ranges(length, offset, size)).to(device)


def angles(offset: int, size: int) -> Vector:
    """The angles of `size` indices of dim 0 from `offset` on, in radians."""
    turns = np.arange(offset, offset + size, dtype=np.uint64) * np.uint64(TURN)
    return (turns >> np.uint64(11)).astype(np.float64) * (2.0**-53 * 2.0 * math.pi)


def signs(dim: int, offset: int, size: int, length: int) -> Vector:
    """The signs of `size` indices, from `offset` on, of a dim of that length in the global tensor.

    Of a tensor that is the same along a dim only the sum of the signs is seen. So of a few choices of signs the one is
    taken whose sum has a size closest to what is expected of it, the root of the length; it could be 0.
    """
    return _drawn(dim, offset, size, _choice(dim, length))


@functools.lru_cache(maxsize=4096)
def _choice(dim: int, length: int) -> int:
    """The number of the choice of signs for a dim of that length."""
    sums = [abs(_drawn(dim, 0, length, k).sum()) for k in range(CHOICES)]
    return min(range(CHOICES), key=lambda k: abs(math.log(max(sums[k], 0.1) / math.sqrt(max(length, 1)))))


def _drawn(dim: int, offset: int, size: int, choice: int) -> Vector:
    """Signs by the mixing function of splitmix64 (Steele et al., 2014)."""
    z = np.arange(offset, offset + size, dtype=np.uint64) + np.uint64((dim + 1 + 64 * choice) << 40)
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


def sums(vector: Vector, shape: Sequence[int]) -> list[dict[str, Vector]]:
    """The sums along each dim in a fingerprint, by kind. Those of it that are not known are NaN."""
    found, at = [], STATISTICS
    for dim, n in enumerate(parts(shape)):
        found.append({})
        for kind in kinds(dim):
            found[-1][kind] = vector[at : at + n]
            at += n
    return found


def norm(vector: Vector, shape: Sequence[int]) -> float:
    """Estimate the Frobenius norm from the sums: the largest estimate that is known. Use it for differences, whose
    squares are not known."""
    known = _estimates(vector, shape)
    return math.sqrt(max([square for square, _ in known])) if known else math.nan


def mean_norm(vector: Vector, shape: Sequence[int]) -> float:
    """Estimate the Frobenius norm as the mean of all estimates, each of which counts as often as it has sums: fewer
    chance differences than in the largest, but what some dims do not show counts less."""
    known = _estimates(vector, shape)
    count = sum([n for _, n in known])
    return math.sqrt(sum([square * n for square, n in known]) / count) if count else math.nan


def norm_at_most(vector: Vector, shape: Sequence[int]) -> float:
    """The largest estimate of the Frobenius norm, also from sums without the signs of dim 0. Those are too large if the
    elements along dim 0 are alike, so they count up to `CHANCE` times the others, which may be too small by chance."""
    known = norm(vector, shape)
    rows = [float(np.sqrt(np.dot(s["rows"], s["rows"]))) for s in sums(vector, shape)[1:]]
    others = [min(n, CHANCE * known) for n in rows if not math.isnan(n)]
    return max([known, *others])


def _estimates(vector: Vector, shape: Sequence[int]) -> list[tuple[float, int]]:
    """Estimates of the square of the norm, with the number of sums that each is made of."""
    by_dim = sums(vector, shape)
    found = [(float(np.dot(s["signed"], s["signed"])), len(s["signed"])) for s in by_dim]
    turned = by_dim[0]["cosine"] ** 2 + by_dim[0]["sine"] ** 2
    found.append((float(turned.sum()), len(turned)))
    known = [(square, n) for square, n in found if not math.isnan(square)]
    if not known:
        found = [(float(np.dot(s["rows"], s["rows"])), len(s["rows"])) for s in by_dim[1:]]
    return known or [(square, n) for square, n in found if not math.isnan(square)]


def sizes(vector: Vector, shape: Sequence[int]) -> list[Vector]:
    """How large the sums of each range are along each dim, over all kinds that are known; NaN where none is."""
    found = []
    for by_kind in sums(vector, shape):
        known = [s**2 for s in by_kind.values() if not np.isnan(s).any()]
        found.append(np.sqrt(np.sum(known, axis=0)) if known else np.full(len(by_kind["signed"]), np.nan))
    return found


__all__ = [
    "BLOCK",
    "BUCKETS",
    "NONFINITE",
    "SQUARES",
    "STATISTICS",
    "TOTAL",
    "angles",
    "bounds",
    "fingerprint",
    "length",
    "mean_norm",
    "norm",
    "norm_at_most",
    "parts",
]
__all__ += ["kinds", "ranges", "seen_shape", "signs", "sizes", "sums"]
