"""Decides the layouts of a compiled frame before it is traced."""

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ...dispatch.whole_graph import Following, Told, decisions_given, followed, is_deciding, now
from ...errors import ShardingError
from ...layout.layout import Layout
from ...program.source_lines import users_level
from ...program.stages import Stage
from ...tensor.tensor import DTensor
from ...torch_private.core import UnknownValue, tree_leaves, tree_map
from ...torch_private.graph_cache import Traced
from .deciding import Decisions, decide
from .files import Refused
from .recording import record

log = logging.getLogger("dtensor")


def decide_frame(run_forward: Callable[..., Any], inputs: Sequence[Any], parameters: Collection[int]) -> Traced | None:
    """Decide the layouts of a frame.

    Args:
        run_forward: the frame as a function of flat arguments.
        inputs: its arguments, on fake tensors.
        parameters: indices of those that are parameters or buffers.

    Returns:
        How it is traced; None if it is traced as it is.
    """
    now.told = None
    if not is_deciding() or not any(isinstance(x, DTensor) for x in inputs):
        return None
    decisions = decided(run_forward, inputs, parameters)
    if not isinstance(decisions, Decisions):
        now.told = Told(why=decisions) if decisions else None
        return None
    now.told = Told(len(decisions.layouts), decisions.seconds, decisions.bound, text=decisions.text)
    return Trace(Following(decisions.layouts, decisions.mesh))


class Trace:
    """The traces of a frame that follow its decisions."""

    def __init__(self, following: Following) -> None:
        self.following = following
        self.layouts: list[Layout | None] | None = None
        self.said = False

    @contextmanager
    def context(self) -> Iterator[None]:
        """As `Traced`. After a trace `now.told` says how many operators were not recorded; a warning says so once."""
        with followed(self.following):
            yield
        missed = self.following.missed
        if now.told is not None:
            now.told = replace(now.told, missed=len(missed))
        if missed and not self.said:
            self.said = True
            warnings.warn(
                f"{len(missed)} operators of a compiled graph are not those that were recorded, from {missed[0]} on: "
                "they choose their own layouts, and more may be sent",
                stacklevel=users_level(),
            )

    def run(self, run_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As `Traced`. What the last trace returns is laid out as the first one said, which is what callers are given:
        operators that only one of them has may have led the other to other layouts."""
        self.following.restart()
        out = run_forward(*args, **kwargs)
        layouts = [x._spec.layout if isinstance(x, DTensor) else None for x in tree_leaves(out)]
        if self.layouts is None or layouts == self.layouts:
            self.layouts = layouts
            return out
        said = iter(self.layouts)
        return tree_map(partial(_laid_out, said), out)


def _laid_out(said: Iterator[Layout | None], x: Any) -> Any:
    layout = next(said)
    return x if layout is None or layout == x._spec.layout else x.redistribute(placements=layout.placements)


def decided(
    run_forward: Callable[..., Any],
    inputs: Sequence[Any],
    parameters: Collection[int],
    inside: Mapping[str, DTensor] | None = None,
    model: nn.Module | None = None,
) -> Decisions | str:
    """Record a program, as `record`, and decide its layouts; or why that cannot be done, "" where there is nothing to
    decide. A reason that nobody foresaw is also a warning.

    Raises:
        Refused: decisions were given that cannot be.
    """
    with Stage("deciding layouts", inside=True):
        try:
            recording = record(run_forward, inputs, parameters, inside, model)
            if not recording.tape.ops:
                return ""
            return decide(recording, decisions_given()) or "the solver found no layouts"
        except Refused:
            raise
        except (ShardingError, *UnknownValue) as error:  # what is wrong will be said when it is traced
            log.info("layouts are chosen operator by operator: %s", error)
            return str(error)
        except Exception as error:
            warnings.warn(
                f"layouts are chosen operator by operator, as they could not be decided: {error!r}; please report",
                stacklevel=users_level(),
            )
            return repr(error)


__all__ = ["Trace", "decide_frame", "decided"]
