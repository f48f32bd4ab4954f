"""Plain tensors in a global view: there every tensor is a global value, so one beside DTensors is the whole of it.

`distribute_model` runs a model's forward in `global_view`. A plain tensor that meets a DTensor there, or is written to
from one, counts as the same on all ranks. Where nothing says that it is (`plain_operands`), its values are compared, in
eager mode when it is met and in compiled code when the graph runs (`replication_check`).

A trace knows where it is by the annotation of the operators that Dynamo recorded inside.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..comm.replication_check import BY_VIEW, compare, is_due, note_taken
from ..mesh.mesh import facts
from ..mesh.provenance import ALIKE, LAYOUT, LOCAL
from ..torch_private.core import FakeTensor, FunctionalTensor, fx_traceback, graph_node, is_being_compiled
from .plain_operands import (
    check_invariant,
    differing,
    implicit_replication,
    is_alike,
    is_differentiated,
    is_marked,
    mark_alike,
)

ANNOTATION = "dtensor_global_view"
"""Key of the annotation of operators in a global view: whether the ranks' values are compared."""

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
"""Folders of files that are not the user's."""


class _View(threading.local):
    """The global view that this thread is in.

    Attributes:
        checked: whether the ranks' values are compared; None outside of any.
        due: whether all are that nothing is known of.
        uses: how often a place in the program has met one.
    """

    checked: bool | None = None
    due: bool = False

    def __init__(self) -> None:
        self.uses: dict[tuple[str, str], int] = {}


_view = _View()


@contextlib.contextmanager
def global_view(checked: bool, run: int = 0) -> Iterator[None]:
    """Region in which plain tensors are global values.

    Args:
        checked: compare that they are alike on all ranks.
        run: how often the region was entered before.
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


def _checked(x: torch.Tensor) -> bool | None:
    """Whether the values of `x` are compared, in the global view that an operator on it is in; None outside of any."""
    if isinstance(x, (FakeTensor, FunctionalTensor)):
        found = (fx_traceback.current_meta.get("custom") or {}).get(ANNOTATION)
        return found if found is not None else _view.checked
    return _view.checked


def check_global(func: Any, name: str, x: torch.Tensor, mesh: Any) -> None:
    """Refuse the plain tensor `x`, argument `name` of `func` beside DTensors on `mesh`, unless it counts as replicated.

    Raises:
        MixedTensorError: it does not.
        AgreementError: it would, in a global view, but ranks have other values.
    """
    if not is_alike(x) and not _taken(func, name, x, mesh):
        check_invariant(func, name, x)


def may_be_written(x: torch.Tensor) -> bool:
    """Whether DTensors may be written to the plain tensor `x`: in a global view."""
    if is_being_compiled() and graph_node(x) is None:
        return True  # Dynamo looks at shapes; the trace that knows comes after
    return _checked(x) is not None


def _taken(func: Any, name: str, x: torch.Tensor, mesh: Any) -> bool:
    """Take `x` for a global value, if that is what it is."""
    checked = _checked(x)
    if checked is None:
        return False
    groups = facts(mesh).by_axis
    if isinstance(x, (FakeTensor, FunctionalTensor)):
        return _taken_in_trace(x, groups if checked else [])
    if is_differentiated(x) and x.is_leaf:
        return False  # its gradient would be a DTensor; that of what has a history is one all the way
    if checked and not is_marked(x):
        where = _line()
        uses = _view.uses[name, where] = _view.uses.get((name, where), -1) + 1
        due = _view.due or is_due(uses)
        for group in groups:
            compare(BY_VIEW.format(f"argument '{name}' of {func} ({where})"), x.detach(), group, due)
        if not due:
            return True  # to be looked at later, if it lasts
    mark_alike(x)
    return True


def _taken_in_trace(x: torch.Tensor, groups: list[str]) -> bool:
    node = graph_node(x)
    if node is None:
        return False
    found = [n for n, _ in differing(node) if not _is_whole(n)]
    if any(n.op != "placeholder" or LOCAL in n.meta for n in found):
        return False
    if groups:
        note_taken(x, groups, BY_VIEW)
    for n in (node, *found):  # a backward has no annotation, and meets the node again
        n.meta[ALIKE] = True
    return True


def _is_whole(node: torch.fx.Node) -> bool:
    """Whether a node is the local tensor of a DTensor of which every rank has all."""
    return set(node.meta.get(LAYOUT, "")) == {"R"}


def _line() -> str:
    """The user's line that runs."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "?"


__all__ = ["check_global", "global_view", "may_be_written"]
