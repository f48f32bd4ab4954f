"""What an object is, in words that mean the same in every process.

Dynamo guards functions, classes and the like by identity: the compiled code holds for that very object. Another process
has other objects. There, an object of the same description takes its place, and is guarded by identity from then on.
"""

import functools
import hashlib
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtensor.torch_private.core import OpOverload, OpOverloadPacket
from dtensor.torch_private.frame_data import evaluate

from .refusals import MODEL, another_object, place

Identity = tuple[str, str]
"""An expression as Dynamo writes it (`L['self'].act`), and the description of what it stands for."""


def digest(code: types.CodeType) -> str:
    """Return a hash of what a code object does; its name, the file that it came from and its lines do not count."""
    made = hashlib.sha256()

    def add(code: types.CodeType) -> None:
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        made.update(repr((code.co_code, code.co_flags, code.co_argcount, names)).encode())
        for constant in code.co_consts:
            add(constant) if isinstance(constant, types.CodeType) else made.update(_constant(constant).encode())

    add(code)
    return made.hexdigest()


def _constant(value: Any) -> str:
    return repr(sorted(value, key=repr) if isinstance(value, frozenset) else value)


def describe(value: Any) -> str:
    """Return what `value` is.

    Raises:
        ValueError: it can be known by its identity only.
    """
    return _describe(value, ())


def _describe(value: Any, within: tuple[int, ...]) -> str:
    if id(value) in within:
        return "itself"
    inside = (*within, id(value))
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes() | torch.dtype() | torch.device():
            return repr(value)
        case types.FunctionType():
            cells = [_cell(cell, inside) for cell in value.__closure__ or ()]
            defaults = [
                _describe(x, inside) for x in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            ]
            more = f" of {', '.join(cells)}" if cells else ""
            more += f" with {', '.join(defaults)}" if defaults else ""
            return f"{value.__module__}.{value.__qualname__} {digest(value.__code__)[:16]}{more}"
        case functools.partial():
            given = [_describe(x, inside) for x in (value.func, value.args, value.keywords)]
            return f"partial({', '.join(given)})"
        case types.MethodType():
            return f"{_describe(value.__func__, inside)} of {_named(type(value.__self__))}"
        case torch.optim.Optimizer():  # Dynamo guards by value what it reads of it
            return f"the optimizer {_named(type(value))}"
        case types.ModuleType():
            return f"module {value.__name__}"
        case type():
            return _named(value)
        case types.BuiltinFunctionType():
            owner = value.__self__
            of = owner.__name__ if isinstance(owner, (types.ModuleType, type)) else _named(type(owner))
            return f"builtin {of}.{value.__name__}"
        case types.MethodDescriptorType() | types.WrapperDescriptorType():
            return f"{_named(value.__objclass__)}.{value.__name__}"
        case OpOverload() | OpOverloadPacket():
            return str(value)
        case tuple() | list():
            return f"{type(value).__name__}({', '.join([_describe(x, inside) for x in value])})"
        case dict():
            return f"{{{', '.join([f'{_describe(k, inside)}: {_describe(x, inside)}' for k, x in value.items()])}}}"
    return _of_object(value)


def _of_object(value: Any) -> str:
    """The description of an object by its type and what its `__repr__` says, if that says it all."""
    said = repr(value)
    if isinstance(value, (torch.nn.Module, torch.Tensor)) or " at 0x" in said or f"{id(value):x}" in said.lower():
        raise ValueError(f"{said.splitlines()[0]} can be known by its identity only")
    return f"{_named(type(value))} {said}"


def _cell(cell: Any, within: tuple[int, ...]) -> str:
    """What a function closes over. Dynamo guards what it reads of that by itself, so that it may be anything."""
    try:
        return _describe(cell.cell_contents, within)
    except ValueError:
        return "something"


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def identities(found: Sequence[tuple[str, Any]]) -> list[Identity]:
    """Describe what guards hold by identity.

    Raises:
        ValueError: something can be known by its identity only.
    """
    return [(expression, describe(value)) for expression, value in found]


def stand_ins(
    wanted: Sequence[Identity], frame_locals: Any, frame_globals: dict[str, Any]
) -> tuple[list[tuple[str, Any]], str]:
    """Find in a frame what the expressions stand for.

    Returns:
        The expressions with the objects, and the first that is missing or of another description, in words; "" if none.
    """
    found: list[tuple[str, Any]] = []
    for expression, description in wanted:
        try:
            value = evaluate(expression, frame_locals, frame_globals)
        except Exception as error:  # whatever the user's objects raise
            return found, f"{place(expression, frame_locals)} does not exist here: {error}; {MODEL}"
        try:
            here = describe(value)
        except ValueError as error:
            here = str(error)
        if here != description:
            return found, another_object(expression, description, here, frame_locals)
        found.append((expression, value))
    return found, ""


def same_objects(found: Sequence[tuple[str, Any]], frame_globals: dict[str, Any]) -> Callable[[Any], bool]:
    """Return a check that the expressions stand for these very objects in a frame's locals.

    The check keeps neither optimizers nor functions, which may close over them, alive.
    """
    # A bound method is another object each time it is read.
    same = ["==" if isinstance(value, types.MethodType) else "is" for _, value in found]
    weak = [isinstance(value, (torch.optim.Optimizer, types.FunctionType)) for _, value in found]
    text = " and ".join(
        [f"({expression}) {same[i]} objects[{i}]{'()' * weak[i]}" for i, (expression, _) in enumerate(found)]
    )
    objects = [weakref.ref(value) if weak[i] else value for i, (_, value) in enumerate(found)]
    holds = evaluate(f"lambda objects: lambda L: {text}", None, frame_globals)(objects)

    def check(frame_locals: Any) -> bool:
        try:
            return holds(frame_locals)
        except Exception:  # whatever the user's objects raise: something does not exist any more
            return False

    return check


__all__ = ["Identity", "describe", "digest", "identities", "same_objects", "stand_ins"]
