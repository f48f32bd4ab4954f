"""Watches torch.compile, with any backend and any caller: the implementation of `with dtensor.compile.dump(folder)`.

    Dynamo       -> its graph, guards, graph breaks, reasons for recompilation, bytecode
    AOTAutograd  -> the joint graph; forward and backward before and after the inner compiler

Graphs are observed as they pass by. The rest comes from the records that torch writes for TORCH_TRACE, and from
Dynamo's bytecode hook. Inside, nothing is taken from or added to the caches of compiled code, and no graph is changed.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

from torch import fx

from dtensor.passes import text
from dtensor.passes.graph.groups import known
from dtensor.passes.graph.source import place
from dtensor.torch_private.compiling import TRACE_LOG, observed_graphs, on_bytecode, without_compile_caches

from ..estimates.meshes import mesh_groups
from .bytecode import decompiled
from .folder import ORDER, is_wanted, write, writing_to
from .frames import UNNAMED, Follower, Frame, current_frame
from .labels import labels
from .logs import log_manifest
from .manifest import write_manifest
from .node_remarks import remark


@contextmanager
def dump(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Write everything that is compiled inside the context to `folder` (see `dtensor.compile.recording.folder`).

    Code that was compiled before stays as it is, in memory and in caches. Backwards that are compiled only when they
    first run are written if they run inside.

    Args:
        folder: path of the folder.

    Returns:
        A context manager that gives the absolute path of the folder.
    """
    root = Path(os.path.abspath(os.fspath(folder)))
    with ExitStack() as stack:
        stack.enter_context(without_compile_caches())
        stack.enter_context(writing_to(root))
        stack.enter_context(observed_graphs(dynamo_graph, _watched))
        stack.enter_context(_listening())
        yield root


@contextmanager
def dumped(gm: fx.GraphModule, folder: str) -> Iterator[None]:
    """Write what is compiled inside the context for one frame, whose graph is `gm`; implements the option `dump`."""
    frame = current_frame()
    frame.roots.append(Path(folder))
    _keep_listening()
    dynamo_graph(gm)
    with observed_graphs(dynamo_graph, _watched):
        yield


def stage_written(frame: Frame, direction: str, *, resumed: bool = False) -> Callable[[int, str, fx.Graph], None]:
    """Return the observer for `passes.run(observe=...)`, which follows the collectives of a graph and writes its
    stages.

    `resumed`: continue after the stages that were written before.
    """
    follow, names = Follower(frame, direction), labels()
    written = len(frame.story(direction).stages) if resumed else 0

    def observe(stage: int, name: str, graph: fx.Graph) -> None:
        if written and stage == 0:
            follow.resume(graph)
            return
        stage += max(written - 1, 0)
        follow(stage, name, graph)
        if is_wanted(frame):
            write(frame, f"{ORDER[direction]}.{stage:02}_{name}.txt", readable(graph, names))

    return observe


def readable(graph: fx.Graph, names: dict[str, str]) -> str:
    """Return the text of a graph, with remarks."""
    return text(graph, names, lambda node: remark(node, names))


def sent_counted(frame: Frame, direction: str, graph: fx.Graph) -> None:
    """Record what a graph communicates as it is going to run."""
    with known(mesh_groups()):
        frame.finish(direction, graph)


def finished(frame: Frame) -> None:
    """Write the manifest."""
    write_manifest(frame)
    log_manifest(frame)


def dynamo_graph(gm: fx.GraphModule) -> None:
    """Write Dynamo's graph, and why the frame was recompiled."""
    frame = current_frame()
    frame.identify(gm.graph)
    if is_wanted(frame):
        write(frame, "01_dynamo.txt", text(gm.graph, labels(), place))
    if is_wanted(frame) and frame.recompiled:
        write(frame, "recompiled.txt", "\n\n".join(frame.recompiled))


def _watched(direction: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function`, which AOTAutograd calls with the graph of that direction, to observe the graph before and
    after."""

    @wraps(function)
    def call(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        frame = current_frame()
        stage_written(frame, direction)(0, "input", gm.graph)
        out = function(gm, *args, **kwargs)
        if direction != "joint":
            if frame.story(direction).timeline is None:
                sent_counted(frame, direction, gm.graph)
                finished(frame)
            write(frame, f"{ORDER[direction]}.inner.txt", readable(gm.graph, labels()))
        return out

    return call


@contextmanager
def _listening() -> Iterator[None]:
    log, handler, hook = logging.getLogger(TRACE_LOG), _Records(), on_bytecode(_bytecode)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        hook.remove()


_forever = ExitStack()


@cache
def _keep_listening() -> None:
    """Listen until the process ends: guards and bytecode of a frame arrive only after its backend has finished."""
    _forever.enter_context(_listening())


def _bytecode(before: Any, after: Any) -> None:
    frame = current_frame()
    if is_wanted(frame):
        write(frame, *decompiled(before, after))


class _Records(logging.Handler):
    """Writes what torch records of a frame: guards, graph breaks, reasons for a recompilation."""

    def emit(self, record: logging.LogRecord) -> None:
        found: dict[str, Any] = getattr(record, "metadata", {})
        payload: str = getattr(record, "payload", None) or ""
        name = found.get("artifact", {}).get("name") or next(iter(found), "")
        if name in READERS:
            READERS[name](current_frame(), payload or found[name])


def _started(frame: Frame, found: Any) -> None:
    frame.name = found["stack"][-1]["name"] if frame.name == UNNAMED else frame.name


def _guards(frame: Frame, payload: str) -> None:
    write(frame, "guards.txt", payload)


def _graph_break(frame: Frame, payload: str) -> None:
    frame.breaks.append(payload.split("\nTraceback (most recent call last)")[0].strip())
    write(frame, "graph_breaks.txt", "\n\n".join(frame.breaks))


def _recompiled(frame: Frame, payload: str) -> None:
    found = json.loads(payload) if payload.startswith("[") else [payload]
    frame.recompiled += map(str, found)


READERS: dict[str, Callable[[Frame, Any], None]] = {
    "dynamo_start": _started,
    "dynamo_cpp_guards_str": _guards,
    "dynamo_graph_break_reason": _graph_break,
    "recompile_reasons": _recompiled,
}
"""Name of a torch record -> the function that handles it."""

__all__ = ["dump", "dynamo_graph", "finished", "sent_counted", "stage_written"]
