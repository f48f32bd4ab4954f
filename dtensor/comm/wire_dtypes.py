"""The dtype in which a tensor travels, where that is not its own.

Backends have few dtypes, and each reduces special values by a rule of its own: gloo's maximum drops a NaN unless the
first rank holds it, and adds truth values to two. A kernel that communicates is extended by `carried`: it is given what
is sent, and what arrives is turned back, so that every dtype travels and every reduction gives what one device gives.

| what | is sent as |
|---|---|
| complex numbers | pairs of real numbers |
| maxima and minima of floating-point numbers | integers in the same order, in which NaN comes last (maximum) or first |
| sums of float8 | float32 |
| truth values that are reduced | uint8, a sum as a maximum and a product as a minimum |
| other integers that are reduced | int32 or int64, which wrap around in the same way |
| other dtypes that are moved | bytes |
"""

import functools
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch

from ..errors import PlacementError

Kernel = Generator[torch.Tensor, torch.Tensor, torch.Tensor]

CARRIED = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}
"""Dtypes that every backend supports."""

WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
"""Integers that backends do not reduce -> those that are reduced in their place, modulo the size of the former."""


class _Form(NamedTuple):
    """How a reduction is sent: what is reduced, by which reduction, and how the result is read."""

    encode: Callable[[torch.Tensor], torch.Tensor]
    op: str
    decode: Callable[[torch.Tensor], torch.Tensor]


def form(dtype: torch.dtype, op: str) -> _Form | None:
    """How tensors of `dtype` are reduced by `op` over ranks; None if they are sent as they are."""
    if dtype.is_floating_point:
        if op in ("max", "min"):
            return _ordered(dtype, op)
        return None if dtype in CARRIED else _cast(dtype, torch.float32, op)
    if dtype == torch.bool:
        return _cast(dtype, torch.uint8, {"sum": "max", "product": "min"}.get(op, op))
    if dtype == torch.uint64 and op in ("max", "min"):
        return _Form(lambda x: x.view(torch.int64) ^ _LOWEST, op, lambda y: (y ^ _LOWEST).view(dtype))
    return None if dtype in CARRIED else _cast(dtype, WIDER[dtype], op)


_LOWEST = torch.iinfo(torch.int64).min


def _cast(dtype: torch.dtype, sent: torch.dtype, op: str) -> _Form:
    return _Form(lambda x: x.to(sent), op, lambda y: y.to(dtype))


def _ordered(dtype: torch.dtype, op: str) -> _Form:
    """Floating-point numbers as integers of the same order.

    The bits of a number, read as an integer, are in order for positive numbers, and in reverse order for negative ones,
    of which all bits but the sign are inverted. Every NaN becomes the integer that wins, which reads as a NaN again.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bits = torch.int64 if dtype == torch.float64 else torch.int32
    limits = torch.iinfo(bits)
    wins = limits.max if op == "max" else limits.min

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x ^ ((x >> (limits.bits - 1)) & limits.max)

    def encode(x: torch.Tensor) -> torch.Tensor:
        x = x.to(wide)
        return torch.where(x != x, wins, turned(x.view(bits)))

    return _Form(encode, op, lambda y: turned(y).view(wide).to(dtype))


def carried(reduces: bool) -> Callable[[Callable[..., Kernel]], Callable[..., Kernel]]:
    """Extend a kernel to all dtypes. `reduces`: its second argument is the reduction."""

    def extended(kernel: Callable[..., Kernel]) -> Callable[..., Kernel]:
        @functools.wraps(kernel)
        def extended_kernel(x: torch.Tensor, *rest: Any) -> Kernel:
            if x.dtype.is_complex:
                return _of_complex(kernel, x, rest)
            sent = form(x.dtype, rest[0]) if reduces else None
            if sent is not None:
                return _reduced(kernel, sent, x, rest)
            return kernel(x, *rest) if reduces or x.dtype in CARRIED else _of_bytes(kernel, x, rest)

        return extended_kernel

    return extended


def _of_complex(kernel: Callable[..., Kernel], x: torch.Tensor, rest: tuple[Any, ...]) -> Kernel:
    y = yield from kernel(torch.view_as_real(x.resolve_conj()), *rest)
    return torch.view_as_complex(y.contiguous())


def _reduced(kernel: Callable[..., Kernel], sent: _Form, x: torch.Tensor, rest: tuple[Any, ...]) -> Kernel:
    return sent.decode((yield from kernel(sent.encode(x), sent.op, *rest[1:])))


def _of_bytes(kernel: Callable[..., Kernel], x: torch.Tensor, rest: tuple[Any, ...]) -> Kernel:
    y = yield from kernel(x.unsqueeze(-1).view(torch.uint8), *rest)
    return y.contiguous().view(x.dtype).squeeze(-1)


def check_reducible(dtype: torch.dtype, op: str) -> None:
    """Refuse a partial value that its dtype gives no meaning to.

    Raises:
        PlacementError: complex numbers reduced by anything but a sum or an average, or an average of integers.
    """
    if dtype.is_complex and op not in ("sum", "avg"):
        raise PlacementError(
            f"complex numbers cannot be Partial({op!r}): ranks can only add or average them; gather them "
            f"(Shard of a new dim) and reduce, or use x.abs()"
        )
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise PlacementError(
            f"a tensor of {dtype} cannot be Partial('avg'): an average of integers is no integer; write Partial('sum') "
            "and divide, or convert it first, x.float()"
        )


__all__ = ["CARRIED", "Kernel", "carried", "check_reducible", "form"]
