"""Ranks without elements, in graphs whose sizes are symbols.

A graph serves many sizes, and of some of them a rank may have no part. Most kernels compute nothing then; those that
refuse would raise on that rank alone, and the others would wait. Which do is found by asking them. A graph with such an
operator holds for sizes of which every rank has a part, and any other size has a graph of its own.
"""

from math import prod
from typing import Any

import torch

from . import local_sizes
from ._torch import disable_current_modes, tree_map
from ._torch_sizes import hint
from .layout import Layout
from .mesh import mesh_shape
from .rules.call import Call, replaced
from .rules.choose import Choice
from .rules.rule import Rule
from .spec import Spec


def is_empty_somewhere(spec: Spec, layout: Layout) -> bool:
    """Whether some rank's shard has no elements while others have some: then the last one's has none."""
    sizes, shape = mesh_shape(spec.mesh), tuple(map(hint, spec.shape))
    return 0 not in shape and 0 in layout.local_shape(shape, sizes, [n - 1 for n in sizes])


def require_parts(call: Call, rule: Rule, choice: Choice) -> None:
    """Let what is traced hold only where every rank has a part, or for this size only, if the operator refuses
    tensors without elements.

    What is required follows from global sizes, and is the same on all ranks.
    """
    cuts = [(o, layout, _cut_symbols(o, layout)) for o, layout in zip(call.operands, choice.inputs)]
    if not any(dims for *_, dims in cuts) or not _refuses_empty(call, rule, choice):
        return
    for spec, layout, dims in cuts:
        none_somewhere = is_empty_somewhere(spec, layout)
        for d in dims:
            size: Any = spec.shape[d]
            if none_somewhere:
                int(size)  # from here on a number
            else:
                local_sizes.require_nonempty(size, [mesh_shape(spec.mesh)[axis] for axis in layout.dims[d]])


def _cut_symbols(spec: Spec, layout: Layout) -> list[int]:
    """The dimensions of symbolic size that `layout` cuts."""
    return [d for d, axes in enumerate(layout.dims) if axes and isinstance(spec.shape[d], torch.SymInt)]


FATAL = frozenset(
    {
        "aten::batch_norm_backward",
        "aten::native_batch_norm_backward",
        "aten::nll_loss2d_backward",
        "aten::nll_loss_backward",
    }
)
"""Kernels that end the process where they get tensors without elements (torch 2.13): a division by the number of
channels, of which there are none, a write to a class that is not there. They are not asked."""

LARGE = 1 << 22
"""The most elements of an operand that is made to try an operator; with larger ones it counts as one that refuses."""


def _refuses_empty(call: Call, rule: Rule, choice: Choice) -> bool:
    """Whether the operator raises where a rank has no part: tried beside the trace, on a tensor without any.

    Where it cannot be tried, it is taken to: that costs a graph and is never wrong. An operator of the user's is not
    called beside the program.
    """
    if torch.Tag.nondeterministic_seeded in call.func.tags:
        return False
    device = call.operands[0].mesh.device_type
    shapes = [_without_parts(o, layout) for o, layout in zip(call.operands, choice.inputs)]
    if (
        call.func.namespace not in ("aten", "prims", "dtensor")
        or call.func._schema.name in FATAL
        or (device != "cpu" and not torch.get_device_module(device).is_available())
        or max(map(prod, shapes)) > LARGE
    ):
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
            args, kwargs = replaced(call.func, args, kwargs, {rule.shape_arg: _without_parts(made, layout)})
        try:
            call.func(*args, **kwargs)
        except Exception:  # kernels raise anything
            return True
    return False


def _without_parts(spec: Spec, layout: Layout) -> list[int]:
    """The shape of the first rank's shard, but for dimensions of symbolic size that are cut, which have no elements."""
    sizes, cut = mesh_shape(spec.mesh), _cut_symbols(spec, layout)
    shape = layout.local_shape(tuple(map(hint, spec.shape)), sizes, [0] * len(sizes))
    return [0 if d in cut else n for d, n in enumerate(shape)]
