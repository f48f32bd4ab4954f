"""Wraps the forward of a module in a function that prepares its inputs and one that prepares its output.

Forward hooks would do the same, but if a module has one, Dynamo traces all of `nn.Module._call_impl`: some two hundred
instructions per call, more than most forwards have. So the module instead gets its own class, derived from its class
and with the same name, whose forward calls the two functions. `made_class` creates such classes, also for modules that
read their parameters in a special way.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from ...program.source_lines import MADE, not_generated
from ...torch_private.core import traced_with_caller

Take: TypeAlias = Callable[[nn.Module, tuple, dict[str, Any]], tuple[tuple, dict[str, Any]]]
"""(module, args, kwargs) -> args and kwargs of the forward."""

Give: TypeAlias = Callable[[nn.Module, tuple, Any], Any]
"""(module, args of the forward, its output) -> output of the module."""

WRAPPED = "_dtensor_wrapped"
"""The attribute of a module that holds its pair of functions."""

_count = itertools.count()

CALL = "_dtensor_call"
"""The attribute of a module that holds the function called in place of its forward."""


def made_class(
    maker: Any, cls: type[nn.Module], *given: Any, bases: tuple[type, ...] = (), prefix: str = "", **inside: Any
) -> type[nn.Module]:
    """A class derived from `cls`, with the same name after `prefix`.

    Copies and pickles of its modules refer to `maker`, which must return the same class for the same `cls` and `given`.
    """
    named = {"__module__": cls.__module__, "__qualname__": prefix + cls.__qualname__, "__doc__": cls.__doc__}
    own = {**named, **inside, MADE: (maker, cls, *given), "__reduce_ex__": _reduced}
    return type(prefix + cls.__name__, (*bases, cls), own)


def without(cls: type[nn.Module], maker: Any) -> type[nn.Module]:
    """The class that `cls` would be if `maker` had not been applied."""
    if MADE not in vars(cls):
        return cls
    by, base, *given = vars(cls)[MADE]
    base = without(base, maker)
    return base if by is maker else by(base, *given)


def users_class(module: nn.Module) -> type[nn.Module]:
    """The class that the user gave the module, before any class was generated for it."""
    return not_generated(type(module))


def _reduced(module: nn.Module, protocol: Any) -> Any:
    _, _, *state = users_class(module).__reduce_ex__(module, protocol)
    return _remade, (_recipe(type(module)),), *state


def _recipe(cls: type[nn.Module]) -> Any:
    """How to generate `cls`, expressed in objects that a pickle can refer to."""
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
    """Make `take` process the inputs of `module`'s forward, and `give` its output.

    They run after the functions that the module already has. The user's hooks see the arguments the module was called
    with and its final output. Copies of the module share both functions.
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
    """The wrapped class derived from `cls`; `cls` itself if it is already a wrapped class."""
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
    """Replace the forward of `module` by `call`, which receives the original forward and its arguments.

    Works once per module. Hooks still run around it.
    """
    if "forward" in vars(module):
        vars(module)["forward"] = functools.partial(call, vars(module)["forward"])
        return
    vars(module)[CALL] = call
    module.__class__ = called_class(type(module))


@functools.cache
def called_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class derived from `cls` whose forward calls the function that `wrap_call` stored in the module."""
    inner = cls.forward

    @with_own_code
    @functools.wraps(inner)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._dtensor_call(functools.partial(inner, self), *args, **kwargs)

    return made_class(called_class, cls, forward=forward)


def with_own_code(function: Any) -> Any:
    """`function` with its own code object, for use in one generated class only.

    Dynamo caches compiled code by code object and gives up on one that it has compiled too often. It also records the
    sizes it has seen by code name and line.
    """
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
