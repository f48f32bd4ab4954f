"""Looks up the rule of an operator, in the tables or by torch's tags."""

from functools import cache

import torch

from ..torch_private.core import OpOverload
from .call import RULES, RuleFunction, base_name
from .families.pointwise import pointwise


def rule_of(func: OpOverload) -> RuleFunction | None:
    """The rule function of an operator; None if it has none.

    An entry in `RULES` comes first: one for this overload, then one under its `base_name`. Otherwise an operator gets
    the pointwise rule if torch tags any of its overloads as pointwise.
    """
    return RULES.get(str(func)) or RULES.get(base_name(func)) or (pointwise if _is_pointwise(base_name(func)) else None)


@cache
def _is_pointwise(name: str) -> bool:
    namespace, _, short = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), short, None) if namespace in ("aten", "prims") else None
    return packet is not None and any(_tagged(getattr(packet, overload)) for overload in packet.overloads())


def _tagged(func: OpOverload) -> bool:
    if torch.Tag.pointwise not in func.tags or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    returns = func._schema.returns
    return bool(returns) and all("Tensor" in str(r.type) for r in returns)


__all__ = ["rule_of"]
