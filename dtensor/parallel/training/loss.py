"""Losses on sharded classes: `loss_parallel` and `linear_cross_entropy`.

Cross entropy of logits sharded on classes is supported natively and gathers nothing (`dtensor.rules.families.nll` and
`log_softmax`). So the `loss_parallel` region, which users know from torch, only makes plain targets count as
replicated.
"""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from ...layout.placements import Replicate
from ...tensor.tensor import DTensor
from .linear_cross_entropy import linear_cross_entropy

LOSSES = (F.cross_entropy, F.nll_loss)


class _WholeTargets(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in LOSSES:
            logits = args[0] if args else given["input"]
            if isinstance(logits, DTensor):
                args = tuple([_whole(a, logits.device_mesh) for a in args])
                given = {name: _whole(a, logits.device_mesh) for name, a in given.items()}
        return func(*args, **given)


def _whole(a: Any, mesh: DeviceMesh) -> Any:
    if not isinstance(a, torch.Tensor) or isinstance(a, DTensor):
        return a
    return DTensor.from_local(a, mesh, [Replicate()] * mesh.ndim)


def loss_parallel() -> contextlib.AbstractContextManager[Any]:
    """A context in which plain targets and class weights of a cross entropy on DTensor logits count as replicated.

    It replaces torch's region of the same name. Cross entropy on logits sharded on classes works everywhere, inside and
    outside the region, forward and backward: with any placements of samples, any reduction, class weights, label
    smoothing and class probabilities. Inside the region, plain targets and class weights, which must be the same on all
    ranks, may be passed with DTensor logits. Outside they raise MixedTensorError. So does a `torch.nn.CrossEntropyLoss`
    that is created inside a compiled function, because Dynamo bypasses the region: create it outside, or call
    `torch.nn.functional.cross_entropy`.

    >>> with dtensor.parallel.loss_parallel():
    ...     torch.nn.functional.cross_entropy(logits, target).backward()  # logits [Shard(1)], target [Replicate()]
    """
    return _WholeTargets()


__all__ = ["linear_cross_entropy", "loss_parallel"]
