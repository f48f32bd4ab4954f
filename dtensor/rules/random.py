"""Random operators: the same global numbers on every placement as on one device.

The global tensor is drawn from the default generator, which must be in the same state on all ranks, and each rank keeps
its shard: the global tensor is held for the moment of the draw (the factories in `sampling` hold a block of it only).
"""

import torch

from ..collectives import ops
from ..mesh import group_name
from .call import Call, LocalCall, rule_for
from .pointwise import broadcast
from .rule import Dims, Rule


def keep_shard(x: torch.Tensor, layout, mesh) -> torch.Tensor:
    """This rank's shard of the global tensor `x`."""
    for dim, axes in enumerate(layout.dims):
        for axis in axes:
            x = ops.shard(x, dim, group_name(mesh, axis))
    return x


IN_PLACE = (
    "bernoulli_",
    "uniform_",
    "normal_",
    "exponential_",
    "random_",
    "log_normal_",
    "cauchy_",
    "geometric_",
)


READS = ("aten.bernoulli.default", "aten.bernoulli.out", "aten.normal.Tensor_float", "aten.normal.float_Tensor")
"""Operators with one operand that do read it."""


@rule_for(*(n.removesuffix("_") for n in IN_PLACE), "rand_like", "randn_like", "randint_like", "normal_functional")
def random(call: Call) -> Rule:
    """The operand gives shape and dtype only, unless it holds the probabilities: then it is put together first."""
    out = next(o for o in call.outputs if o is not None)
    ins, sizes = broadcast([o.shape for o in call.operands], out.shape)
    full = tuple((f,) for f in sizes)
    if len(call.operands) > 1 or str(call.func) in READS:
        return Rule(ins, (full,), sizes, blocked=frozenset(sizes))
    return Rule(ins, (full,), sizes, unread=frozenset({0}), local=_draw)


def _draw(call: LocalCall):
    layout, spec, template = call.layouts[0], call.call.operands[0], call.args[0]
    assert layout is not None
    if not any(layout.dims) and template.stride() == spec.stride:
        return call.run()
    # Samplers fill memory in order, so the strides decide which element gets which number.
    whole = template.new_empty_strided(spec.shape, spec.stride)
    mine = keep_shard(call.func(whole, *call.args[1:], **call.kwargs), layout, call.mesh)
    return template.copy_(mine) if call.func._schema.name.endswith("_") else mine


@rule_for("native_dropout")
def native_dropout(call: Call) -> Rule:
    (ins,), sizes = broadcast([call.operands[0].shape], call.operands[0].shape)
    return Rule((ins,), (ins, ins), sizes, local=_local_dropout)


def _local_dropout(call: LocalCall):
    x, p, layout = call["input"], call["p"], call.layouts[0]
    assert layout is not None
    if not any(layout.dims) or call["train"] is False:
        return call.run()
    whole = x.new_ones(tuple(call.call.operands[0].shape))
    mask = keep_shard(torch.ops.aten.native_dropout.default(whole, p, True)[1], layout, call.mesh)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


@rule_for("rrelu_with_noise")
def rrelu_with_noise(call: Call) -> Rule:
    """In training one number is drawn for each negative element, in order: the whole input is needed for that."""
    shape = call.operands[0].shape
    (full,), sizes = broadcast([shape], shape)
    if not call["training"]:
        return Rule((full, full), (full,), sizes, unread=frozenset({1}), written=frozenset({1}))
    whole: Dims = ((),) * len(shape)
    return Rule((whole, full), (full,), sizes, unread=frozenset({1}), written=frozenset({1}), local=_local_rrelu)


def _local_rrelu(call: LocalCall):
    x, noise, layout = call["self"], call["noise"], call.layouts[0]
    assert layout is not None
    if not any(layout.dims):
        return call.run()
    drawn = torch.empty_like(x)
    made = call.run(noise=drawn)
    noise.copy_(keep_shard(drawn, layout, call.mesh))
    return keep_shard(made, layout, call.mesh)


__all__ = ["keep_shard"]
