"""What stands around the forward of a module: a function that takes its inputs, and one that gives its output.

No forward hooks: of a module that has one, Dynamo traces all of `nn.Module._call_impl`, some two hundred instructions
a call and more than most forwards have. Here the module gets a class of its own, derived from the one it has and named
like it, whose forward calls the two. `made_class` makes such classes, here and for what reads parameters in ways of its
own.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from ...torch_private.core import traced_with_caller

Take: TypeAlias = Callable[[nn.Module, tuple, dict[str, Any]], tuple[tuple, dict[str, Any]]]
"""(module, args, kwargs) -> args and kwargs of the forward."""

Give: TypeAlias = Callable[[nn.Module, tuple, Any], Any]
"""(module, args of the forward, its output) -> output of the module."""

WRAPPED = "_dtensor_wrapped"
"""The attribute of a module under which the two lie."""

_count = itertools.count()

CALL = "_dtensor_call"
"""The attribute of a module under which that lies which is called in place of the forward."""

MADE = "_dtensor_made"
"""The attribute of a class that was made on the fly: the function that made it, of which class, and what else that was
given."""


def made_class(
    maker: Any, cls: type[nn.Module], *given: Any, bases: tuple[type, ...] = (), prefix: str = "", **inside: Any
) -> type[nn.Module]:
    """A class derived from `cls` and named like it, after `prefix`. Copies and pickles of its modules name what it was
    made from: `maker`, which gives the same class each time it is called with `cls` and `given`."""
    named = {"__module__": cls.__module__, "__qualname__": prefix + cls.__qualname__, "__doc__": cls.__doc__}
    own = {**named, **inside, MADE: (maker, cls, *given), "__reduce_ex__": _reduced}
    return type(prefix + cls.__name__, (*bases, cls), own)


def without(cls: type[nn.Module], maker: Any) -> type[nn.Module]:
    """The class that `cls` would be if `maker` had never been called."""
    if MADE not in vars(cls):
        return cls
    by, base, *given = vars(cls)[MADE]
    base = without(base, maker)
    return base if by is maker else by(base, *given)


def users_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before any was made for it."""
    cls = type(module)
    while MADE in vars(cls):
        cls = vars(cls)[MADE][1]
    return cls


def _reduced(module: nn.Module, protocol: Any) -> Any:
    _, _, *state = users_class(module).__reduce_ex__(module, protocol)
    return _remade, (_recipe(type(module)),), *state


def _recipe(cls: type[nn.Module]) -> Any:
    """How `cls` is made, in terms of what a pickle can name."""
    if MADE not in vars(cls):
        return cls
    maker, base, *given = vars(cls)[MADE]
    return maker, _recipe(base), *given


def _class_of(recipe: Any) -> type[nn.Module]:
    if not isinstance(recipe, tuple):
        return recipe
    maker, base, *given = recipe
    return maker(_class_of(base), *given)


def _remade(recipe: Any) -> nn.Module:
    cls = _class_of(recipe)
    return cls.__new__(cls)


def wrap_forward(module: nn.Module, take: Take | None = None, give: Give | None = None) -> None:
    """Have `take` look at what comes into the forward of `module`, and `give` at what goes out.

    They are called after those that the module has already. Hooks of the user see what the module is called with, and
    what it gives. Copies of the module share both functions.
    """
    wrapped = vars(module).get(WRAPPED)
    before, after = wrapped or (_taken, _given)
    vars(module)[WRAPPED] = _takes(before, take), _gives(after, give)
    if wrapped is not None:
        return
    if "forward" in vars(module):
        vars(module)["forward"] = functools.partial(_wrapped, module, vars(module)["forward"])
    else:
        module.__class__ = wrapped_class(type(module))


@functools.cache
def wrapped_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of modules of class `cls` that are wrapped; `cls` itself if it is one."""
    if WRAPPED in vars(cls):
        return cls
    inner = cls.forward

    @with_own_code
    @functools.wraps(inner)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        take, give = self._dtensor_wrapped
        args, kwargs = take(self, args, kwargs)
        return give(self, args, inner(self, *args, **kwargs))

    inside: dict[str, Any] = {"forward": forward, WRAPPED: (_taken, _given)}
    return made_class(wrapped_class, cls, **inside)


def wrap_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Have `call` called with the forward of `module`, and what that would be called with, in its place. Once a
    module; hooks stay around it."""
    if "forward" in vars(module):
        vars(module)["forward"] = functools.partial(call, vars(module)["forward"])
        return
    vars(module)[CALL] = call
    module.__class__ = called_class(type(module))


@functools.cache
def called_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of modules of class `cls` of which something else is called in place of their forward."""
    inner = cls.forward

    @with_own_code
    @functools.wraps(inner)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._dtensor_call(functools.partial(inner, self), *args, **kwargs)

    return made_class(called_class, cls, forward=forward)


def with_own_code(function: Any) -> Any:
    """`function`, which a class is made with, with code that no other class has: Dynamo keeps what it compiles by code,
    and gives up on code that it has compiled too often. By name and line it keeps what sizes it has seen."""
    code = function.__code__
    function.__code__ = code.replace(co_name=f"{code.co_name}_{next(_count)}")
    return function


@traced_with_caller
def _wrapped(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    take, give = vars(module)[WRAPPED]
    args, kwargs = take(module, args, kwargs)
    return give(module, args, forward(*args, **kwargs))


def _taken(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def _given(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return output


def _takes(first: Take, then: Take | None) -> Take:
    if then is None:
        return first

    def take(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return then(module, *first(module, args, kwargs))

    return then if first is _taken else take


def _gives(first: Give, then: Give | None) -> Give:
    if then is None:
        return first

    def give(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return then(module, args, first(module, args, output))

    return then if first is _given else give


__all__ = [
    "Give",
    "Take",
    "called_class",
    "made_class",
    "users_class",
    "with_own_code",
    "without",
    "wrap_call",
    "wrap_forward",
    "wrapped_class",
]
