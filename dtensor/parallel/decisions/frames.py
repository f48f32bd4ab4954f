"""Decides the layouts of a compiled frame before it is traced."""

import logging
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from ...dispatch.whole_graph import Following, followed, is_deciding
from ...errors import ShardingError
from ...program.source_lines import users_level
from ...program.stages import Stage
from ...tensor.tensor import DTensor
from ...torch_private.before_tracing import Traced
from ...torch_private.core import UnknownValue
from .deciding import Decisions, decide
from .recording import record

log = logging.getLogger("dtensor")


def decide_frame(
    run_forward: Callable[..., Any], inputs: Sequence[Any], parameters: Collection[int]
) -> Traced | None:
    """Decide the layouts of a frame.

    Args:
        run_forward: the frame as a function of flat arguments.
        inputs: its arguments, on fake tensors.
        parameters: indices of those that are parameters or buffers.

    Returns:
        The context in which it is traced, and what restarts it; None if it is traced as it is.
    """
    if not is_deciding() or not any(isinstance(x, DTensor) for x in inputs):
        return None
    decisions = decided(run_forward, inputs, parameters)
    if decisions is None:
        return None
    following = Following(decisions.layouts, decisions.mesh)
    return partial(followed, following), following.restart


def decided(
    run_forward: Callable[..., Any], inputs: Sequence[Any], parameters: Collection[int]
) -> Decisions | None:
    """Record a frame and decide its layouts; None if that cannot be done, or there is nothing to decide."""
    with Stage("deciding layouts", inside=True):
        try:
            recording = record(run_forward, inputs, parameters)
        except (ShardingError, *UnknownValue) as error:  # what is wrong will be said when it is traced
            log.info("layouts are chosen operator by operator: %s", error)
            return None
        except Exception as error:
            warnings.warn(
                f"layouts are chosen operator by operator, as the program could not be recorded: {error!r}; please report",
                stacklevel=users_level(),
            )
            return None
        if not recording.viewed or not recording.tape.ops:
            return None
        return decide(recording)


__all__ = ["decide_frame", "decided"]
