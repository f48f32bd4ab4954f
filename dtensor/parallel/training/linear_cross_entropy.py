"""Cross entropy of a linear layer's output without materialising the logits. Classes may be sharded.

`dtensor::linear_lse` computes, in chunks of samples, the logsumexp and the target logit of each sample; the loss is
ordinary arithmetic on these. Torch's own chunked `linear_cross_entropy` writes to plain buffers, so calls of it with a
DTensor are intercepted and run here too.
"""

from typing import Any

import torch

from ...comm.from_plain import refuse_tangent
from ...errors import ArgumentError
from ...layout.placements import Replicate
from ...tensor.tensor import DTensor
from ...torch_private.core import intercept
from . import linear_logsumexp as linear_logsumexp  # registers the operators

CHUNK = 1024
"""The default number of samples whose logits are in memory at once."""

REDUCTIONS = ("none", "mean", "sum")


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """`F.cross_entropy(F.linear(x, weight, bias), target, ...)` without materialising the logits.

    Works on DTensors and on plain tensors. If `weight` is sharded on classes, a rank only holds logits of its own
    classes, for at most `chunk` samples at a time. The forward then takes two all-reduces, of one and of two numbers
    per sample. The logits are computed twice, in forward and backward.

    Args:
        x: the input of the last layer, of shape (..., d). Samples may be sharded.
        weight: of shape (classes, d). Classes may be sharded.
        target: the class of each sample, of shape (...).
        bias: of shape (classes,).
        class_weight: the weight of each class in the loss, of shape (classes,).
        ignore_index: as in `torch.nn.functional.cross_entropy`.
        reduction: "none", "mean" or "sum", as in `torch.nn.functional.cross_entropy`.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.
        chunk: the number of this rank's samples whose logits are in memory at once.

    Returns:
        The loss, in the dtype of `x`: zero-dimensional, or of the shape of `target` for reduction="none".

    Raises:
        ValueError: shapes do not match, `target` has a floating point dtype, or the reduction is unknown.
        RuntimeError: a target is not a valid class.
    """
    _check(x, weight, target, bias, reduction)
    for given in (x, weight, bias):
        if given is not None:
            refuse_tangent(given, "linear_cross_entropy")
    valid = target != ignore_index
    lse, picked = torch.ops.dtensor.linear_lse(x, weight, bias, target, ignore_index, chunk)
    share = valid.to(lse.dtype)
    if class_weight is not None:
        share = share * class_weight.to(lse.dtype).index_select(0, (target * valid).reshape(-1)).reshape(target.shape)
    loss = (lse - picked) * share
    if label_smoothing:
        smooth = _smooth(x, weight, bias, class_weight, lse) * valid
        loss = loss * (1 - label_smoothing) + smooth * (label_smoothing / weight.shape[0])
    if reduction == "none":
        return loss.to(x.dtype)
    loss = loss.sum()
    return (loss / _settled(share.sum()) if reduction == "mean" else loss).to(x.dtype)


def _check(x: Any, weight: Any, target: Any, bias: Any, reduction: str) -> None:
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1] or x.shape[:-1] != target.shape:
        raise ArgumentError(
            "linear_cross_entropy takes x (..., d), weight (classes, d) and target (...); got shapes "
            f"{tuple(x.shape)}, {tuple(weight.shape)} and {tuple(target.shape)}"
        )
    if target.is_floating_point():
        raise ArgumentError(
            f"linear_cross_entropy takes the class of each sample, not probabilities; target is of dtype "
            f"{target.dtype}; write "
            "target.long(), or cross_entropy(linear(x, weight), target) for probabilities"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError(f"the bias has one number for each of {weight.shape[0]} classes; got {tuple(bias.shape)}")
    if reduction not in REDUCTIONS:
        raise ArgumentError(f"reduction is one of {', '.join(REDUCTIONS)}; got {reduction!r}")


def _smooth(x: Any, weight: Any, bias: Any, class_weight: Any, lse: Any) -> Any:
    """The loss with all classes as targets. It is linear in the logits, so they need not be materialised."""
    shares = torch.ones_like(weight[:, 0]) if class_weight is None else class_weight.to(weight.dtype)
    logits = (x @ _settled(shares @ weight)).to(lse.dtype)
    if bias is not None:
        logits = logits + _settled((shares * bias).sum())
    return lse * _settled(shares.sum()) - logits


def _settled(x: torch.Tensor) -> torch.Tensor:
    """`x` with partial sums reduced, which the next operator would need anyway."""
    if not isinstance(x, DTensor):
        return x
    return x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])


def _chunked(
    x: Any, weight: Any, target: Any, bias: Any, class_weight: Any, ignore_index: Any, chunk: Any, *accumulation: Any
) -> Any:
    return linear_cross_entropy(
        x, weight, target, bias, class_weight, ignore_index=ignore_index, reduction="none", chunk=chunk
    )


def _chunked_and_reduced(
    x: Any,
    weight: Any,
    target: Any,
    bias: Any,
    class_weight: Any,
    reduction: Any,
    ignore_index: Any,
    label_smoothing: Any,
    chunk: Any,
    *rest: Any,
) -> Any:
    loss = linear_cross_entropy(
        x,
        weight,
        target,
        bias,
        class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        chunk=chunk,
    )
    return (loss, *[loss.detach() for _ in range(3)])


intercept("torch_nn::_linear_cross_entropy_batch_chunked_no_reduction", _chunked)
intercept("torch_nn::_linear_cross_entropy_batch_chunked", _chunked_and_reduced)

__all__ = ["linear_cross_entropy"]
