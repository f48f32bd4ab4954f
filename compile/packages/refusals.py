"""Why a frame of a package does not fit, in the terms of the program: what was what, and what it is now.

    L['self']._modules['layers']._modules['0']._parameters['weight']  ->  the parameter layers.0.weight
    L['x']                                                            ->  the argument x

A guard says which expression it looks at. What that stood for when the package was made is kept with the guards, and
what it stands for now is in the frame; both are described in the same words.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dtensor.tensor.tensor import DTensor
from dtensor.torch_private.frame_data import Failed, evaluate

SHOWN = 60
"""The most characters of a value that are shown."""

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

ROOT = re.compile(r"^(?P<scope>[LG])\['(?P<name>[^']+)'\]")
STEP = re.compile(
    r"\._(?P<kind>modules|parameters|buffers)\['(?P<part>[^']+)'\]|\.(?P<attribute>\w+)|\[(?P<index>'[^']*'|-?\w+)\]"
)
"""A step from an object to a part of it, in an expression of Dynamo's."""

SOURCES = re.compile(r"[LG]\['[^']+'\](?:\.\w+|\['[^']*'\]|\[-?\w+\])*")
"""An expression inside the text of a guard."""

PARTS = ("._modules", "._parameters", "._buffers")
"""Attributes with the parts of a module: its user knows the module, not the dicts of its parts."""

GLOBAL = re.compile(r"GLOBAL_STATE changed: (.+)")
STATES: dict[str, tuple[str, Callable[[], Any] | None]] = {
    "grad_mode": ("gradients were {was}, and are {now} (torch.no_grad)", torch.is_grad_enabled),
    "autocast(cpu)_enabled": ("autocast was {was}, and is {now}", lambda: torch.is_autocast_enabled("cpu")),
    "autocast(cuda)_enabled": ("autocast was {was}, and is {now}", lambda: torch.is_autocast_enabled("cuda")),
    "default_dtype": ("the default dtype was another one than {now}", torch.get_default_dtype),
    "num_threads": ("torch had another number of threads than {now}", torch.get_num_threads),
    "deterministic_algorithms": (
        "deterministic algorithms were {was}, and are {now}", torch.are_deterministic_algorithms_enabled,
    ),
}  # fmt: skip
"""Torch's name for a setting that guards compare -> what to say, and what it is now."""

CALL = "call it so in the program that is packaged, too"
MODEL = "make the package again, from the model as it is now"
PLACE = "make the package again, with the call in the same place"


def place(expression: str, frame_locals: Mapping[str, Any]) -> str:
    """What the program calls what an expression of Dynamo's stands for."""
    root = ROOT.match(expression)
    if root is None:
        return expression
    name, rest = root["name"], expression[root.end() :]
    value = frame_locals.get(name) if root["scope"] == "L" else None
    path, end, kind = list[str](), 0, "modules"
    for step in STEP.finditer(rest):
        if step.start() != end or step["kind"] is None:
            break
        path, end, kind = [*path, step["part"]], step.end(), step["kind"]
    tail = rest[end:]
    is_model = isinstance(value, nn.Module) or bool(path)
    if not is_model:
        what = "argument" if root["scope"] == "L" else "global"
        return f"the {what} {name}{tail}"
    inside = ".".join(path)
    owner = "" if name == "self" else f" of {name}"
    if tail.startswith("."):
        return f"{tail[1:]} of {f'the module {inside}' if inside else 'the model'}{owner}"
    if not path:
        return f"the model{owner}"
    return f"the {kind.removesuffix('s')} {inside}{owner}{tail}"


def described(value: Any) -> str:
    """What a value is, as far as guards may look at it."""
    match value:
        case DTensor():
            placements = ", ".join(map(str, value.placements))
            return f"a DTensor of {_tensor(value)} {placements}"
        case nn.Parameter():
            return f"a plain parameter of {_tensor(value)}"
        case torch.Tensor():
            return f"a plain tensor of {_tensor(value)}"
        case nn.Module():
            return f"a {type(value).__qualname__}" + (f" of {len(value)} modules" if isinstance(value, LISTS) else "")
        case dict():
            return f"a dict of {len(value)} items ({_short(', '.join(map(str, value)))})"
        case list() | tuple() | set():
            return f"a {type(value).__name__} of {len(value)} items, {_short(repr(value))}"
        case None | bool() | int() | float() | str() | torch.dtype() | torch.device():
            return _short(repr(value))
        case _:
            name = getattr(value, "__qualname__", "") or f"a {type(value).__qualname__}"
            return _short(name)


def _tensor(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _aspects(value: Any) -> Iterator[str]:
    """What a value is, from the usual description to what distinguishes two that have the same."""
    yield described(value)
    if isinstance(value, torch.Tensor):
        yield f"a tensor that {'requires a gradient' if value.requires_grad else 'requires no gradient'}"
        yield f"a tensor on {value.device}"
        yield f"a tensor with strides {tuple(value.stride())}"
    yield f"{type(value).__module__}.{type(value).__qualname__} {_short(repr(value).splitlines()[0])}"


def refusal(failed: Failed, frame_locals: Mapping[str, Any], frame_globals: dict[str, Any]) -> str:
    """Why guards do not hold, in words, and what to do.

    Args:
        failed: the guard, and what there was when the package was made.
        frame_locals, frame_globals: what there is now.
    """
    if (state := GLOBAL.match(failed.text)) is not None:
        return f"{_state(state[1].strip())}; {PLACE}"
    expression = failed.source or next(iter(SOURCES.findall(failed.text)), "")
    if not expression:
        return f"a guard does not hold: {failed.text}; {MODEL}"
    for parts in PARTS:
        expression = expression.removesuffix(parts)
    where = place(expression, frame_locals)
    before = _value(expression, failed.local_scope, failed.global_scope)
    now = _value(expression, frame_locals, frame_globals)
    remedy = CALL if where.startswith("the argument") else MODEL
    if now is MISSING:
        return f"{where} is missing; {remedy}"
    if before is MISSING:
        return f"{where} is {described(now)}, which it was not ({_plain(failed.text, frame_locals)}); {remedy}"
    for was, here in zip(_aspects(before), _aspects(now), strict=False):
        if was != here:
            return f"{where} was {was}, and is {here}; {remedy}"
    return f"{where} is another one ({_plain(failed.text, frame_locals)}); {remedy}"


MISSING: Any = object()


def _value(expression: str, frame_locals: Any, frame_globals: Any) -> Any:
    try:
        value = evaluate(expression, frame_locals, frame_globals)
    except Exception:  # whatever the user's objects raise
        return MISSING
    return MISSING if type(value).__name__ == "_Missing" else value


def _state(name: str) -> str:
    said, read = STATES.get(name, (f"the setting {name} of torch is another one", None))
    now = read() if read is not None else None
    words = {True: "on", False: "off"}
    is_switch = isinstance(now, bool)
    return said.format(was=words[not now] if is_switch else "", now=words[now] if is_switch else now)


def _plain(text: str, frame_locals: Mapping[str, Any]) -> str:
    """The text of a guard, with expressions as the program has them."""
    return SOURCES.sub(lambda m: place(m[0], frame_locals), text)


DIGEST = re.compile(r" [0-9a-f]{16}\b")


def another_object(expression: str, was: str, now: str, frame_locals: Mapping[str, Any]) -> str:
    """Why an object is not the one that a frame was compiled for, in words, and what to do."""
    before, here = (DIGEST.sub("", text).replace("builtin builtins.NoneType.", "torch.") for text in (was, now))
    if before == here:
        before, here = "other code", f"{here} with this code"
    where = place(expression, frame_locals)
    return f"{where} was {before}, and is {here}; {CALL if where.startswith('the argument') else MODEL}"


__all__ = ["another_object", "described", "place", "refusal"]
