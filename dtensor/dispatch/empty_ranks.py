"""Ranks without elements, in graphs whose sizes are symbols.

A graph serves many sizes, and of some of them a rank may have no part. Most kernels compute nothing then; those that
refuse would raise on that rank alone, and the others would wait. Which do is found by asking them. A graph with such an
operator holds for sizes of which every rank has a part, and any other size has a graph of its own.
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
    """Whether some rank's shard has no elements while others have some: then the last one's has none."""
    sizes, shape = mesh_shape(spec.mesh), tuple(map(hint, spec.shape))
    return 0 not in shape and 0 in layout.local_shape(shape, sizes, [n - 1 for n in sizes])


def require_parts(call: Call, rule: Rule, choice: Choice) -> None:
    """Let what is traced hold only where every rank has a part, or for this size only, of dimensions of which the
    operator refuses to have nothing.

    What is required follows from global sizes, and is the same on all ranks.
    """
    cuts = [(o, layout, d) for o, layout in zip(call.operands, choice.inputs) for d in _cut_symbols(o, layout)]
    refused = _refused(call, rule, choice, list(dict.fromkeys(layout.dims[d] for _, layout, d in cuts)))
    for spec, layout, d in cuts:
        if layout.dims[d] not in refused:
            continue
        sizes, size = mesh_shape(spec.mesh), spec.shape[d]
        if hint(size) and not layout.local_shape(tuple(map(hint, spec.shape)), sizes, [n - 1 for n in sizes])[d]:
            int(size)  # from here on a number
        else:
            local_sizes.require_nonempty(size, [sizes[axis] for axis in layout.dims[d]])


def _cut_symbols(spec: Spec, layout: Layout) -> list[int]:
    """The dimensions of symbolic size that `layout` cuts."""
    return [d for d, axes in enumerate(layout.dims) if axes and isinstance(spec.shape[d], torch.SymInt)]


Axes = tuple[int, ...]
"""The mesh axes that cut a dimension, as `Layout.dims` has them: what one factor of the operator is cut by."""

LARGE = 1 << 22
"""The most elements of an operand that is made to try an operator; with larger ones it counts as one that refuses."""


def _refused(call: Call, rule: Rule, choice: Choice, cuts: list[Axes]) -> set[Axes]:
    """Of what is cut, that of which a rank cannot have nothing: what the rule says, and else the operator is tried
    beside the trace, on tensors without any. A rank may have rows and no columns, so it is tried with every set of
    `cuts`.

    Where it cannot be tried, it is taken to refuse: that costs a graph and is never wrong. An operator of the user's is
    not called beside the program.
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
    """Whether the operator raises on tensors without elements where they are cut by the axes of `emptied`."""
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
        except Exception:  # kernels raise anything
            return True
    return False


def _without_parts(spec: Spec, layout: Layout, emptied: Collection[Axes]) -> list[int]:
    """The shape of the first rank's shard, but for dimensions of symbolic size that the axes of `emptied` cut, which
    have no elements."""
    sizes, cut = mesh_shape(spec.mesh), _cut_symbols(spec, layout)
    shape = layout.local_shape(tuple(map(hint, spec.shape)), sizes, [0] * len(sizes))
    return [0 if d in cut and layout.dims[d] in emptied else n for d, n in enumerate(shape)]
