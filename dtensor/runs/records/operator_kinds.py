"""Which operators compute something that is worth recording, and what they write to without reading it."""

from typing import Any

import torch

from ...torch_private.core import OpOverload, tree_leaves

EMPTY = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)
"""Operators whose results hold no values yet."""
NOT_RECORDED = frozenset(f"aten::{name}" for name in ("set_", "resize_", "is_pinned")) | frozenset(
    f"dtensor::{name}" for name in ("record_begin", "record", "record_end", "agree")
)
"""Operators that compute nothing."""
SAME_VALUE = frozenset(
    f"aten::{name}" for name in ("_unsafe_view", "lift_fresh", "detach", "alias", "view_as", "_reshape_alias", "clone")
)
"""Operators that return the value they were given. Which copies are made depends on the order in memory."""
OVERWRITE = frozenset(
    [
        "bernoulli",
        "uniform",
        "normal",
        "random",
        "exponential",
        "geometric",
        "log_normal",
        "cauchy",
        "fill",
        "zero",
        "copy",
    ]
)
"""In-place operators, without the underscore, that do not read what they write to."""


def overwritten(func: OpOverload, args: Any, kwargs: Any) -> set[int]:
    """The tensors that an operator writes to without reading them, by identity."""
    if short(func._schema.name) in OVERWRITE or "out" in func._overloadname:
        return {id(x) for x in written(func, args, kwargs)}
    return set()


def written(func: OpOverload, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator without results writes to."""
    found: list[torch.Tensor] = []
    for k, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[k] if k < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_leaves(given) if isinstance(x, torch.Tensor)]
    return found


def short(name: str) -> str:
    """The name by which operators of two runs are matched: without namespace, `_foreach`, and the mark of in-place."""
    return name.removeprefix("aten::").removeprefix("_foreach_").rstrip("_")


def new_value(name: str) -> bool:
    """Whether the result of an operator of that name holds a value, other than what it was given."""
    return name not in SAME_VALUE and name not in EMPTY


__all__ = ["EMPTY", "NOT_RECORDED", "OVERWRITE", "SAME_VALUE", "new_value", "overwritten", "short", "written"]
