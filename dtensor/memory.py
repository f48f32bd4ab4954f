"""What reads the memory of a tensor from outside of torch: a DTensor has none of its own, and says so.

`data_ptr()` stays 0: by that torch knows tensors without memory of their own.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from .errors import ShardingError

OUTSIDE = ("numpy", "tolist", "pin_memory", "share_memory_", "__dlpack__")


def on_local_tensors(name: str) -> Callable[..., NoReturn]:
    """The method `name` of a DTensor, if it needs the memory of one tensor.

    Raises:
        ShardingError: when it is called.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise ShardingError(
            f"{name} needs the memory of one tensor, and a DTensor's lies on several ranks; "
            f"write x.to_local().{name}(…) for this rank's part, or x.full_tensor().{name}(…) for the whole"
        )

    method.__name__ = name
    return method


__all__ = ["OUTSIDE", "on_local_tensors"]
