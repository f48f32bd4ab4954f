"""The hooks of the modules that a frame refers to. Dynamo traces them, and makes no guards on them.

In one process they are expected to be there before something is compiled. A package is made in another one, whose
model may have had others.
"""

import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from .identities import describe
from .refusals import DIGEST, place

KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Where modules keep the hooks of their calls."""

Hooks = dict[str, tuple[str, ...]]
"""An expression for a module, as Dynamo writes it -> what its hooks are. Modules without hooks are absent."""


def hooks(code: types.CodeType, frame_locals: Mapping[str, Any], frame_globals: Mapping[str, Any]) -> Hooks:
    """The hooks of all modules within those that a frame has as locals, or names as globals."""
    found: Hooks = {}
    for root, module in _modules(code, frame_locals, frame_globals):
        own = root == "L['self']"  # its own hooks run around the frame
        for path, part in module.named_modules():
            if own and not path:
                continue
            said = tuple([f"{kind} {_said(hook)}" for kind in KINDS for hook in getattr(part, kind).values()])
            if said:
                found[root + "".join([f"._modules['{name}']" for name in path.split(".") if name])] = said
    return found


def _modules(
    code: types.CodeType, frame_locals: Mapping[str, Any], frame_globals: Mapping[str, Any]
) -> Iterator[tuple[str, nn.Module]]:
    for scope, names, values in (("L", frame_locals, frame_locals), ("G", code.co_names, frame_globals)):
        for name in names:
            if isinstance(value := values.get(name), nn.Module):
                yield f"{scope}['{name}']", value


def _said(hook: Any) -> str:
    try:
        return describe(hook)
    except ValueError:  # an object that is known by its identity only
        return f"{type(hook).__module__}.{type(hook).__qualname__}"


def other_hooks(before: Hooks, now: Hooks, frame_locals: Mapping[str, Any]) -> str:
    """The first module that has other hooks than when the frame was compiled, in words; "" if there is none."""
    module = next((m for m in sorted({*before, *now}) if before.get(m) != now.get(m)), None)
    if module is None:
        return ""
    words = [", ".join([_shown(said) for said in hooks.get(module, ())]) or "none" for hooks in (before, now)]
    return f"the hooks of {place(module, frame_locals)} were {words[0]}, and are {words[1]}"


def _shown(said: str) -> str:
    kind, _, hook = DIGEST.sub("", said).partition(" ")
    return f"{hook} ({kind.strip('_').removesuffix('s').replace('_', ' ')})"


__all__ = ["Hooks", "hooks", "other_hooks"]
