"""Fallback: the count of calls of operators without a rule, which gathered their arguments to run on every rank."""

import contextlib
import threading
import warnings
from collections import Counter
from collections.abc import Iterator

from ..torch_private.core import OpOverload

_counts: Counter[str] = Counter()
_warned: set[str] = set()
_lock = threading.Lock()


class _Quiet(threading.local):
    on: bool = False


_quiet = _Quiet()


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Context in which calls of this thread neither count nor warn: they are not for real."""
    before, _quiet.on = _quiet.on, True
    try:
        yield
    finally:
        _quiet.on = before


def fell_back(func: OpOverload) -> None:
    """Count a call of `func` that ran replicated; the first one warns."""
    if _quiet.on:
        return
    with _lock:
        _counts[str(func)] += 1
        first = str(func) not in _warned
        _warned.add(str(func))
    if first:
        warnings.warn(
            f"{func} has no sharding rule: its arguments are gathered and it runs on every rank",
            stacklevel=3,
        )


def fallbacks(*, reset: bool = False) -> Counter[str]:
    """Calls so far, in all threads of this process, of operators without a rule whose arguments were gathered for it.

    Operator (such as "aten.histogram.bin_ct") -> number of calls. Under torch.compile a call counts when it is traced.
    The Counter is a copy: the difference of two is what ran between.

    Args:
        reset: start again from zero. Warnings, one for each operator, do not come again.

    >>> before = dtensor.fallbacks()
    >>> found = torch.histogram(x, 3)
    >>> dtensor.fallbacks() - before
    Counter({'aten.histogram.bin_ct': 1})
    """
    with _lock:
        found = _counts.copy()
        if reset:
            _counts.clear()
    return found


__all__ = ["fallbacks", "fell_back", "uncounted"]
