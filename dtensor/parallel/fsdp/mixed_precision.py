"""MixedPrecisionPolicy: the dtypes in which a fully sharded module communicates and computes.

Parameters, their gradients as the optimizer sees them, and the optimizer's state keep the parameter's dtype. Gathering,
computation and reduction may use fewer bits.
"""

from dataclasses import dataclass, fields

import torch

from ...errors import ArgumentError, ArgumentTypeError

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
"""The dtypes of 8 bits in which numbers are sent."""


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes used by one `fully_shard` call. None does not cast.

    Attributes:
        param_dtype: the dtype of floating point parameters in the forward. They are cast before they are gathered, so
            that fewer bytes are sent.
        reduce_dtype: the dtype in which gradients are reduced; None uses that of the parameter, whatever `param_dtype`
            is, as FSDP2 does since torch 2.15 (`param_dtype` before). The optimizer gets gradients in the dtype of the
            parameter. With `torch.float8_e4m3fn`, a gradient with two dims or more is sent in a byte for each element
            and a scale for each row (along the dim that is sharded, or else the first), and added up in float32; over
            an axis that replicates, the means are sent in the same way. Others, and those accumulated over several
            backwards, are reduced in float32.
        output_dtype: the dtype that floating point outputs of the module passed to `fully_shard` are cast to.
        cast_forward_inputs: whether floating point inputs of that module are cast to `param_dtype`.
        gather_dtype: the dtype in which parameters are sent, where it is narrower than that of the forward, to which
            they are cast behind. `torch.float8_e4m3fn` sends a byte for each element and a scale for each row, as for
            gradients; tensors with less than two dims are sent as they are.

    Raises:
        TypeError: a dtype is not a `torch.dtype`.
        ValueError: a dtype is not a floating point dtype, or one of 8 bits or less that cannot be sent.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    gather_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if not field.name.endswith("_dtype") or given is None:
                continue
            if not isinstance(given, torch.dtype):
                raise ArgumentTypeError(
                    f"{field.name} is a torch.dtype or None; got {given!r}, write such as torch.bfloat16"
                )
            if not given.is_floating_point:
                raise ArgumentError(
                    f"{field.name} must be a floating point dtype; got {given}, write such as torch.bfloat16"
                )
            if field.name in ("gather_dtype", "reduce_dtype") and given.itemsize == 1 and given not in FLOAT8:
                raise ArgumentError(f"nothing is sent as {given}; write {field.name}=torch.float8_e4m3fn")


__all__ = ["FLOAT8", "MixedPrecisionPolicy"]
