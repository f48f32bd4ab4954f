"""Accepts plain tensors beside DTensors in a global view, where every plain tensor is a full, global value.

`distribute_model` runs a model's forward in `global_view`. A plain tensor that meets a DTensor there, or that a DTensor
is written to, counts as replicated. Where `plain_operands` does not already know that it is, the ranks compare its
values (`dtensor.comm.replication_check`): in eager mode when it is met, in compiled code when the graph runs.

A trace recognises a global view by the annotation on the operators that Dynamo recorded inside it.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..comm.replication_check import BY_VIEW, compare, is_due, note_drawn, note_taken
from ..mesh.mesh import facts
from ..mesh.provenance import ALIKE, LOCAL
from ..torch_private.core import FakeTensor, FunctionalTensor, fx_traceback, graph_node, is_being_compiled
from .plain_operands import (
    check_invariant,
    differing,
    draws,
    implicit_replication,
    is_alike,
    is_differentiated,
    is_marked,
    is_whole,
    mark_alike,
)

ANNOTATION = "dtensor_global_view"
"""Key of the annotation on operators in a global view; its value is whether the ranks compare values."""

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
"""Folders whose files are not user code."""


class _View(threading.local):
    """The global view that this thread is in.

    Attributes:
        checked: whether the ranks compare values; None outside of any global view.
        due: whether this run compares every tensor that is not known to be replicated.
        uses: (argument, line) -> how often a plain tensor was met there, counted from 0.
    """

    checked: bool | None = None
    due: bool = False

    def __init__(self) -> None:
        self.uses: dict[tuple[str, str], int] = {}


_view = _View()


@contextlib.contextmanager
def global_view(checked: bool, run: int = 0) -> Iterator[None]:
    """Context in which plain tensors are global values.

    Args:
        checked: whether the ranks compare the values of plain tensors.
        run: how often the context was entered before; it decides whether this run is one that compares.
    """
    if torch.compiler.is_dynamo_compiling():
        with fx_traceback.annotate({ANNOTATION: checked}):
            yield
        return
    before = _view.checked, _view.due
    _view.checked, _view.due = checked, is_due(run)
    try:
        with implicit_replication():
            yield
    finally:
        _view.checked, _view.due = before


def in_view(graph: torch.fx.Graph) -> bool:
    """Whether a graph of Dynamo, which is compiled now, runs in a global view, or part of it does."""
    return _view.checked is not None or any(ANNOTATION in (n.meta.get("custom") or {}) for n in graph.nodes)


def _checked(x: torch.Tensor) -> bool | None:
    """Whether the global view around an operator on `x` compares values; None outside of any."""
    if isinstance(x, (FakeTensor, FunctionalTensor)):
        found = (fx_traceback.current_meta.get("custom") or {}).get(ANNOTATION)
        return found if found is not None else _view.checked
    return _view.checked


def check_global(func: Any, name: str, x: torch.Tensor, mesh: DeviceMesh, *, always: bool = False) -> None:
    """Refuse the plain tensor `x`, argument `name` of `func` beside DTensors on `mesh`, unless it counts as replicated.

    With `always`, the operator takes plain tensors as global values wherever it is called, and the ranks compare them.

    Raises:
        MixedTensorError: it does not count as replicated.
        AgreementError: it counts as replicated in a global view, but ranks hold different values.
    """
    if not is_alike(x) and not _taken(func, name, x, mesh, True if always and _checked(x) is None else _checked(x)):
        check_invariant(func, name, x)


def may_be_written(x: torch.Tensor) -> bool:
    """Whether DTensors may be written to the plain tensor `x`, which they may in a global view."""
    if is_being_compiled() and graph_node(x) is None:
        return True  # Dynamo only computes shapes here; the trace that decides comes later
    return _checked(x) is not None


def _taken(func: Any, name: str, x: torch.Tensor, mesh: DeviceMesh, checked: bool | None) -> bool:
    """Accept `x` as a global value and mark it so, if it may be one; return whether it was accepted.

    `checked` states whether the ranks compare its values; None where it is no global value.
    """
    if checked is None:
        return False
    groups = facts(mesh).by_axis
    if isinstance(x, (FakeTensor, FunctionalTensor)):
        return _taken_in_trace(x, groups if checked else [])
    if is_differentiated(x) and x.is_leaf:
        return False  # a leaf would get a DTensor as its gradient; a non-leaf hands one on through its history
    if checked and not is_marked(x):
        where = _line()
        uses = _view.uses[name, where] = _view.uses.get((name, where), -1) + 1
        due = _view.due or is_due(uses)
        for group in groups:
            compare(BY_VIEW.format(f"argument '{name}' of {func} ({where})"), x.detach(), group, due)
        if not due:
            return True  # left unmarked, so that a later use may compare it
    mark_alike(x)
    return True


def _taken_in_trace(x: torch.Tensor, groups: list[str]) -> bool:
    node = graph_node(x)
    if node is None:
        return False
    found, drawn = _sources(node)
    if any(n.op != "placeholder" or LOCAL in n.meta for n in found):
        return False
    if groups:
        note_taken(x, groups, BY_VIEW)
        if drawn:
            note_drawn(groups)
    for n in (node, *found, *drawn):  # the backward meets the nodes again, without an annotation
        n.meta[ALIKE] = True
    return True


def _sources(node: torch.fx.Node) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """The ancestors of `node` that can differ between ranks; and those that draw random numbers, which are the same on
    all ranks if the generators and what else they are computed from are."""
    found: list[torch.fx.Node] = []
    drawn: list[torch.fx.Node] = []
    waiting = [node]
    while waiting:
        for n, _ in differing(waiting.pop()):
            if draws(n):
                drawn.append(n)
                waiting += n.all_input_nodes
            elif not is_whole(n):
                found.append(n)
    return found, drawn


def _line() -> str:
    """File name and number of the user's line that is running."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "?"


__all__ = ["check_global", "global_view", "in_view", "may_be_written"]
