"""Views that are copies: what is written to them is written to their base as well.

A view of a DTensor shares its local tensor's memory, unless the operands had to be redistributed, or the shard has no
such view. Such a result remembers what it is a view of, and after every operator that writes to it the base is
brought up to date: gathered, viewed, written and cut again. That costs communication, and is right.
The other way round a copy does not follow: it does not see what is written to its base later.
"""

from typing import Any

import torch

from ._torch import is_alias_of
from .layout import Layout
from .redistribute import redistribute_local
from .spec import Spec


def remember(func, args: tuple, kwargs: dict[str, Any], out) -> None:
    """Note in `out`, a view by `func`, what it is a view of, if it is a copy."""
    base = args[0]
    for index, made in enumerate(out if isinstance(out, (list, tuple)) else (out,)):
        if base._view_of is not None or not is_alias_of(base._local_tensor, made._local_tensor):
            made._view_of = (func, args, kwargs, index if isinstance(out, (list, tuple)) else None)


def write_through(x) -> None:
    """Bring the base of `x`, a copy that was written to, up to date."""
    func, (base, *args), kwargs, index = x._view_of
    spec = base._spec
    held = _whole(base).clone()
    view = func(held, *args, **kwargs)
    (view if index is None else view[index]).copy_(_whole(x))
    replicated = spec.with_layout(_replicated(spec))
    base._local_tensor.copy_(redistribute_local(held, replicated, spec.layout))
    if base._view_of is not None:
        write_through(base)


def _replicated(spec: Spec) -> Layout:
    return Layout.make(spec.mesh.ndim, ((),) * spec.ndim, ())


def _whole(x) -> torch.Tensor:
    return redistribute_local(x._local_tensor, x._spec, _replicated(x._spec))


__all__ = ["remember", "write_through"]
