"""Checksums change with every bit and every order, whatever dtype, size and strides; NaNs and infinities are seen."""

import pytest
import torch

from dtensor.runs.watching.checksums import WORD, WORDS, checksum, is_spoilt

CPU = torch.device("cpu")
BLOCK = WORDS["cpu"] * WORD
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.bool,
]


def sums(*tensors):
    return checksum(tensors, CPU).tolist()


def memory(x):
    return x.view(torch.uint8).view(-1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_bit_counts(dtype):
    x = torch.arange(7).to(dtype)
    before, seen = sums(x), set()
    for i in range(memory(x).numel()):
        for bit in range(1 if dtype is torch.bool else 8):
            memory(x)[i] ^= 1 << bit
            a, b = sums(x)
            assert a != before[0]
            seen.add((a, b))
            memory(x)[i] ^= 1 << bit
    assert sums(x) == before
    assert len(seen) == memory(x).numel() * (1 if dtype is torch.bool else 8)


@pytest.mark.parametrize("size", [1, 3, BLOCK // 4, BLOCK // 4 + 1, 3 * BLOCK // 4 + 5])
def test_each_block_counts(size):
    x = torch.arange(size, dtype=torch.float32)
    before = sums(x)
    for at in {0, size // 2, size - 1}:
        x[at] = -x[at] - 1
        assert sums(x)[0] != before[0]
        x[at] = -x[at] - 1
    assert sums(x) == before


def test_order_counts():
    x = torch.arange(BLOCK, dtype=torch.float32)  # four blocks
    for a, b in ((0, 2), (1, 2), (5, BLOCK // 4 + 5), (BLOCK // 2, BLOCK - 2)):
        y = x.clone()
        y[a], y[b] = x[b], x[a]
        assert sums(y) != sums(x)
    assert sums(x[:2], x[2:4]) != sums(x[2:4], x[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_signs_do_not_cancel_out(dtype):
    """The weight of the topmost bit of a word counts modulo two only, in the first sum."""
    x = torch.arange(1, 65).to(dtype)
    assert sums(x) != sums(-x)
    found = set()
    for a in range(1, 64, 2):
        y = x.clone()
        y[[a, (a + 8) % 64]] *= -1
        found.add(tuple(sums(y)))
    assert len(found | {tuple(sums(x))}) == 33


def test_signed_zeros_and_nans_are_bits():
    assert sums(torch.zeros(3)) != sums(-torch.zeros(3))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert sums(nans[:1]) != sums(nans[1:])
    assert sums(nans) == sums(nans.clone())


def test_strides_and_offsets_do_not_count():
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    assert sums(x.t()) == sums(x.t().contiguous())
    assert sums(x.view(-1)[1:]) == sums(x.view(-1)[1:].clone())
    assert sums(torch.complex(x, -x).conj()) == sums(torch.complex(x, x))


def test_nothing_is_zero():
    assert sums() == sums(torch.ones(0)) == [0, 0]
    assert not is_spoilt([], CPU)
    assert not is_spoilt([torch.ones(0), torch.arange(3)], CPU)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_floating_point or d.is_complex])
def test_what_is_not_finite_is_seen(dtype, value):
    x = torch.arange(5).to(dtype)
    assert not is_spoilt([x, torch.ones(3)], CPU)
    if dtype is torch.float8_e4m3fn:
        memory(x)[3] = 0x7F  # its NaN; it has no infinity
    else:
        x[3] = value
    assert is_spoilt([torch.ones(3), x], CPU)
    assert is_spoilt([torch.ones(BLOCK, dtype=torch.float32), x], CPU)


def test_the_largest_numbers_are_finite():
    assert not is_spoilt([torch.full((3,), torch.finfo(d).max, dtype=d) for d in (torch.float64, torch.float16)], CPU)
