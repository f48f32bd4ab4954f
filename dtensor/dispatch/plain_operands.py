"""Invariance: which plain tensors may stand beside DTensors, because every rank holds the same values.

A plain tensor among DTensors is an error as a rule: nothing says whether it is a global tensor or this rank's part. It
is taken as replicated where its origin says so: it has no dimensions, or it was computed from nothing that can differ
between ranks, that is from factories (`ones`, `arange`), Python numbers and others of its kind. Inputs and what comes
out of `to_local` do differ, and so do random numbers, unless the region says that all ranks draw alike.

    compiled   the trace knows where a tensor comes from: the graph node of the tensor is followed to its ancestors
    eager      inside `implicit_replication` a dispatch mode marks such tensors; torch's own decompositions run in one,
               and what its gradient formulas make on the way counts as such

Of what a few functions of torch make in Python (`IN_PYTHON`) their frame tells, in a trace of AOTAutograd, too: it is
alike unless they were given a plain tensor; what they draw, all ranks take from the first.

A mark lies on the storage, so that views share it, and holds the version of the tensor, so that a later write ends it.
Sizes and Python numbers count as alike on all ranks: nothing can tell where they come from. What writes to a marked
tensor outside of regions and counts no version, a collective or numpy, goes unseen.
"""

import contextlib
import inspect
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import MixedTensorError
from ..mesh.provenance import ALIKE, LAYOUT, LOCAL, OPERATOR, note_alike, note_shards, note_shards_at
from ..torch_private.core import (
    FakeTensor,
    FunctionalTensor,
    OpOverload,
    TorchDispatchMode,
    graph_node,
    in_forward_mode,
    is_being_compiled,
    is_below_autograd,
    is_in_formula,
    never_traced,
    schema,
    tree_leaves,
)

MARK = "rank_invariant"
"""Attribute of a storage: the tensor's version when it was recorded; the `_Recorder` where versions are not counted."""

PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
NATIVE = ("aten", "prims")
"""Namespaces of operators that know nothing of ranks."""
SHAPE_ONLY = tuple(
    f"aten::{name}"
    for name in ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
)
"""Factories that read of their tensor argument no more than the shape."""
LIFTS = ("aten::lift_fresh", "aten::lift_fresh_copy")
"""What torch makes a tensor of Python numbers with; nothing else calls it."""


def check_invariant(func: Any, name: str, x: torch.Tensor) -> None:
    """Refuse the plain tensor `x`, argument `name` of `func`, unless it may be taken as replicated.

    Raises:
        MixedTensorError: it may not.
    """
    reason = _objection(x)
    if reason is not None and in_forward_mode():
        raise MixedTensorError(
            f"{func}: forward-mode differentiation (torch.func.jvp, jacfwd, hessian, linearize) stands a plain zero "
            f"for the tangent of argument '{name}', which has none, beside DTensors; write "
            "torch.autograd.functional.jvp or hvp, or torch.func.jacrev of jacrev, which differentiate backwards"
        )
    if reason is not None:
        region = (
            ""
            if _region.entered or is_being_compiled()
            else ", or run this inside `with dtensor.implicit_replication():` if it is made of sizes and numbers only"
        )
        raise MixedTensorError(
            f"{func}: argument '{name}' is a plain tensor of shape {list(x.shape)}{reason}, other arguments are "
            "DTensors; write distribute_tensor(x, device_mesh, placements) for a global tensor, or "
            f"DTensor.from_local(x, device_mesh, placements) for a local one{region}"
        )


def is_alike(x: torch.Tensor) -> bool:
    """Whether the plain tensor `x` may be taken as replicated."""
    return _objection(x) is None


_FOLDER = Path(torch.__file__).parent
IN_PYTHON: dict[Any, bool] = {
    str(_FOLDER / "_lowrank.py"): True,
    str(_FOLDER / "masked" / "_ops.py"): False,
    torch.nn.functional.fractional_max_pool2d_with_indices.__code__: True,
    torch.nn.functional.fractional_max_pool3d_with_indices.__code__: True,
}
"""Functions that torch writes in Python, with plain tensors of their own, by their file or their code -> whether they
draw these."""


def draws_of_torch(x: torch.Tensor) -> bool | None:
    """Whether the plain `x`, an operand now, was drawn by a function of `IN_PYTHON`; None if none of them made it.

    None did where the function was given a plain tensor, which `x` may come from. (An argument named `_random_samples`
    is None, and has what was drawn in its place.)
    """
    frame, entry = sys._getframe(1), None
    while frame is not None and (entry is None or _in_python(frame) is not None):
        entry = frame if _in_python(frame) is not None else None
        frame = frame.f_back
    if entry is None or (is_being_compiled() and graph_node(x) is None):
        return None
    names, more, keywords, known = inspect.getargvalues(entry)
    given = tree_leaves([known.get(name) for name in (*names, more, keywords) if name and name != "_random_samples"])
    if any(type(t) in PLAIN for t in given):
        return None
    return _in_python(entry)


def _in_python(frame: Any) -> bool | None:
    code = frame.f_code
    return IN_PYTHON.get(code.co_filename, IN_PYTHON.get(code))


def _objection(x: torch.Tensor) -> str | None:
    """What speaks against taking `x` as replicated, to be read after its shape; None if nothing does."""
    if x.dim() == 0:
        return None
    if isinstance(x, (FakeTensor, FunctionalTensor)):
        node = graph_node(x)
        if node is not None:
            return _origin(node)
        if is_being_compiled():
            # Dynamo and AOTAutograd look at shapes first, without a graph; the trace that has one comes after.
            return None
    if not is_marked(x):
        return None if is_in_formula() else " that requires a gradient" if is_differentiated(x) else ""
    return " that requires a gradient" if is_differentiated(x) else None


def is_differentiated(x: torch.Tensor) -> bool:
    """Whether what is done with `x` now has a gradient."""
    return x.requires_grad and torch.is_grad_enabled()


def _origin(node: torch.fx.Node) -> str | None:
    """The first ancestor of `node` (itself included) that can differ between ranks, in words; None if there is none."""
    return next((reason for _, reason in differing(node)), None)


def differing(node: torch.fx.Node) -> Iterator[tuple[torch.fx.Node, str]]:
    """The nearest ancestors of `node` (itself included) that can differ between ranks, each with why."""
    waiting, seen = [node], {node}
    while waiting:
        n = waiting.pop()
        if ALIKE in n.meta or not _has_dims(n.meta.get("val")):
            continue
        reason = _differs(n)
        if reason is not None:
            yield n, reason
            continue
        found = n.all_input_nodes if getattr(_schema_of(n), "name", "") not in SHAPE_ONLY else []
        waiting += [m for m in found if m not in seen]
        seen.update(found)


def _schema_of(node: torch.fx.Node) -> Any:
    return schema(node.target) if isinstance(node.target, OpOverload) else None


def _has_dims(value: Any) -> bool:
    """Whether a node's value is more than a number; unknown values are."""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    return not isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _differs(node: torch.fx.Node) -> str | None:
    """Why this node's value can differ between ranks though its arguments do not."""
    if LOCAL in node.meta:
        return " that holds this rank's part of a DTensor"
    if node.op == "placeholder":
        # For an input that the graph writes to, autograd hands over a plain tangent, and a whole one.
        if str(node.target).startswith("tangents"):
            return None
        return " computed from an input of the compiled graph"
    if node.op == "get_attr":
        lifted = node.users and all(getattr(_schema_of(u), "name", "") in LIFTS for u in node.users)
        return None if lifted else " computed from a tensor from outside the graph"
    if isinstance(node.target, OpOverload):
        return _differs_by(node.target)
    return None if getattr(node.target, "__module__", "") == "_operator" else f" computed by {node.target}"


class _Region(threading.local):
    """The innermost region that this thread is in.

    Attributes:
        entered: whether it is in one.
        draws_alike: whether that takes the default generator to be in one state on all ranks.
        recorder: what marks tensors in it.
    """

    entered: bool = False
    draws_alike: bool = False
    recorder: "_Recorder | None" = None


_region = _Region()


def _differs_by(func: OpOverload) -> str | None:
    if torch.Tag.nondeterministic_seeded in func.tags and not _region.draws_alike:
        return f" of random numbers ({func})"
    return None if func.namespace in NATIVE else f" computed by {func}"


def mark_local(out: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """While a graph is traced: note in it that the locals of the DTensors `out` are one rank's parts.

    They may be computed from factories and this rank's coordinate, and `to_local` gives them to users. Where the local
    operator is the one that was called, with the same numbers, that is noted too; and the sizes of all ranks' shards,
    of what was given as well: an input of the graph is seen here first.
    """
    traced = False
    for x in out if isinstance(out, (tuple, list)) else (out,):
        local = getattr(x, "_local_tensor", None)
        if type(local) is torch.Tensor:
            continue
        traced = True
        node = graph_node(local) if isinstance(local, (FakeTensor, FunctionalTensor)) else None
        if node is not None:
            node.meta[LOCAL] = True
            node.meta.setdefault(LAYOUT, x._spec.layout.text)
            note_shards_at(node, x._spec)
            if node.target is func and _numbers(node.args, node.kwargs) == _numbers(args, kwargs):
                node.meta[OPERATOR] = True
    for x in _leaves((args, list(kwargs.values()))) if traced else ():
        if (spec := getattr(x, "_spec", None)) is not None:
            note_shards(x._local_tensor, spec)


def _numbers(args: Any, kwargs: Any) -> list[Any]:
    return [x for x in _leaves((args, list(kwargs.values()))) if isinstance(x, (int, float, complex))]


def _leaves(given: Any) -> Iterator[Any]:
    """What an operator's arguments are, those in lists too."""
    for x in given:
        if isinstance(x, (list, tuple)):
            yield from _leaves(x)
        else:
            yield x


class _Recorder(TorchDispatchMode):
    """Marks the results of factories, and of operators whose tensors are all marked."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.active = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions may be called inside: their graphs are regions by themselves."""
        return True

    @never_traced
    def __enter__(self) -> Any:
        self.active = True
        # Where autograd has been passed already, writes do not count up versions.
        self.counts = not is_below_autograd()
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        self.active = False
        super().__exit__(*args)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or (types and not all(t in PLAIN for t in types)):
            return func(*args, **kwargs)
        given = list(_tensors([args, list(kwargs.values())]))
        info = schema(func)
        alike = _differs_by(func) is None and kwargs.get("generator") is None
        if info.name not in SHAPE_ONLY and info.name not in LIFTS:
            alike = alike and all(t.dim() == 0 or is_marked(t) for t in given)
        # Schemas of collectives do not say what is written.
        written = list(_written(info, args, kwargs)) if func.namespace in NATIVE else given
        kept = [alike and is_marked(t) for t in written]
        out = func(*args, **kwargs)
        for t, keep in zip(written, kept):
            self.mark(t, keep, self.counts)
        # A view shares the mark already; what has memory of its own needs one.
        shared = [] if info.name in LIFTS else [_storage(t) for t in given]
        for t in _tensors(out):
            if all(_storage(t) is not s for s in shared):
                self.mark(t, alike, False)
        return out

    def mark(self, x: torch.Tensor, alike: bool, soon_counted: bool) -> None:
        storage = _storage(x)
        if storage is not None:
            version = self if x.is_inference() else x._version + soon_counted
            setattr(storage, MARK, version if alike else None)


def is_marked(x: torch.Tensor) -> bool:
    """Whether a region knows that all ranks hold the values that `x` has now."""
    mark = getattr(_storage(x), MARK, None)
    if mark is None:
        return False
    return mark.active if isinstance(mark, _Recorder) else not x.is_inference() and mark == x._version


def _storage(x: torch.Tensor) -> Any:
    return x.untyped_storage() if x.layout == torch.strided else None


def _tensors(a: Any) -> Iterator[torch.Tensor]:
    if isinstance(a, torch.Tensor):
        yield a
    elif isinstance(a, (list, tuple)):
        for item in a:
            yield from _tensors(item)


def _written(info: torch.FunctionSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[torch.Tensor]:
    if not info.is_mutable:
        return ()
    names = [a.name for a in info.arguments if a.alias_info is not None and a.alias_info.is_write]
    values = dict(zip([a.name for a in info.arguments], args)) | kwargs
    return _tensors([values.get(name) for name in names])


@contextlib.contextmanager
def implicit_replication(*, random: bool = False) -> Iterator[None]:
    """Region in which plain tensors that are alike on all ranks may be operands beside DTensors.

    Those that factories (`torch.arange`, `ones`, `full`, `eye`, `tensor` of Python numbers, ...) make inside, and what
    is computed from them alone, are taken as replicated, also after the region has ended. Tensors from elsewhere and
    results of `to_local` are not. Every operator is a few microseconds slower inside. In a compiled function it has no
    effect and no cost: there every graph is such a region.

    Args:
        random: take random numbers from the default generator as alike too, in compiled functions that are called
            inside as well. That all ranks were seeded alike is your word; `dtensor.random.check_states` tests it.

    >>> with dtensor.implicit_replication():
    ...     masked = x.masked_fill(torch.ones(8).tril() == 0, float("-inf"))
    """
    if torch.compiler.is_dynamo_compiling():
        yield
        return
    before = _region.entered, _region.draws_alike, _region.recorder
    try:
        with _Recorder() as recorder:
            _region.entered, _region.draws_alike, _region.recorder = True, random, recorder
            yield
    finally:
        _region.entered, _region.draws_alike, _region.recorder = before


def mark_alike(x: torch.Tensor, *, written: bool = False) -> None:
    """Note of the plain tensor `x`, in the region or the trace around, that all ranks hold the same values; `written`:
    by the operator that runs."""
    if isinstance(x, (FakeTensor, FunctionalTensor)):
        note_alike(x)
    elif (recorder := _region.recorder) is not None:
        recorder.mark(x, True, written and recorder.counts)


def region_of_torch() -> contextlib.AbstractContextManager[Any]:
    """The region that torch's own decompositions run in, on DTensors; a trace needs none."""
    return contextlib.nullcontext() if is_being_compiled() else _Recorder()


__all__ = [
    "check_invariant",
    "differing",
    "draws_of_torch",
    "implicit_replication",
    "is_alike",
    "is_differentiated",
    "is_marked",
    "mark_alike",
    "mark_local",
    "region_of_torch",
]
