"""MixedPrecisionPolicy: in which dtypes a fully sharded module communicates and computes.

Parameters, their gradients as the optimizer sees them, and the optimizer's state keep their own dtype. What is
gathered, computed with and reduced may have fewer bits.
"""

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of one `fully_shard`; None leaves things as they are.

    Attributes:
        param_dtype: of parameters of floating point as the forward sees them; the cast comes before the gather, so
            that fewer bytes travel.
        reduce_dtype: in which gradients are reduced; by default that of the parameter, whatever `param_dtype` is, as in
            FSDP2 since torch 2.15 (before, `param_dtype`). What the optimizer gets has the dtype of the parameter.
        output_dtype: to which tensors of floating point are cast that leave the module given to `fully_shard`.
        cast_forward_inputs: whether tensors of floating point are cast to `param_dtype` that enter that module.

    Raises:
        TypeError: what is given as a dtype is none.
        ValueError: a dtype is not one of floating point.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if not field.name.endswith("_dtype") or given is None:
                continue
            if not isinstance(given, torch.dtype):
                raise TypeError(f"{field.name} is a torch.dtype or None; got {given!r}, write such as torch.bfloat16")
            if not given.is_floating_point:
                raise ValueError(
                    f"{field.name} is a dtype of floating point; got {given}, write such as torch.bfloat16"
                )


__all__ = ["MixedPrecisionPolicy"]
