"""What reads the memory of a tensor from outside of torch: a DTensor has none of its own, and says so.

`data_ptr()` stays 0: by that torch knows tensors without memory of their own.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from ..errors import ShardingError

OUTSIDE = ("numpy", "tolist", "pin_memory", "share_memory_", "__dlpack__")
"""The methods of a tensor that hand out or move its memory."""

BY_ELEMENT = ("apply_", "map_", "map2_")
"""Those that call a function of Python for each number in it."""


def on_local_tensors(name: str) -> Callable[..., NoReturn]:
    """The method `name` of a DTensor, if it needs the memory of one tensor.

    Raises:
        ShardingError: when it is called.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise ShardingError(
            f"{name} needs the memory of one tensor, and a DTensor's lies on several ranks; "
            f"call it on x.to_local(), which is this rank's part, or on x.full_tensor(), which is the whole"
        )

    method.__name__ = name
    return method


__all__ = ["BY_ELEMENT", "OUTSIDE", "on_local_tensors"]
