"""Counts calls of operators without a sharding rule, which gather their arguments and run on every rank.

`decision` and `multi_step` report each such call; users read the counts from `dtensor.fallbacks`.
"""

import contextlib
import threading
import warnings
from collections import Counter
from collections.abc import Iterator

from ..program.source_lines import users_level
from ..torch_private.core import OpOverload

_counts: Counter[str] = Counter()
_warned: set[str] = set()
_lock = threading.Lock()


class _Quiet(threading.local):
    on: bool = False


_quiet = _Quiet()


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Context in which this thread's calls neither count nor warn, for dry runs."""
    before, _quiet.on = _quiet.on, True
    try:
        yield
    finally:
        _quiet.on = before


def fell_back(func: OpOverload) -> None:
    """Count a call of `func` that ran replicated; the first call of each operator warns."""
    if _quiet.on:
        return
    with _lock:
        _counts[str(func)] += 1
        first = str(func) not in _warned
        _warned.add(str(func))
    if first:
        warnings.warn(
            f"{func} has no sharding rule: its arguments are gathered and it runs on every rank; give it one with "
            "dtensor.register_sharding",
            stacklevel=users_level(),
        )


def fallbacks(*, reset: bool = False) -> Counter[str]:
    """Count the calls whose arguments were gathered because the operator has no sharding rule.

    The counts cover all threads of this process. Under torch.compile a call counts when it is traced.

    Args:
        reset: set the counts back to zero. The warnings, one per operator, are not issued again.

    Returns:
        A Counter from operator (such as "aten.histogram.bin_ct") to number of calls. It is a copy, so the difference
        of two gives the calls between them.

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
