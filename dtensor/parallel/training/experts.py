"""Layers of experts as one operator, of which tokens and experts may be sharded."""

from collections.abc import Callable
from typing import Any

import torch

from ...comm.from_plain import refuse_tangent
from ...errors import ArgumentError, ArgumentTypeError, shown
from ...rules.expert_layers import gate_name
from ...tensor.tensor import DTensor


def expert_gate(function: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor) -> str:
    """What `experts` takes as gate: the name of a function of rows, whose forward and backward are traced here.

    Args:
        function: from (n, g) to (n, f), for any n; each row of the result may depend on the same row only. It may hold
            numbers, but no tensors.
        like: the matrices `up` of shape (e, d, g), for the dtype and device of the rows.

    Raises:
        ValueError: the function returns something else, mixes rows, draws random numbers, or holds a tensor.
    """
    if isinstance(like, DTensor):
        return gate_name(function, like.to_local().detach(), like.shape[-1], like.device_mesh.device_type)
    return gate_name(function, like.detach(), like.shape[-1])


def experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    gate: str,
) -> torch.Tensor:
    """A layer of experts: the weighted sum of what its k experts make of each token.

    `out[i] = sum over j of weight[i, j] * (gate(x[i] @ up[e] + up_bias[e]) @ down[e] + down_bias[e])`, with e =
    `index[i, j]`.

    Works on DTensors and on plain tensors. Tokens may be sharded, over any mesh axes, and experts on their own dim,
    over the same or others. Where an axis shards both, tokens are gathered and results reduce-scattered, of sizes that
    do not depend on the routing; no token is dropped, and nothing is read to the host of a GPU. Every rank computes
    what its experts have to.

    Args:
        x: tokens (t, d).
        index: for each token the numbers of its experts (t, k), integers. One that is no expert's counts for nothing.
        weight: how much each of them counts (t, k).
        up, down: matrices (e, d, g) and (e, f, o).
        up_bias, down_bias: (e, g) and (e, o), or None.
        gate: what is between both products, a function from (n, g) to (n, f), as `expert_gate` returned it.

    Returns:
        (t, o), in the dtype of `x` times `weight`.

    Raises:
        ValueError: shapes do not fit each other, or `expert_gate` has not made the gate in this process.
        TypeError: `index` does not hold integers, or the gate is a function.

    >>> gate = dtensor.parallel.expert_gate(lambda h: F.silu(h[:, ::2]) * h[:, 1::2], up)
    >>> out = dtensor.parallel.experts(tokens, index, weight, up, down, gate=gate)
    """
    _check(x, index, weight, up, down, up_bias, down_bias)
    if not isinstance(gate, str):
        raise ArgumentTypeError(
            f"gate is what expert_gate makes of a function; got {shown(gate)}; write "
            "gate=dtensor.parallel.expert_gate(function, up), once, outside of compiled code"
        )
    for given in (x, weight, up, down, up_bias, down_bias):
        if given is not None and not torch.compiler.is_compiling():
            refuse_tangent(given, "experts")
    out, _ = torch.ops.dtensor.experts(x, index, weight, up, down, up_bias, down_bias, gate)
    return out


def _check(x: Any, index: Any, weight: Any, up: Any, down: Any, up_bias: Any, down_bias: Any) -> None:
    fits = (
        (x.dim(), index.dim(), up.dim(), down.dim()) == (2, 2, 3, 3)
        and index.shape == weight.shape
        and index.shape[0] == x.shape[0]
        and up.shape[:2] == (down.shape[0], x.shape[1])
        and all(b is None or b.shape == (w.shape[0], w.shape[2]) for b, w in ((up_bias, up), (down_bias, down)))
    )
    if not fits:
        given = (x, index, weight, up, down, up_bias, down_bias)
        raise ArgumentError(
            "experts takes x (t, d), index and weight (t, k), up (e, d, g), down (e, f, o) and biases (e, g) and "
            f"(e, o); got {', '.join(['None' if t is None else shown(t) for t in given])}"
        )
    if index.is_floating_point() or index.dtype == torch.bool:
        raise ArgumentTypeError(f"index holds the numbers of experts; got dtype {index.dtype}; write index.long()")


__all__ = ["expert_gate", "experts"]
