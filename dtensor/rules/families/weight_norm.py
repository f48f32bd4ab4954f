"""Weight norm: w = v * g / |v|, with a norm for each index of one dim (Salimans and Kingma, 2016).

Any dim of v may be sharded; where the norm runs over it, sums of squares are all-reduced.
"""

from typing import Any

import torch

from ..bind import rule_for
from ..call import Call, LocalCall
from ..local_calls import all_reduce
from ..notation import LETTERS, Rule, library_rule


def _summed(x: torch.Tensor, call: LocalCall, ndim: int) -> torch.Tensor:
    """`x` summed over all dims except `dim`, and over the ranks."""
    dim = call["dim"] % ndim
    over = [i for i in range(ndim) if i != dim]
    return all_reduce(x.sum(over, keepdim=True), "sum", call, {LETTERS[i] for i in over})


@rule_for("_weight_norm_interface")
def weight_norm(call: Call) -> Rule:
    """All dims may be sharded, for an all-reduce of the squared norms."""
    return _rule(call, "V,K->V,K", call["v"].ndim, _local)


def _rule(call: Call, text: str, ndim: int, local: Any, linear: Any = ()) -> Rule:
    """A rule in which V stands for the dims of v, and K for those of tensors with one number for each index of dim."""
    dim, full = call["dim"] % ndim, LETTERS[:ndim]
    kept = "".join([f if i == dim else "1" for i, f in enumerate(full)])
    others = full.replace(full[dim], "")
    text, whole = text.replace("V", full).replace("K", kept), tuple([(1, f) for f in others])
    return library_rule(text, linear=linear, whole=whole, local=local, all_reduces=(others, 1))


def _local(call: LocalCall) -> Any:
    v, g = call["v"], call["g"]
    wide = v.to(call.call.outputs[1].dtype)  # pyright: ignore[reportOptionalMemberAccess]
    norms = _summed(wide * wide, call, v.dim()).sqrt()
    return v * (g / norms).to(v.dtype), norms


@rule_for("_weight_norm_interface_backward")
def weight_norm_backward(call: Call) -> Rule:
    """All dims may be sharded, for an all-reduce of sums."""
    return _rule(call, "V,V,K,K->V,K", call["saved_v"].ndim, _local_backward, linear=0)


def _local_backward(call: LocalCall) -> Any:
    grad, v, g, norms = (call[name] for name in ("grad_w", "saved_v", "saved_g", "saved_norms"))
    along = _summed((grad * v).to(norms.dtype), call, v.dim())
    grad_v = (g / norms) * (grad - v * (along / (norms * norms)))
    return grad_v.to(v.dtype), (along / norms).to(g.dtype)


__all__ = ["weight_norm", "weight_norm_backward"]
