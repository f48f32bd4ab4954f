"""Weight norm: w = v * g / |v|, with a norm for each index of one dim (Salimans and Kingma, 2016).

Any dim of v may be sharded; where the norm runs over it, sums of squares are all-reduced.
"""

from typing import Any

import torch

from ..call import Call, LocalCall, rule_for
from ..local_calls import all_reduce
from ..rule import Dims, Rule


def _factors(call: Call, v: Any) -> tuple[Dims, Dims, dict[str, Any]]:
    """Factors of v, and of tensors with one number per index of `dim`; sizes."""
    dim = call["dim"] % v.ndim
    full: Dims = tuple((f"d{i}",) for i in range(v.ndim))
    return full, tuple(d if i == dim else () for i, d in enumerate(full)), {f"d{i}": n for i, n in enumerate(v.shape)}


def _summed(x: torch.Tensor, call: LocalCall, ndim: int) -> torch.Tensor:
    """`x` summed over all dims except `dim`, and over the ranks."""
    dim = call["dim"] % ndim
    over = [i for i in range(ndim) if i != dim]
    return all_reduce(x.sum(over, keepdim=True), "sum", call, {f"d{i}" for i in over})


@rule_for("_weight_norm_interface")
def weight_norm(call: Call) -> Rule:
    v, _ = call.operands
    full, kept, sizes = _factors(call, v)
    others = frozenset((1, f) for f in sizes if (f,) not in kept)
    sums = {f: 1 for _, f in others}
    return Rule((full, kept), (full, kept), sizes, whole=others, local=_local, all_reduces=sums)


def _local(call: LocalCall) -> Any:
    v, g = call["v"], call["g"]
    wide = v.to(call.call.outputs[1].dtype)  # pyright: ignore[reportOptionalMemberAccess]
    norms = _summed(wide * wide, call, v.dim()).sqrt()
    return v * (g / norms).to(v.dtype), norms


@rule_for("_weight_norm_interface_backward")
def weight_norm_backward(call: Call) -> Rule:
    full, kept, sizes = _factors(call, call["saved_v"])
    others = frozenset((1, f) for f in sizes if (f,) not in kept)
    ways: dict[str, Any] = {"local": _local_backward, "all_reduces": {f: 1 for _, f in others}}
    ins = (full, full, kept, kept)
    return Rule(ins, (full, kept), sizes, linear=(frozenset({0}),), whole=others, **ways)


def _local_backward(call: LocalCall) -> Any:
    grad, v, g, norms = (call[name] for name in ("grad_w", "saved_v", "saved_g", "saved_norms"))
    along = _summed((grad * v).to(norms.dtype), call, v.dim())
    grad_v = (g / norms) * (grad - v * (along / (norms * norms)))
    return grad_v.to(v.dtype), (along / norms).to(g.dtype)


__all__ = ["weight_norm", "weight_norm_backward"]
