"""The library that defines the operators `torch.ops.dtensor.*`."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import library as operators

library: operators.Library = operators.Library("dtensor", "DEF")


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], *, tags: Sequence[Any] = ()) -> None:
    """Define an operator that is no composite of others: its kernel, for tensors of any device, and its fake kernel."""
    name, _, _ = schema.partition("(")
    library.define(schema, tags=tuple(tags))
    library.impl(name, kernel, "CompositeExplicitAutograd")
    operators.register_fake(f"dtensor::{name}", fake, lib=library)


__all__ = ["define", "library"]
