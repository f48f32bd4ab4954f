"""`torch.optim.Muon` on DTensors: each matrix is orthogonalized once, on one rank.

Torch takes the iterations of Newton and Schulz apart, matrix by matrix, and gathers for each product. Here they run by
`map_matrices`, on matrices that are cast before they are sent.
"""

from functools import partial
from typing import Any

from torch import Tensor

from ...tensor.tensor import DTensor
from ...torch_private.training.muon import adjusted_rate, orthogonalized, step_with, to_scalar
from .matrices import map_matrices


def step_sharded(
    params: list[Tensor],
    grads: list[Tensor],
    muon_momentum_bufs: list[Tensor],
    *,
    lr: Any,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_coefficients: tuple[float, float, float],
    ns_steps: int,
    eps: float,
    adjust_lr_fn: str | None,
    has_complex: bool,
) -> None:
    """The step of Muon as torch computes it for each parameter, for all of them at once."""
    lr = to_scalar(lr)
    updates: list[Tensor] = []
    for grad, buffer in zip(grads, muon_momentum_bufs):
        buffer.lerp_(grad, 1 - momentum)
        update = grad.lerp(buffer, momentum) if nesterov else buffer
        updates.append(update.bfloat16())
    whole = partial(orthogonalized, ns_coefficients=ns_coefficients, ns_steps=ns_steps, eps=eps)
    for param, update in zip(params, map_matrices(whole, updates)):
        param.mul_(1 - lr * weight_decay)
        param.add_(update, alpha=-adjusted_rate(lr, adjust_lr_fn, param.shape))


def _concerns(params: list[Tensor]) -> bool:
    return any(isinstance(p, DTensor) for p in params)


step_with(step_sharded, _concerns)

__all__ = ["step_sharded"]
