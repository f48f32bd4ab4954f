"""Strict mode: inside `strict()` no operator communicates unless the user asked for it.

`dispatch` checks it where a decision has moves, and so do `multi_step` and the composites that move operands
themselves. Calls without moves are never checked. Decisions and their cache are the same in and out of strict mode.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..errors import StrictError
from ..layout.placements import Replicate
from ..mesh.tensor_spec import Spec
from ..program.environment import switched, text
from ..torch_private.core import OpOverload, is_being_compiled, set_thread_state, thread_state
from .implicit_moves import Move, as_code, moves_of, named_operands, redistribute_call

_KEY = "dtensor.strict"


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Context in which an operator raises instead of communicating implicitly.

    An operator is refused if a collective would redistribute one of its operands before it runs, or if it has no rule
    and its arguments would be gathered. Moves that send nothing are allowed, such as sharding a replicated operand. So
    is communication that was asked for: `redistribute`, `full_tensor`, their gradients, and bringing a gradient to the
    layout of the tensor it belongs to. A backward that is called inside is checked too.

    The context applies to the calling thread. It can be nested and used as a decorator. Put it around the call of a
    compiled function, not inside: tracing runs the same checks, and compilation fails with a torch error that contains
    the message. Code that is already compiled is not checked again.

    Raises:
        StrictError: it names the operator, the argument, its present and target placements, the
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


_contexts: list[bool] = []
"""One entry for each context that a thread is inside of. While it is empty, no thread has a state."""


@contextlib.contextmanager
def _state(value: bool) -> Iterator[None]:
    before = thread_state(_KEY, None)
    _contexts.append(value)
    set_thread_state(_KEY, value)
    try:
        yield
    finally:
        set_thread_state(_KEY, before)
        _contexts.pop()


def suspended() -> contextlib.AbstractContextManager[None]:
    """Context in which strict mode is off, for dry runs."""
    return _state(False)


def active() -> bool:
    """Whether this thread is inside `strict()`, or is compiling with DTENSOR_STRICT=1 in the environment."""
    state = thread_state(_KEY, None) if _contexts else None
    return state if state is not None else is_being_compiled() and switched("strict", False)


def fingerprint() -> tuple[bool | None, str]:
    """The state that `active` depends on, for keys of compiled code; checks nothing."""
    return thread_state(_KEY, None), text("strict")


def check(decision: Any, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse the moves of a decision if they communicate.

    Raises:
        StrictError: a move communicates.
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
    """Refuse `moves`, made for the operator called `name`, if they communicate.

    Args:
        why: text that follows a refused move in the message.

    Raises:
        StrictError: a move communicates.
    """
    refused = [m for m in moves if m.axes]
    if refused:
        what = " and ".join(f"{m}{why(m) if why else ''}" for m in refused)
        raise _error(f"{name} would redistribute {what}", _first(m.as_call() for m in refused), refused)


def _leaving(move: Move, out: Spec | None) -> str:
    """Text that names the dims that a view cannot keep sharded; empty if there are none."""
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


def within(name: Any, operands: list[tuple[str, Spec]], error: StrictError) -> StrictError:
    """Turn `error`, raised by an operator that `name` runs as, into one in terms of `name`, which the user called."""
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


def _error(reason: str, fix: str, moves: list[Move]) -> StrictError:
    return StrictError(_refusal(reason, fix), reason, frozenset().union(*(m.axes for m in moves)))


__all__ = ["active", "check", "check_moves", "fingerprint", "strict", "suspended", "within"]
