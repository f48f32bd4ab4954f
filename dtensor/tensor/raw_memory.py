"""Tensor methods that access raw memory: a DTensor has none of its own, so they raise a clear error.

Those that only read it work where each rank holds all of it: on a replicated tensor, and on one without dimensions,
which they bring together first, as `item()` does. `data_ptr()` still returns 0, by which torch recognises tensors
without memory of their own.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from ..errors import ShardingError
from ..torch_private.core import disable_dynamo

READING = ("numpy", "tolist", "__dlpack__")
"""Tensor methods that expose the tensor's memory or values."""

OUTSIDE = ("pin_memory", "share_memory_")
"""Tensor methods that move the tensor's memory."""

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


def on_whole_tensors(name: str) -> Callable[..., Any]:
    """The method `name` for tensors of which each rank holds all; on others it raises `ShardingError`.

    A compiled function calls it between two graphs.
    """
    refuse = on_local_tensors(name)

    @disable_dynamo
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (self.dim() == 0 or self._spec.layout.is_replicated):
            refuse(self)
        return getattr(self.full_tensor(), name)(*args, **kwargs)

    method.__name__ = name
    return method


__all__ = ["BY_ELEMENT", "OUTSIDE", "READING", "on_local_tensors", "on_whole_tensors"]
