"""Decorators that make a test run on several ranks: `with_ranks` on processes, `with_threads` on threads.

The decorated function takes `rank` as its first parameter, and after it whatever pytest passes (parametrized values,
fixtures), which must be picklable for `with_ranks`. pytest collects it as a test without the parameter `rank`.

    @pytest.mark.parametrize("dim", [0, 1])
    @with_ranks(2)
    def test_gather(rank, dim):
        ...
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..errors import ArgumentTypeError
from .processes import TIMEOUT, run_ranks
from .threads import run_threads

Test = Callable[..., Any]


def with_ranks(
    nproc: int, *, backend: str = "gloo", timeout: float = TIMEOUT, fresh: bool = False
) -> Callable[[Test], Test]:
    """Return a decorator that runs a test on `nproc` processes; the arguments are those of `run_ranks`.

    Args:
        nproc: number of ranks.
        backend: backend of the process group.
        timeout: seconds in which all ranks must be done.
        fresh: start new processes even under `kept_ranks`, and do not keep them.
    """

    def run(fn: Test, *args: Any) -> None:
        run_ranks(fn, nproc, *args, backend=backend, timeout=timeout, fresh=fresh)

    return functools.partial(_on_ranks, run)


def with_threads(nthreads: int, *, timeout: float = TIMEOUT) -> Callable[[Test], Test]:
    """Return a decorator that runs a test on `nthreads` threads; the arguments are those of `run_threads`.

    Args:
        nthreads: number of ranks.
        timeout: seconds in which all ranks must be done.
    """

    def run(fn: Test, *args: Any) -> None:
        run_threads(fn, nthreads, *args, timeout=timeout)

    return functools.partial(_on_ranks, run)


def _on_ranks(run: Callable[..., None], fn: Test) -> Test:
    """Return a test in which `run` calls `fn` on every rank; its signature is that of `fn` without `rank`."""
    signature = inspect.signature(fn)
    names = list(signature.parameters)
    if names[:1] != ["rank"]:
        raise ArgumentTypeError(f"a test on ranks takes `rank` first; write `def {fn.__name__}(rank, ...)`")
    shown = signature.replace(parameters=[signature.parameters[name] for name in names[1:]])

    @functools.wraps(fn)
    def test(*args: Any, **kwargs: Any) -> None:
        bound = shown.bind(*args, **kwargs)
        bound.apply_defaults()
        run(fn, *bound.args, *bound.kwargs.values())

    vars(test).update(__signature__=shown, rank_function=fn)
    return test


__all__ = ["with_ranks", "with_threads"]
