"""Decides which plain tensors may stand beside DTensors, because every rank holds the same values.

A plain tensor among DTensors is normally an error: it could be a global tensor or this rank's shard. It is taken as
replicated if its origin shows that it is the same on all ranks: it has no dims, or it was computed only from values
that cannot differ between ranks, which are factories (`ones`, `arange`), Python numbers and other such tensors. Graph
inputs and results of `to_local` may differ, and so may random numbers unless the region states that all ranks draw the
same ones.

    compiled   the trace records where a tensor comes from: its graph node is followed to its ancestors
    eager      inside `implicit_replication` a dispatch mode marks such tensors; torch's own decompositions run in such
               a mode, and tensors that its gradient formulas create count as marked

Tensors that a few Python functions of torch create (`IN_PYTHON`) are recognised by the function's stack frame, in
AOTAutograd's trace too. They are the same on all ranks unless the function was given a plain tensor; random numbers
that such a function draws are taken from the first rank.

A mark is kept on the storage, so views share it, and holds the tensor's version, so a later write invalidates it. Sizes
and Python numbers always count as the same on all ranks, since their origin cannot be traced. A write to a marked
tensor goes unnoticed if it happens outside of regions and does not bump the version (a collective, or numpy).
"""

import contextlib
import inspect
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..comm.from_plain import TORCH, is_torch_dtensor
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
from .whole_graph import now

MARK = "rank_invariant"
"""Attribute of a storage: the version of the tensor when it was marked, or the `_Recorder` for inference tensors."""

PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
NATIVE = ("aten", "prims")
"""Namespaces of operators whose results do not depend on the rank."""
SHAPE_ONLY = tuple(
    f"aten::{name}"
    for name in ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
)
"""Factories that read no values of their tensor argument."""
LIFTS = ("aten::lift_fresh", "aten::lift_fresh_copy")
"""Operators that torch uses only to make a tensor from Python numbers."""


def check_invariant(func: Any, name: str, x: torch.Tensor) -> None:
    """Refuse the plain tensor `x`, argument `name` of `func`, unless it may be taken as replicated.

    Raises:
        MixedTensorError: `x` may differ between ranks.
    """
    if type(x) is not torch.Tensor and is_torch_dtensor(x):
        raise MixedTensorError(
            f"{func}: argument '{name}' is a DTensor of {TORCH}, other arguments are those of dtensor; write "
            "dtensor.interop.from_torch(x), or make it with dtensor: `from dtensor import distribute_tensor, DTensor`"
        )
    reason = _objection(x)
    if reason is not None and in_forward_mode():
        raise MixedTensorError(
            f"{func}: argument '{name}' has no tangent, and forward-mode differentiation (torch.func.jvp, jacfwd, "
            "hessian, linearize) puts a plain zero in its place, beside DTensors; write "
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
            f"DTensor.from_local(x, device_mesh, placements) for a local one{region}{_advice(x)}"
        )


advice: list[str] = []
"""What the error adds, by whoever makes DTensors that users meet outside of the code that is made for them."""

CLIPPING = Path(torch.nn.utils.clip_grad.__file__)
OPTIMIZERS = Path(torch.optim.__file__).parent


def _advice(x: torch.Tensor) -> str:
    if isinstance(x, torch.nn.Parameter):
        return (
            "; it is a parameter: give its module an entry in the plan of parallelize_module, or shard the whole model "
            "with distribute_model"
        )
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == str(CLIPPING):
            return "; to clip plain and sharded parameters together, write dtensor.parallel.clip_grad_norm_"
        if frame.f_code.co_filename.startswith(f"{OPTIMIZERS}/"):
            return (
                "; an optimizer needs gradients and states placed as the parameters are: load its state by "
                "dtensor.Checkpoints or torch's set_optimizer_state_dict, and give p.grad a DTensor"
            )
        frame = frame.f_back
    return "".join([f"; {text}" for text in advice])


def is_alike(x: torch.Tensor) -> bool:
    """Whether the plain tensor `x` may be taken as replicated."""
    return _objection(x) is None


_FOLDER = Path(torch.__file__).parent
IN_PYTHON: dict[Any, bool] = {
    str(_FOLDER / "_lowrank.py"): True,
    str(_FOLDER / "masked" / "_ops.py"): False,
    str(_FOLDER / "nn" / "attention" / "bias.py"): False,
    torch.nn.functional.fractional_max_pool2d_with_indices.__code__: True,
    torch.nn.functional.fractional_max_pool3d_with_indices.__code__: True,
}
"""File or code object of torch functions written in Python that create plain tensors -> whether these are random."""


def draws_of_torch(x: torch.Tensor) -> bool | None:
    """Whether the plain operand `x` was drawn by a function in `IN_PYTHON`; None if it does not count as made by one.

    It does not where the function was given a plain tensor, since `x` may come from that. The argument
    `_random_samples` is ignored: it was given as None, and the function has put the drawn tensor in its place.
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
    """Why `x` cannot be taken as replicated, as text that follows its shape in a message; None if it can."""
    if x.dim() == 0:
        return None
    if isinstance(x, (FakeTensor, FunctionalTensor)):
        node = graph_node(x)
        if node is not None:
            return _origin(node)
        if is_being_compiled() or now.recorder is not None:
            # Dynamo and AOTAutograd first compute shapes without a graph; the trace that has one comes later.
            return None
    if not is_marked(x):
        return None if is_in_formula() else " that requires a gradient" if is_differentiated(x) else ""
    return " that requires a gradient" if is_differentiated(x) else None


def is_differentiated(x: torch.Tensor) -> bool:
    """Whether autograd records what is done with `x` now."""
    return x.requires_grad and torch.is_grad_enabled()


def _origin(node: torch.fx.Node) -> str | None:
    """Why `node` can differ between ranks, from the first such ancestor (or itself); None if there is none.

    A formula of torch's meets what the forward made again, which may have taken whole DTensors as global values.
    """
    formula = is_in_formula()
    return next((reason for n, reason in differing(node) if not (formula and is_whole(n))), None)


def is_whole(node: torch.fx.Node) -> bool:
    """Whether a node is the local tensor of a replicated DTensor."""
    return set(node.meta.get(LAYOUT, "")) == {"R"}


def differing(node: torch.fx.Node) -> Iterator[tuple[torch.fx.Node, str]]:
    """Yield the nearest ancestors of `node` (itself included) that can differ between ranks, each with the reason."""
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
    """Whether a node's value may have dims; only a number or a tensor without dims has none for certain."""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    return not isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _differs(node: torch.fx.Node) -> str | None:
    """Why this node's value can differ between ranks even if its arguments do not; None if it cannot."""
    if LOCAL in node.meta:
        return " that holds this rank's part of a DTensor"
    if node.op == "placeholder":
        # For an input that the graph writes to, autograd passes a plain, unsharded tangent.
        if str(node.target).startswith("tangents"):
            return None
        return " computed from an input of the compiled graph"
    if node.op == "get_attr":
        lifted = node.users and all(getattr(_schema_of(u), "name", "") in LIFTS for u in node.users)
        return None if lifted else " computed from a tensor from outside the graph"
    if isinstance(node.target, OpOverload):
        return _differs_by(node.target)
    return None if getattr(node.target, "__module__", "") == "_operator" else f" computed by {node.target}"


def draws(node: torch.fx.Node) -> bool:
    """Whether this node draws random numbers."""
    return LOCAL not in node.meta and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


class _Region(threading.local):
    """The innermost `implicit_replication` region that this thread is in.

    Attributes:
        entered: whether the thread is in a region.
        draws_alike: whether the region assumes that the default generator has the same state on all ranks.
        recorder: the mode that marks tensors in the region.
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
    """While tracing, annotate the graph nodes of the local tensors of the DTensors in `out`.

    `LOCAL` marks them as rank-specific: they may be computed from factories and this rank's coordinate, and `to_local`
    hands them to users. `OPERATOR` records that the local operator is the one that was called, with the same numbers.
    The shard sizes of all ranks are recorded too, also for the arguments, since graph inputs are first seen here.
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
    """Yield an operator's arguments, those in nested lists too."""
    for x in given:
        if isinstance(x, (list, tuple)):
            yield from _leaves(x)
        else:
            yield x


class _Recorder(TorchDispatchMode):
    """Marks the results of factories, and of operators whose tensor arguments are all marked or without dims."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.active = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow calls of compiled functions inside; their graphs act as regions of their own."""
        return True

    @never_traced
    def __enter__(self) -> Any:
        self.active = True
        # Below autograd, writes do not bump versions.
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
        # Schemas of collectives do not state which arguments are written to.
        written = list(_written(info, args, kwargs)) if func.namespace in NATIVE else given
        kept = [alike and is_marked(t) for t in written]
        out = func(*args, **kwargs)
        for t, keep in zip(written, kept):
            self.mark(t, keep, self.counts)
        # A view already shares the mark of its base; a result with its own memory needs one.
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
    """Whether a region has marked `x`, in its present version, as the same on all ranks."""
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
    """Context in which plain tensors that are the same on all ranks may be operands beside DTensors.

    Tensors that factories (`torch.arange`, `ones`, `full`, `eye`, `tensor` of Python numbers, ...) make inside, and
    tensors computed only from them, are taken as replicated, also after the context has ended. Tensors from elsewhere
    and results of `to_local` are not. Every operator is a few microseconds slower inside. In a compiled function the
    context has no effect and no cost, because every graph is such a region already.

    Args:
        random: also take random numbers from the default generator as replicated, including those drawn in compiled
            functions called inside. You must have seeded all ranks identically, which is not checked here;
            `dtensor.random.check_states` tests it.

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
    """Mark the plain tensor `x` as the same on all ranks, in the current region or trace.

    `written` means that the operator now running writes to `x`.
    """
    if isinstance(x, (FakeTensor, FunctionalTensor)):
        note_alike(x)
    elif (recorder := _region.recorder) is not None:
        recorder.mark(x, True, written and recorder.counts)


def region_of_torch() -> contextlib.AbstractContextManager[Any]:
    """Context in which torch's own decompositions run on DTensors, marking what they create; a no-op in a trace."""
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
