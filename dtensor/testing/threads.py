"""`run_threads`, which runs a function on several threads of this process that act as ranks.

Threads start in milliseconds, where `processes.run_ranks` takes seconds, and a debugger can be used. They are for eager
collectives only, because Dynamo does not compile in several threads at once. A thread that hangs can be reported but
not ended.
"""

import faulthandler
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import ArgumentError, CallOrderError
from ..torch_private.core import threaded_process_group
from .processes import TIMEOUT, RankError

GRACE = 1.0
"""Seconds that threads have to end after their collectives were stopped by a timeout or the failure of a rank."""


def run_threads(fn: Callable[..., Any], nthreads: int, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Call `fn(rank, *args)` in `nthreads` threads of this process and return the results in the order of ranks.

    In each thread a default process group over all threads is initialised.

    Args:
        fn: a function, not necessarily at the top level of a module.
        nthreads: number of ranks.
        args: further arguments, shared by all threads.
        timeout: seconds in which all ranks must be done.

    Returns:
        The return value of `fn` on each rank.

    Raises:
        RankError: a rank raised an exception; the message holds its traceback.
        TimeoutError: the ranks were not done in time; the message, also printed, holds the Python stacks of all
            threads.
        RuntimeError: this process already has a default process group.
        ValueError: `nthreads` is less than 1.
    """
    if nthreads < 1:
        raise ArgumentError(f"nthreads, the number of ranks, must be at least 1; got {nthreads}")
    if dist.is_initialized():
        raise CallOrderError(
            "run_threads makes a process group of threads, but this process is already a rank of a process group; "
            "call run_threads from a process that is not"
        )
    with threaded_process_group() as group:
        return _Run(fn, args, nthreads, timeout, group).results()


class _Run:
    """One call of `run_threads`; the lists are indexed by rank."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], n: int, timeout: float, group: Any) -> None:
        self.fn, self.args, self.n, self.timeout, self.group = fn, args, n, timeout, group
        self.returned: list[Any] = [None] * n
        self.failures: list[tuple[int, str]] = []
        self.store = dist.HashStore()

    def results(self) -> list[Any]:
        threads = [
            threading.Thread(target=self._rank, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.n)
        ]
        for thread in threads:
            thread.start()
        self._join(threads, self.timeout)
        if any(t.is_alive() for t in threads) and not self.failures:
            raise self._timed_out(threads)
        if self.failures:
            self._join(threads, GRACE)
            rank, text = self.failures[0]
            raise RankError(rank, f"rank {rank} of {self.n} (a thread) failed:\n{text}")
        return self.returned

    def _rank(self, rank: int) -> None:
        try:
            dist.init_process_group(
                "threaded",
                rank=rank,
                world_size=self.n,
                store=self.store,
                timeout=timedelta(seconds=self.timeout),
            )
            self.returned[rank] = self.fn(rank, *self.args)
        except SystemExit as end:
            # Raised by a collective that was stopped because another rank failed.
            if not self.failures:
                self.failures.append((rank, traceback.format_exc()))
                self.group.exception_handle(end)
        except BaseException as error:
            self.failures.append((rank, traceback.format_exc()))
            self.group.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def _join(self, threads: list[threading.Thread], seconds: float) -> None:
        """Wait for the threads to end, for at most `seconds`, and at most `GRACE` after a failure."""
        deadline = time.monotonic() + seconds
        for thread in threads:
            while thread.is_alive() and time.monotonic() < deadline:
                thread.join(0.05)
                if self.failures:
                    deadline = min(deadline, time.monotonic() + GRACE)

    def _timed_out(self, threads: list[threading.Thread]) -> TimeoutError:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read()
        late = ", ".join(t.name for t in threads if t.is_alive())
        name = getattr(self.fn, "__qualname__", self.fn)
        text = f"{name} was not done after {self.timeout:g} s in {late}; all threads:\n{stacks}"
        print(text, file=sys.stderr, flush=True)
        error = TimeoutError(text)
        self.failures.append((-1, text))
        self.group.exception_handle(error)
        self._join(threads, GRACE)
        return error


__all__ = ["run_threads"]
