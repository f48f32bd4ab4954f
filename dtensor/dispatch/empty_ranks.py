"""Handles ranks whose shard has no elements, in graphs with symbolic sizes.

One graph serves many sizes, and for some of them a rank's shard may be empty. Most kernels then compute nothing, but a
kernel that refuses empty tensors would raise on that rank alone while the others wait. `decision` therefore tries the
operator on empty tensors. If it refuses, the graph is valid only for sizes at which no shard is empty, and any other
size gets a graph of its own.
"""

from collections.abc import Collection
from itertools import combinations
from math import prod
from typing import Any

import torch

from ..layout.layout import Layout
from ..mesh import local_sizes
from ..mesh.mesh import mesh_shape
from ..mesh.tensor_spec import Spec
from ..rules.call import Call, replaced
from ..rules.choose import Choice
from ..rules.rule import Rule
from ..torch_private.core import disable_current_modes, tree_map
from ..torch_private.symbolic_sizes import hint


def is_empty_somewhere(spec: Spec, layout: Layout) -> bool:
    """Whether the tensor has elements but some rank's shard has none; the last rank's shard is then empty."""
    sizes, shape = mesh_shape(spec.mesh), tuple(map(hint, spec.shape))
    return 0 not in shape and 0 in layout.local_shape(shape, sizes, [n - 1 for n in sizes])


def require_parts(call: Call, rule: Rule, choice: Choice) -> None:
    """Guard the graph on non-empty shards, for each sharded symbolic dim in which the operator refuses an empty shard.

    If a shard is empty at the present size, the graph is valid for that size only. The guards follow from global sizes
    and are the same on all ranks.
    """
    cuts = [(o, layout, d) for o, layout in zip(call.operands, choice.inputs) for d in _cut_symbols(o, layout)]
    refused = _refused(call, rule, choice, list(dict.fromkeys(layout.dims[d] for _, layout, d in cuts)))
    for spec, layout, d in cuts:
        if layout.dims[d] not in refused:
            continue
        sizes, size = mesh_shape(spec.mesh), spec.shape[d]
        if hint(size) and not layout.local_shape(tuple(map(hint, spec.shape)), sizes, [n - 1 for n in sizes])[d]:
            int(size)  # specializes the size to a number
        else:
            local_sizes.require_nonempty(size, [sizes[axis] for axis in layout.dims[d]])


def _cut_symbols(spec: Spec, layout: Layout) -> list[int]:
    """The dims of symbolic size that `layout` shards."""
    return [d for d, axes in enumerate(layout.dims) if axes and isinstance(spec.shape[d], torch.SymInt)]


Axes = tuple[int, ...]
"""The mesh axes that shard a dim, as in `Layout.dims`: those that one factor of the operator is sharded over."""

LARGE = 1 << 22
"""Maximum number of elements of an operand created to try an operator; beyond it the operator counts as refusing."""


def _refused(call: Call, rule: Rule, choice: Choice, cuts: list[Axes]) -> set[Axes]:
    """The entries of `cuts` for which the operator refuses an empty shard.

    They come from the rule, or from trying the operator outside the trace on empty tensors. A rank may have rows but no
    columns, so every subset of `cuts` is tried. An operator that cannot be tried counts as refusing, which costs a
    graph and is never wrong; this includes users' operators, which are not called outside their program.
    """
    if not cuts or torch.Tag.nondeterministic_seeded in call.func.tags:
        return set()
    device = call.operands[0].mesh.device_type
    if call.func.namespace not in ("aten", "prims", "dtensor") or (
        device != "cpu" and not torch.get_device_module(device).is_available()
    ):
        return set(cuts)
    refused = {choice.axes[f] for f in rule.refuses_empty if f in choice.axes}
    for n in range(1, len(cuts) + 1):
        for emptied in combinations([c for c in cuts if c not in refused], n):
            if _refuses(call, rule, choice, emptied):
                refused.update(emptied)
    return refused


def _refuses(call: Call, rule: Rule, choice: Choice, emptied: Collection[Axes]) -> bool:
    """Whether the operator raises on tensors whose dims sharded over the axes in `emptied` have no elements."""
    device = call.operands[0].mesh.device_type
    shapes = [_without_parts(o, layout, emptied) for o, layout in zip(call.operands, choice.inputs)]
    if max(map(prod, shapes)) > LARGE:
        return True
    left = iter(shapes)

    def stand_in(x: Any) -> Any:
        if isinstance(x, Spec):
            return torch.zeros(next(left), dtype=x.dtype, device=device)
        return hint(x) if isinstance(x, torch.SymInt) else x

    with disable_current_modes(), torch.no_grad():
        args, kwargs = tree_map(stand_in, (call.args, call.kwargs))
        out, layout = call.outputs[0], choice.outputs[0]
        if rule.shape_arg is not None and out is not None and layout is not None:
            made = Spec.make(call.operands[0].mesh, layout, out.shape, out.stride, out.dtype)
            shape = _without_parts(made, layout, emptied)
            args, kwargs = replaced(call.func, args, kwargs, [(rule.shape_arg, shape)])
        try:
            call.func(*args, **kwargs)
        except Exception:  # kernels raise all kinds of errors
            return True
    return False


def _without_parts(spec: Spec, layout: Layout, emptied: Collection[Axes]) -> list[int]:
    """The shape of the first rank's shard, with 0 for each symbolic dim sharded over axes in `emptied`."""
    sizes, cut = mesh_shape(spec.mesh), _cut_symbols(spec, layout)
    shape = layout.local_shape(tuple(map(hint, spec.shape)), sizes, [0] * len(sizes))
    return [0 if d in cut and layout.dims[d] in emptied else n for d, n in enumerate(shape)]
