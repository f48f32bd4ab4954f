"""Stands before AOTAutograd when it traces a Dynamo graph that no cache holds."""

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .on_demand import when_imported

Traced = tuple[Callable[[], AbstractContextManager[Any]], Callable[[], None]]
"""Makes the context of a trace of a graph; and what is called when the graph's function begins to run there."""


Prepare = Callable[[Callable[..., Any], Sequence[Any], Sequence[int]], Traced | None]


def before_tracing(prepare: Prepare) -> None:
    """Call `prepare` before AOTAutograd traces a graph, and trace it in the context that it returns.

    Args:
        prepare: takes the graph as a function of flat arguments, these on fake tensors, and the indices of those that
            are parameters or buffers.
    """
    when_imported("torch._functorch.aot_autograd", functools.partial(_install, prepare))


def _install(prepare: Prepare) -> None:
    from torch._functorch import aot_autograd

    collect, capture = aot_autograd.run_functionalized_fw_and_collect_metadata, aot_autograd.aot_stage1_graph_capture
    last = threading.local()  # what the thread prepared last, and the metadata that AOTAutograd has of it

    @functools.wraps(collect)
    def collected(flat_fn: Any, **kwargs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            static = kwargs.get("static_input_indices") or ()
            traced = None if kwargs.get("pre_dispatch") else prepare(flat_fn, args, static)
            with nullcontext() if traced is None else traced[0]():
                found = collect(_from_its_beginning(flat_fn, traced), **kwargs)(*args)
            last.prepared = found, traced
            return found

        return run

    @functools.wraps(capture)
    def captured(aot_state: Any, flat_fn: Any) -> Any:
        found, traced = getattr(last, "prepared", (None, None))
        traced = traced if found is aot_state.fw_metadata else None
        with nullcontext() if traced is None else traced[0]():
            return capture(aot_state, _from_its_beginning(flat_fn, traced))

    aot_autograd.run_functionalized_fw_and_collect_metadata = collected
    aot_autograd.aot_stage1_graph_capture = captured


def _from_its_beginning(flat_fn: Any, traced: Traced | None) -> Any:
    if traced is None:
        return flat_fn

    @functools.wraps(flat_fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        traced[1]()
        return flat_fn(*args, **kwargs)

    return run


__all__ = ["Traced", "before_tracing"]
