"""Losses on sharded classes: `loss_parallel` and `linear_cross_entropy`.

Cross entropy of logits sharded on their classes is native (`rules/log_softmax.py`, `rules/nll.py`): it gathers nothing,
anywhere. So the region that torch's users write around it has nothing to switch on.
"""

import contextlib

from ..linear_loss import linear_cross_entropy


def loss_parallel() -> contextlib.AbstractContextManager[None]:
    """As torch's region of this name, in which cross entropy runs on logits sharded on their classes.

    Here it runs so everywhere, in forward and backward, inside the region and outside: with any placements of samples,
    any reduction, class weights, label smoothing and classes as probabilities. The region changes nothing.

    >>> with dtensor.parallel.loss_parallel():
    ...     torch.nn.functional.cross_entropy(logits, target).backward()  # logits [Shard(1)], target [Replicate()]
    """
    return contextlib.nullcontext()


__all__ = ["linear_cross_entropy", "loss_parallel"]
