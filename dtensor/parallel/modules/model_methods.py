"""Methods of models that other libraries define and that need whole tensors, such as `save_pretrained`.

Rooms above say how such a method works on a sharded model (`METHODS`). A model that is sharded, and the models inside,
get a class derived from theirs in which it does.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from .forward_wrapping import MADE, made_class

METHODS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {}
"""Name of a method -> a function that makes of a class's own method the one for its sharded models."""


def teach_methods(module: nn.Module) -> None:
    """Give a sharded module the methods in `METHODS` that its class has."""
    names = tuple([name for name in METHODS if callable(getattr(type(module), name, None))])
    if names and not is_taught(module):
        module.__class__ = taught_class(type(module), names)


def is_taught(module: nn.Module) -> bool:
    """Whether a module has methods for sharded models."""
    return any(vars(cls).get(MADE, [None])[0] is taught_class for cls in type(module).__mro__)


@functools.cache
def taught_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The class derived from `cls` whose methods `names` are those for sharded models."""
    inside: dict[str, Any] = {name: METHODS[name](getattr(cls, name)) for name in names}
    return made_class(taught_class, cls, names, **inside)


__all__ = ["METHODS", "is_taught", "teach_methods"]
