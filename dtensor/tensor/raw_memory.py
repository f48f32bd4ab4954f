"""Tensor methods that access raw memory: on a DTensor, which has no memory of its own, they raise a clear error.

`data_ptr()` still returns 0, by which torch recognises tensors without memory of their own.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from ..errors import ShardingError

OUTSIDE = ("numpy", "tolist", "pin_memory", "share_memory_", "__dlpack__")
"""Tensor methods that expose or move the tensor's memory."""

BY_ELEMENT = ("apply_", "map_", "map2_")
"""Tensor methods that call a Python function for each element."""


def on_local_tensors(name: str) -> Callable[..., NoReturn]:
    """A replacement for the method `name`, which needs the memory of one tensor: it raises `ShardingError`."""

    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise ShardingError(
            f"{name} needs the memory of one tensor, but a DTensor's is spread over several ranks; "
            f"call it on x.to_local() for this rank's part, or on x.full_tensor() for the full tensor"
        )

    method.__name__ = name
    return method


__all__ = ["BY_ELEMENT", "OUTSIDE", "on_local_tensors"]
