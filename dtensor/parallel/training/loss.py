"""Losses on sharded classes: `loss_parallel` and `linear_cross_entropy`.

Cross entropy of logits sharded on their classes is native (`rules/log_softmax.py`, `rules/nll.py`): it gathers nothing,
anywhere. So the region that torch's users write around it has one thing to do: to take plain targets as whole.
"""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
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


def _whole(a: Any, mesh: Any) -> Any:
    if not isinstance(a, torch.Tensor) or isinstance(a, DTensor):
        return a
    return DTensor.from_local(a, mesh, [Replicate()] * mesh.ndim)


def loss_parallel() -> contextlib.AbstractContextManager[Any]:
    """As torch's region of this name, in which cross entropy runs on logits sharded on their classes.

    Here it runs so everywhere, in forward and backward, inside the region and outside: with any placements of samples,
    any reduction, class weights, label smoothing and classes as probabilities. What the region adds is that a plain
    target, or plain weights of the classes, beside logits that are a DTensor are taken as whole: all ranks have the
    same. Outside of it that is a MixedTensorError; so it is with a `torch.nn.CrossEntropyLoss` that is made inside of a
    compiled function, of which Dynamo writes the call itself: make it outside, or call the function.

    >>> with dtensor.parallel.loss_parallel():
    ...     torch.nn.functional.cross_entropy(logits, target).backward()  # logits [Shard(1)], target [Replicate()]
    """
    return _WholeTargets()


__all__ = ["linear_cross_entropy", "loss_parallel"]
