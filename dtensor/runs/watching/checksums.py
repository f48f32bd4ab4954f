"""Fingerprints: exact checksums of the memory of many tensors, with few kernels and no temporary larger than a block.

Memory is read as 64-bit words, and sums are taken modulo 2**64, with an odd weight for each position and each block:
one of the words, and one of their upper halves. So a change of one word, and with it of one bit, always changes the
first sum, and several changes would have to cancel out in both. The higher a bit is in a word, the fewer bits of its
weight count: in the first sum alone a change of two signs would go unnoticed, in the second 33 bits are left for them.
Signed zeros and NaNs are bits like any other. Weights are the same on all ranks.

Tensors of one dtype are read one after the other as if they were one tensor: what is small shares a block, and what is
large is read in blocks without a copy.
"""

import functools
from collections.abc import Iterable, Iterator

import torch

WORD = 8
"""Bytes of a word."""

WORDS = {"cpu": 1 << 16}
"""Type of a device -> words in a block: as many as its cache holds with their weights."""

WORDS_OF_OTHERS = 1 << 21
"""Words in a block on other devices, where the number of kernels counts."""

HALF = 32
"""Bits of half a word."""

MASK = (1 << 64) - 1
STREAM = 1 << 40
"""Distance between the numbers of the first blocks of two dtypes."""


def checksum(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The two sums over the memory of plain tensors, in their order: int64, of shape (2,), on `device`."""
    found = [torch.zeros(2, dtype=torch.int64, device=device)]
    for number, alike in enumerate(_by_kind(tensors).values()):
        found.append(_sums(alike, STREAM * number).to(device))
    return torch.stack(found).sum(0)


def is_spoilt(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Whether an element of the tensors is NaN or infinite: int64, of shape (), on `device`."""
    found = [torch.zeros((), dtype=torch.bool, device=device)]
    for alike in _by_kind(as_reals(x) for x in tensors if has_infinities(x)).values():
        bounds = [torch.aminmax(_ordered(block)) for block in _blocks(alike)]
        # The difference is NaN for a bound that is NaN or infinite, and zero for any other.
        excess = [(low - low) + (high - high) for low, high in bounds]
        found += [torch.stack(excess).ne(0).any().to(device)] if excess else []
    return torch.stack(found).any().to(torch.int64)


def has_infinities(x: torch.Tensor) -> bool:
    """Whether elements of `x` can be infinite or NaN."""
    return x.is_floating_point() or x.is_complex()


def as_reals(x: torch.Tensor) -> torch.Tensor:
    """A complex tensor as real and imaginary parts along a new last dimension; another tensor as it is."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """`x` in a dtype that has an order: that of one byte has none."""
    return x.float() if x.element_size() == 1 else x


def _by_kind(tensors: Iterable[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for x in tensors:
        real = as_reals(x)
        found.setdefault((real.device, real.dtype), []).append(real)
    return found


def _blocks(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The elements of tensors of one dtype and device, in parts of one dimension of at most a block."""
    first = tensors[0]
    size = _words_of(first.device) * WORD // first.element_size()
    waiting: list[torch.Tensor] = []
    count = 0
    for x in tensors:
        flat, n = x.reshape(-1), x.numel()
        for part in flat.split(size) if n > size else (flat,) * bool(n):
            if waiting and count + part.numel() > size:
                yield _joined(waiting)
                waiting, count = [], 0
            waiting.append(part)
            count += part.numel()
    if waiting:
        yield _joined(waiting)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _words_of(device: torch.device) -> int:
    return WORDS.get(device.type, WORDS_OF_OTHERS)


def _sums(tensors: list[torch.Tensor], first: int) -> torch.Tensor:
    """The two sums of tensors of one dtype and device, whose first block has the number `first`."""
    device = tensors[0].device
    weights = _weights(device)
    found = []
    for block in _blocks(tensors):
        words = _as_words(block)
        mine = weights[: words.numel()]
        found.append(torch.stack([_dot(words, mine), _dot(words >> HALF, mine)]))
    if not found:
        return torch.zeros(2, dtype=torch.int64, device=device)
    factors = [[_mixed(2 * (first + i)), _mixed(2 * (first + i) + 1)] for i in range(len(found))]
    return (torch.stack(found) * torch.tensor(factors, dtype=torch.int64, device=device)).sum(0)


def _dot(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of products, which CPUs take without a temporary."""
    return torch.dot(words, weights) if words.is_cpu else (words * weights).sum()


def _as_words(block: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor of one dimension as int64: a view where it is aligned, else a padded copy."""
    size = block.numel() * block.element_size()
    offset = block.storage_offset() * block.element_size()
    if size % WORD == 0 and offset % WORD == 0 and block.data_ptr() % WORD == 0:
        return block.view(torch.int64)
    words = torch.zeros(-(-size // WORD), dtype=torch.int64, device=block.device)
    words.view(torch.uint8)[:size].copy_(block.view(torch.uint8))
    return words


@functools.lru_cache(maxsize=16)
def _weights(device: torch.device) -> torch.Tensor:
    """An odd weight for each word of a block. No generator that programs use is drawn from."""
    generator = torch.Generator().manual_seed(0x5EED)
    drawn = torch.randint(-(1 << 62), 1 << 62, (_words_of(device),), generator=generator)
    return (2 * drawn + 1).to(device)


def _mixed(number: int) -> int:
    """An odd 64-bit number, signed, whose bits follow from all bits of `number` (Steele et al., "SplitMix", 2014)."""
    x = (number + 1) * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    x = (x ^ x >> 31) | 1
    return x - (1 << 64) if x >> 63 else x


__all__ = ["as_reals", "checksum", "has_infinities", "is_spoilt"]
