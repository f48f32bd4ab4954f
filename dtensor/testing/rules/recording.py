"""Records the aten calls that torch's operator database makes, forward and backward, as input for tests of rules.

    operator database -> samples -> run under a dispatch mode -> {aten operator: [(args, kwargs), ...]}

The result of `recorded` is the same on every machine: samples are drawn with a fixed seed, and the first calls are
kept.
"""

import functools
import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from ...rules import base_name
from ...torch_private.core import OpOverload, TorchDispatchMode, operator_database, operator_samples
from .candidates import mapped, tensors

SAMPLES, CALLS, ELEMENTS = 2, 2, 600
"""Most samples of each operator of the database, most calls of each aten operator, and the number of elements that a
call must stay below."""

SKIPPED = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}
"""Tags of operators that cannot be compared: each call returns other numbers, or changes the shape of its argument."""
UNINITIALISED = ("empty", "new_empty", "resize", "_efficientzerotensor")
"""Prefixes of the names of operators that return uninitialised memory."""

Given = tuple[tuple[Any, ...], dict[str, Any]]


class CallRecorder(TorchDispatchMode):
    """Dispatch mode that keeps the first calls of each aten operator that differ in the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[OpOverload, dict[str, Given]] = defaultdict(dict)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors((args, kwargs))
        wanted = func.namespace == "aten" and given and sum(t.numel() for t in given) < ELEMENTS
        if not wanted or any(t.layout is not torch.strided for t in given):
            return func(*args, **kwargs)
        key = str(mapped((args, kwargs), lambda t: list(t.shape)))
        kept = mapped((args, kwargs), lambda t: t.detach().clone())
        out = func(*args, **kwargs)
        found = self.calls[func]
        if len(found) < CALLS:
            found.setdefault(key, kept)
        return out


@functools.cache
def recorded() -> dict[OpOverload, list[Given]]:
    """Return calls `(args, kwargs)` of every aten operator that the database runs on the CPU, with plain tensors.

    There are at most `CALLS` of each operator, in float64 where that is supported. The result is cached and shared by
    all callers: do not write to the tensors.
    """
    recorder = CallRecorder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in operator_database().values():
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                _record(op, recorder)
    return {func: list(found.values()) for func, found in recorder.calls.items()}


def _record(op: Any, recorder: CallRecorder) -> None:
    supported = op.supported_dtypes("cpu")
    dtype = next((d for d in (torch.float64, torch.float32, *supported) if d in supported), None)
    if dtype is None:
        return
    differentiable = op.supports_autograd and dtype.is_floating_point
    for sample in list(operator_samples(op, dtype, differentiable))[:SAMPLES]:
        try:
            with recorder:
                _run(op, sample, differentiable)
        except (RuntimeError, AssertionError, TypeError):
            continue  # not supported on this device


def _run(op: Any, sample: Any, differentiable: bool) -> None:
    outs = [o for o in tensors(op(sample.input, *sample.args, **sample.kwargs)) if o.requires_grad]
    ins = [t for t in tensors((sample.input, sample.args, sample.kwargs)) if t.requires_grad]
    if differentiable and outs and ins:
        torch.autograd.grad(outs, ins, [torch.randn_like(o) for o in outs], allow_unused=True)


def is_comparable(func: OpOverload, args: Iterable[Any]) -> bool:
    """Return whether a call of `func` always returns the same values, in a shape that does not depend on values.

    This excludes operators with out=, with a list that holds masks, with random numbers, and with uninitialised memory.
    """
    masks = any(t.dtype in (torch.bool, torch.uint8) for a in args if isinstance(a, (list, tuple)) for t in tensors(a))
    out = any(a.is_out for a in func._schema.arguments)
    name = base_name(func).removeprefix("aten::")
    return not (out or masks or name.startswith(UNINITIALISED) or SKIPPED & set(func.tags))


__all__ = ["UNINITIALISED", "CallRecorder", "is_comparable", "recorded"]
