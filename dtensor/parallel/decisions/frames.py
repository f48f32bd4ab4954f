"""Decides the layouts of a compiled frame before it is traced."""

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ...dispatch.whole_graph import Following, Told, followed, is_deciding, now
from ...errors import ShardingError
from ...program.source_lines import users_level
from ...program.stages import Stage
from ...tensor.tensor import DTensor
from ...torch_private.core import UnknownValue
from ...torch_private.graph_cache import Traced
from .deciding import Decisions, decide
from .recording import record

log = logging.getLogger("dtensor")


def decide_frame(run_forward: Callable[..., Any], inputs: Sequence[Any], parameters: Collection[int]) -> Traced | None:
    """Decide the layouts of a frame.

    Args:
        run_forward: the frame as a function of flat arguments.
        inputs: its arguments, on fake tensors.
        parameters: indices of those that are parameters or buffers.

    Returns:
        The context in which it is traced, and what restarts it; None if it is traced as it is.
    """
    now.told = None
    if not is_deciding() or not any(isinstance(x, DTensor) for x in inputs):
        return None
    decisions = decided(run_forward, inputs, parameters)
    if not isinstance(decisions, Decisions):
        now.told = Told(why=decisions) if decisions else None
        return None
    now.told = Told(len(decisions.layouts), decisions.seconds, decisions.bound)
    following = Following(decisions.layouts, decisions.mesh)
    return partial(_traced, following), following.restart


@contextmanager
def _traced(following: Following) -> Iterator[None]:
    """Context of a trace, after which `now.told` says how many operators were not recorded."""
    with followed(following):
        yield
    if now.told is not None:
        now.told = replace(now.told, missed=len(following.missed))


def decided(run_forward: Callable[..., Any], inputs: Sequence[Any], parameters: Collection[int]) -> Decisions | str:
    """Record a frame and decide its layouts; or why that cannot be done, "" where there is nothing to decide."""
    with Stage("deciding layouts", inside=True):
        try:
            recording = record(run_forward, inputs, parameters)
        except (ShardingError, *UnknownValue) as error:  # what is wrong will be said when it is traced
            log.info("layouts are chosen operator by operator: %s", error)
            return str(error)
        except Exception as error:
            warnings.warn(
                f"layouts are chosen operator by operator, as the program was not recorded: {error!r}; please report",
                stacklevel=users_level(),
            )
            return repr(error)
        if not recording.tape.ops:
            return ""
        return decide(recording) or "the solver found no layouts"


__all__ = ["decide_frame", "decided"]
