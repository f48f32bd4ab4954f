"""Random operators: for every placement the global numbers are the same as on one device.

Every rank draws the global tensor from its generator, which must be in the same state on all ranks, and keeps its
shard. So each rank briefly holds the global tensor, and spends the time to draw it. Only sequential fills of large
contiguous CPU tensors are drawn block by block (`dtensor.rules.sampling`).

An in-place fill of a Partial tensor leaves it Partial, with the numbers as its sum; operators that return a new tensor
return it replicated. Operators that read values (probabilities, means) gather them first.
"""

from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...comm.collectives import emit
from ...comm.redistribute import redistribute_local
from ...layout.layout import Layout
from ...mesh.mesh import group_name
from ...mesh.tensor_spec import Spec, contiguous_stride
from ..bind import rule_for, rule_table
from ..call import Call, LocalCall
from ..notation import LibraryRule, Rule, library_rule
from ..plan import signature
from ..sampling import BLOCK, sample


def keep_shard(x: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's shard of the global tensor `x`."""
    for dim, axes in enumerate(layout.dims):
        for axis in axes:
            x = emit.shard(x, dim, group_name(mesh, axis))
    return x


SEQUENTIAL = ("uniform_", "normal_", "random_", "log_normal_", "cauchy_", "geometric_", "rand_like", "randn_like")
"""Fills whose CPU kernels draw the numbers in sequence, so that a tensor may be drawn in blocks."""

FILLS = (
    "bernoulli_",
    "uniform_",
    "normal_",
    "exponential_",
    "random_",
    "log_normal_",
    "cauchy_",
    "geometric_",
)
LIKE = ("rand_like", "randn_like", "randint_like", "normal_functional")

READS = ("aten.bernoulli.default", "aten.bernoulli.out", "aten.normal.Tensor_float", "aten.normal.float_Tensor")
"""Operators that read the values of their only operand."""


@rule_for(*(n.removesuffix("_") for n in FILLS), *LIKE)
def random(call: Call) -> Rule:
    """The operand gives only shape and dtype, unless it holds probabilities or means; then it is gathered first."""
    rest = ",*" * (len(signature(call.func).arguments) - 1)
    if call.func._schema.name.endswith("_") or (not rest and str(call.func) not in READS):
        # In place, the second operand is read and has to be replicated; the first one is not read.
        return library_rule(f"...{rest}->...", unread=0, local=_draw)
    return Rule(f"*{rest}->*")


def _draw(call: LocalCall) -> Any:
    (layout,), (made,) = call.layouts, call.call.outputs
    spec, template = call.call.operands[0], call.args[0]
    assert layout is not None
    assert made is not None
    if not any(layout.dims) and template.stride() == spec.stride:
        return call.run()
    name = call.func._schema.name.removeprefix("aten::")
    rest: tuple[Any, ...] = call.args[1:]
    if name in SEQUENTIAL and _in_blocks(template, spec):

        def draw(size: Any, **_: Any) -> torch.Tensor:
            return call.func(template.new_empty(size), *rest, **call.kwargs)

        mine = sample(draw, Spec.make(call.mesh, layout, spec.shape, spec.stride, made.dtype), BLOCK)
    else:
        # Samplers fill memory in order, so the strides decide which element gets which number.
        whole = template.new_empty_strided(spec.shape, spec.stride)
        mine = keep_shard(call.func(whole, *rest, **call.kwargs), layout, call.mesh)
    return template.copy_(mine) if name.endswith("_") else mine


def _in_blocks(template: torch.Tensor, spec: Spec) -> bool:
    """Whether to draw block by block: for a real CPU tensor, contiguous globally, with more than BLOCK elements."""
    if type(template) is not torch.Tensor or not template.is_cpu:
        return False
    return spec.stride == contiguous_stride(spec.shape) and prod(spec.shape) > BLOCK


def _local_dropout(call: LocalCall) -> Any:
    x, p, spec = call["input"], call["p"], call.call["input"]
    (layout, _), (_, made) = call.layouts, call.call.outputs
    assert layout is not None
    assert made is not None
    # For an empty tensor torch returns a mask of the input's dtype.
    if call["train"] is False or (not any(layout.dims) and x.stride() == spec.stride):
        out, mask = call.run()
        return out, mask.to(made.dtype)
    whole = x.new_empty_strided(spec.shape, spec.stride)
    mask = torch.ops.aten.native_dropout.default(whole, p, True)[1]
    mask = keep_shard(mask.to(made.dtype), layout, call.mesh)
    # As in the kernel, the scale is rounded to the dtype first.
    return x * (mask.to(x.dtype) * (0.0 if p == 1 else 1 / (1 - p))), mask


DROPOUT = {"native_dropout": LibraryRule("...->...,...", local=_local_dropout)}

rule_table(__name__, DROPOUT)


@rule_for("rrelu_with_noise", "rrelu_with_noise_functional")
def rrelu(call: Call) -> Rule:
    """Draws a number for each negative element, so the operand is gathered; the noise, which is written, is a shard."""
    outs = ",".join(["..."] * len(call.outputs))
    if not call["training"]:
        return Rule(f"...,...->{outs}")
    if call.func._schema.name.endswith("_"):
        return library_rule(f"...,...->{outs}", unread=(0, 1), local=_local_rrelu)
    return library_rule(f"*,...->{outs}", unread=1, local=_local_rrelu)


def _local_rrelu(call: LocalCall) -> Any:
    x, noise, (layout, *_) = call["self"], call["noise"], call.layouts
    assert layout is not None
    if not any(layout.dims):
        return call.run()
    spec, in_place = call.call["self"], call.func._schema.name.endswith("_")
    everywhere = Layout.make(layout.mesh_ndim, ((),) * spec.ndim, ())
    # In place, the operand has the layout of the result.
    whole = redistribute_local(x, spec.with_layout(layout), everywhere).clone() if in_place else x
    drawn = noise.new_empty_strided(spec.shape, spec.stride)
    made = call.run(self=whole, noise=drawn)
    if isinstance(made, tuple):
        return tuple(keep_shard(t, layout, call.mesh) for t in made)
    noise.copy_(keep_shard(drawn, layout, call.mesh))
    mine = keep_shard(made, layout, call.mesh)
    return x.copy_(mine) if in_place else mine


__all__ = ["DROPOUT", "keep_shard"]
