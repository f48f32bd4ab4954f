"""Strict mode: inside `strict()` no operator communicates unless the user wrote so.

Asked by dispatch where a decision has moves, and by the detours and composites that move operands themselves; what
runs without moves is never looked at. The decision is the same in and out of strict mode, and so is its cache.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..errors import StrictError, StrictReason, StrictTraceError
from ..layout.placements import Replicate
from ..mesh.environment import switched, text
from ..mesh.tensor_spec import Spec
from ..torch_private.core import OpOverload, is_being_compiled, set_thread_state, thread_state
from .implicit_moves import Move, as_code, moves_of, named_operands, redistribute_call

_KEY = "dtensor.strict"


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Context in which an operator raises instead of communicating on its own account.

    Refused are operands that would be redistributed by a collective before the operator runs, and an operator without a
    rule whose arguments would be gathered. What sends nothing is allowed (cutting a replicated operand, say), and so is
    what was asked for: `redistribute`, `full_tensor`, their gradients, and gradients brought to the layout of what they
    are the gradient of. Backward is checked too where it is called inside.

    Holds for the calling thread; may be nested, and be used as a decorator. Put it around the call of a compiled
    function, not into it: tracing runs the same checks, and compilation fails with an error of torch's that holds the
    message. What was compiled before is not checked again.

    Raises:
        StrictError: an OperatorError that names the operator, the argument, where it is and where it would go, the
            collectives, the bytes that each rank would send, and what to write instead.

    >>> @dtensor.strict()
    ... def product(x, w):
    ...     return x @ w
    >>> product(x, w)
    Traceback (most recent call last):
    dtensor.errors.StrictError: aten.mm.default would redistribute 'self' from [Shard(0)] to [Replicate()] \
(all_gather over axis 0; 256 bytes), which dtensor.strict() does not allow; write \
self.redistribute(placements=[Replicate()]) first
    >>> product(x.redistribute(placements=[Replicate()]), w).placements
    (Shard(dim=1),)
    """
    with _state(True):
        yield


@contextlib.contextmanager
def _state(value: bool) -> Iterator[None]:
    before = thread_state(_KEY, None)
    set_thread_state(_KEY, value)
    try:
        yield
    finally:
        set_thread_state(_KEY, before)


def suspended() -> contextlib.AbstractContextManager[None]:
    """Context in which strict mode is off, for what does not run for real."""
    return _state(False)


def active() -> bool:
    """Whether this thread is inside `strict()`; or compiles, where the environment has DTENSOR_STRICT=1."""
    state = thread_state(_KEY, None)
    return state if state is not None else is_being_compiled() and switched("strict", False)


def fingerprint() -> tuple[bool | None, str]:
    """What `active` goes by, for keys of compiled code; checks nothing."""
    return thread_state(_KEY, None), text("strict")


def check(decision: Any, func: OpOverload, args: Sequence, kwargs: dict[str, Any]) -> None:
    """Refuse the moves of a decision if they communicate.

    Raises:
        StrictError: they do.
    """
    operands = named_operands(func, args, kwargs)
    moves = moves_of(operands, decision.moves, decision.writes)
    if decision.fallback:
        _check_fallback(func, operands, moves)
    elif func.is_view or "view" in func._schema.name:
        check_moves(func, moves, lambda m: _leaving(m, decision.outputs[0]))
    else:
        check_moves(func, moves)


def check_moves(name: Any, moves: list[Move], why: Callable[[Move], str] | None = None) -> None:
    """Refuse those of `moves`, made for the operator called `name`, that communicate.

    Raises:
        StrictError: some do.
    """
    refused = [m for m in moves if m.axes]
    if refused:
        what = " and ".join(f"{m}{why(m) if why else ''}" for m in refused)
        raise _error(f"{name} would redistribute {what}", _first(m.as_call() for m in refused), refused)


def _leaving(move: Move, out: Spec | None) -> str:
    """Which dimension a view cannot keep sharded."""
    spec = move.spec
    lost = [
        f"dimension {p.dim} (of length {spec.shape[p.dim]}) has to leave mesh axis {axis}"  # pyright: ignore[reportAttributeAccessIssue]
        for axis, (p, q) in enumerate(zip(spec.layout.placements, move.target.placements))
        if p.is_shard() and p != q and axis in move.axes
    ]
    shape = "" if out is None else f" for the view {list(spec.shape)} -> {list(out.shape)}"
    return f": {' and '.join(lost)}{shape}" if lost else ""


def _check_fallback(func: OpOverload, operands: list[tuple[str, Spec]], moves: list[Move]) -> None:
    refused = [m for m in moves if m.axes]
    if refused:
        where = ", ".join(f"{name}: {as_code(spec.layout.placements)}" for name, spec in operands)
        raise _error(
            f"{func} has no sharding rule: its arguments ({where}) would be gathered and it would run on every rank",
            f"{_first(m.as_call() for m in refused)}, or give it a rule with dtensor.register_sharding",
            refused,
        )


def within(name: Any, operands: list[tuple[str, Spec]], error: StrictReason) -> StrictReason:
    """The error of an operator that runs as others, one of which raised `error`: in terms of what the user called."""
    calls = []
    for argument, spec in operands:
        have = spec.layout.placements
        wanted = [Replicate() if axis in error.axes else p for axis, p in enumerate(have)]
        if tuple(wanted) != have:
            calls.append(redistribute_call(argument, wanted))
    message = _refusal(f"{name} runs as other operators, of which {error.reason}", _first(calls))
    return type(error)(message, error.reason, error.axes)


def _first(calls: Iterable[str]) -> str:
    return f"write {' and '.join(calls)} first"


def _refusal(reason: str, fix: str) -> str:
    return f"{reason}, which dtensor.strict() does not allow; {fix}"


def _error(reason: str, fix: str, moves: list[Move]) -> StrictReason:
    kind = StrictTraceError if is_being_compiled() else StrictError
    return kind(_refusal(reason, fix), reason, frozenset().union(*(m.axes for m in moves)))


__all__ = ["active", "check", "check_moves", "fingerprint", "strict", "suspended", "within"]
