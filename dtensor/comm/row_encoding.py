"""Tensors sent in 8 bits: `dtensor::encode_rows`, and `dtensor::decode_rows` and `dtensor::mean_rows` of what arrives.

Each row has a scale of its own, by which its largest element becomes the largest that float8 holds, as in the per-row
recipe of torchao. A row lies along the dim that is cut, so it is whole on one rank: its scale needs no communication,
and travels as four more bytes of the row.

Each is one node until passes have decided what is sent when (`dtensor.passes.Expand` takes them apart then).
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from ..mesh.operator_library import define
from .start_collectives import ANY_ORDER

SCALE = torch.float32
LEAST = torch.finfo(SCALE).tiny
"""What is added to scales, in order that a row of zeros has one; rows with an element above 1e-28 do not feel it."""


def encode_rows(x: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The rows of `x` along `dim` as bytes. Those of a tensor with less than two dims are its elements as they are.

    Args:
        x: floating point.
        dim: the dim along which rows lie.
        dtype: a floating point dtype of 8 bits, in which elements are sent.

    Returns:
        uint8, (rows, bytes of a row): the elements, and the scale. Of a row that holds a NaN or infinity, all elements
        are NaN once it is decoded.
    """
    if x.dim() < 2:
        return x.reshape(-1, 1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
    rows = x.movedim(dim, 0).reshape(x.shape[dim], prod(_others(x, dim)))
    rows = _cast(rows, SCALE)
    scale = rows.abs().amax(1, keepdim=True) / torch.finfo(dtype).max + LEAST
    return torch.cat([_cast(rows / scale, dtype).view(torch.uint8), scale.view(torch.uint8)], 1)


def decode_rows(
    message: torch.Tensor, shape: list[int], dim: int, sent: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    """The tensor of `shape` and `dtype` whose rows along `dim` were encoded in the dtype `sent`."""
    if len(shape) < 2:
        return message.clone(memory_format=torch.contiguous_format).view(dtype).reshape(shape)
    return _placed(_cast(_numbers(message, sent), dtype), shape, dim)


def mean_rows(
    messages: torch.Tensor, shape: list[int], dim: int, sent: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    """The mean of tensors of `shape`, which has two dims or more, whose rows were encoded; it is taken in float32.

    Args:
        messages: uint8, (tensors, rows, bytes of a row).
    """
    rows = _numbers(messages, sent).sum(0) / messages.shape[0]
    return _placed(_cast(rows, dtype), shape, dim)


def _numbers(message: torch.Tensor, sent: torch.dtype) -> torch.Tensor:
    values, scale = message[..., : -SCALE.itemsize], message[..., -SCALE.itemsize :]
    scale = scale.clone(memory_format=torch.contiguous_format).view(SCALE)
    return _cast(values.view(sent), SCALE) * scale


def _placed(rows: torch.Tensor, shape: list[int], dim: int) -> torch.Tensor:
    whole = rows.view([shape[dim], *shape[:dim], *shape[dim + 1 :]]).movedim(0, dim)
    return whole.clone(memory_format=torch.contiguous_format) if dim else whole


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.ops.prims.convert_element_type.default(x, dtype)  # to which Inductor takes `to` apart


def _others(x: torch.Tensor, dim: int) -> tuple[int, ...]:
    return tuple([n for k, n in enumerate(x.shape) if k != dim])


def _fake_encode(x: Any, dim: int, dtype: torch.dtype) -> Any:
    if x.dim() < 2:
        return x.new_empty((x.numel(), x.dtype.itemsize), dtype=torch.uint8)
    width = prod(_others(x, dim)) * dtype.itemsize + SCALE.itemsize
    return x.new_empty((x.shape[dim], width), dtype=torch.uint8)


def _fake_decode(message: Any, shape: Any, dim: int, sent: torch.dtype, dtype: torch.dtype) -> Any:
    return message.new_empty(tuple(shape), dtype=dtype)


_ARRIVED = "SymInt[] shape, int dim, ScalarType sent, ScalarType dtype) -> Tensor"
define("encode_rows(Tensor x, int dim, ScalarType dtype) -> Tensor", encode_rows, _fake_encode, tags=ANY_ORDER)
define(f"decode_rows(Tensor message, {_ARRIVED}", decode_rows, _fake_decode, tags=ANY_ORDER)
define(f"mean_rows(Tensor messages, {_ARRIVED}", mean_rows, _fake_decode, tags=ANY_ORDER)

KERNELS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.dtensor.encode_rows.default: encode_rows,
    torch.ops.dtensor.decode_rows.default: decode_rows,
    torch.ops.dtensor.mean_rows.default: mean_rows,
}
"""Operator -> the function that computes it."""

__all__ = ["KERNELS", "decode_rows", "encode_rows", "mean_rows"]
