"""Decides the layouts of a compiled frame before it is traced."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...dispatch.whole_graph import Following, followed, is_deciding
from ...errors import ShardingError
from ...program.stages import Stage
from ...tensor.tensor import DTensor
from ...torch_private.before_tracing import Traced
from ...torch_private.core import UnknownValue
from .deciding import Decisions, decide
from .recording import record

log = logging.getLogger("dtensor")


def decide_frame(run_forward: Callable[..., Any], inputs: Sequence[Any]) -> Traced | None:
    """Decide the layouts of a frame.

    Args:
        run_forward: the frame as a function of flat arguments.
        inputs: its arguments, on fake tensors.

    Returns:
        The context in which it is traced, and what restarts it; None if it is traced as it is.
    """
    if not is_deciding() or not any(isinstance(x, DTensor) for x in inputs):
        return None
    decisions = decided(run_forward, inputs)
    if decisions is None:
        return None
    following = Following(decisions.layouts)
    return partial(followed, following), following.restart


def decided(run_forward: Callable[..., Any], inputs: Sequence[Any]) -> Decisions | None:
    """Record a frame and decide its layouts; None if that cannot be done, or there is nothing to decide."""
    with Stage("deciding layouts", inside=True):
        try:
            recording = record(run_forward, inputs)
        except (ShardingError, *UnknownValue) as error:  # what is wrong will be said when it is traced
            log.info("layouts are chosen operator by operator: %s", error)
            return None
        if not recording.viewed or recording.several or not recording.tape.ops:
            return None
        return decide(recording)


__all__ = ["decide_frame", "decided"]
