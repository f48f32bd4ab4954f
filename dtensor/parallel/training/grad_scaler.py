"""The gradient operator of `torch.amp.GradScaler`: unscales, and checks for infinities consistently on all ranks.

The operator takes all gradients at once and writes the result of the check to a plain tensor. Each rank sees only its
own shards, so the result is reduced; otherwise some ranks would skip a step that others take.
"""

from typing import Any

import torch

from ...layout.placements import Partial
from ...tensor.tensor import DTensor
from ...torch_private.core import intercept, without_own_key


def check_and_unscale(grads: list[Any], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """`_amp_foreach_non_finite_check_and_unscale_` on DTensors on any meshes and plain gradients."""
    operator = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    meshes: list[Any] = []
    for g in grads:
        if isinstance(g, DTensor) and g.device_mesh not in meshes:
            meshes.append(g.device_mesh)
    # The local parts of a partial sum may be finite where the sum is not.
    sums = [g.full_tensor() for g in grads if isinstance(g, DTensor) and g._spec.layout.partial]
    with without_own_key():
        if sums:
            operator(sums, found_inf, inv_scale)
        operator([g.to_local() if isinstance(g, DTensor) else g for g in grads], found_inf, inv_scale)
    for mesh in meshes:
        mine = DTensor.from_local(found_inf, mesh, [Partial("max")] * mesh.ndim)
        found_inf.copy_(mine.full_tensor())


intercept("_amp_foreach_non_finite_check_and_unscale_", check_and_unscale)

__all__ = ["check_and_unscale"]
