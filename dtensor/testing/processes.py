"""`run_ranks`, which runs a function on several real processes that form one process group on this machine.

The parent starts one process for each rank (`child`), waits for their messages, and ends the processes it started. On
Linux they are forked from a server process that has imported torch and this library and done nothing else, which saves
each of them some seconds; the server ends with the parent. Every failure becomes one exception in the parent, with a
rank's traceback, the exit code of a rank that died, or, after a timeout, the Python stacks of all ranks.

Under `kept_ranks`, processes that completed their job and could be restored to their initial state run the next job.
"""

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from ..errors import ArgumentError, ArgumentTypeError
from ..program.stages import Stage
from .child import LEAVE, STACKS_SIGNAL, ChildJob, Failure, Surroundings, rank_main
from .references import FunctionReference

PRELOADED = ["dtensor.compile", "dtensor.testing.child", "torch._inductor.compile_fx", "dtensor.testing.preloaded"]
"""Modules that the server process has imported before ranks are forked from it."""

READ_AT_IMPORT = ("TORCH", "PYTORCH", "DTENSOR", "OMP_", "MKL_", "PYTHON")
"""Prefixes of environment variables that the preloaded modules may have read; if one has changed since, ranks are
spawned and import the modules themselves."""

READ_LATER = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK")
"""Variables with such a prefix that are not read at import, and that Inductor and accelerate set."""

TIMEOUT = 600.0
"""Default timeout of a job in seconds. It guards against hangs, so it is far longer than slow ranks need to compile."""

LEAVING = 30.0
"""Seconds that a rank has to restore the state of its process; one that takes longer is not kept."""

GRACE = 1.0
"""Seconds that the other ranks have to report after the first failure, and that ranks have to write their stacks."""


class RankError(RuntimeError):
    """A rank failed; the message holds its traceback.

    Attributes:
        rank: the rank that failed first.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank

    def _render_traceback_(self) -> list[str]:
        """For notebooks: the traceback that counts is the rank's."""
        return [f"RankError: {self}"]


def run_ranks(
    fn: Callable[..., Any],
    nproc: int,
    *args: Any,
    backend: str = "gloo",
    timeout: float = TIMEOUT,
    fresh: bool = False,
) -> list[Any]:
    """Call `fn(rank, *args)` in `nproc` processes and return the results in the order of ranks.

    Each process has one torch thread and an initialised default process group. The processes are new, except for those
    that `kept_ranks` kept.

    Args:
        fn: a function at the top level of a module.
        nproc: number of ranks.
        args: further arguments; they and the return values are pickled (tensors by value).
        backend: backend of the process group; with "nccl" rank r uses GPU r.
        timeout: seconds in which all ranks must be done.
        fresh: start new processes even under `kept_ranks`, and do not keep them.

    Returns:
        The return value of `fn` on each rank.

    Raises:
        RankError: a rank raised an exception, or its process died.
        TimeoutError: the ranks were not done in time; the message, also printed, holds every rank's Python stacks.
        ValueError: `fn` is not at the top level of a module, or `nproc` is not an int of at least 1.
        TypeError: `timeout` is not a number.
    """
    if not isinstance(nproc, int) or nproc < 1:
        raise ArgumentError(f"nproc, the number of ranks, must be an int of at least 1; got {nproc!r}")
    if not isinstance(timeout, (int, float)):
        raise ArgumentTypeError(f"timeout must be a number of seconds; got {timeout!r}")
    function = FunctionReference.of(fn)
    kept = None if fresh else _kept
    with tempfile.TemporaryDirectory(prefix="dtensor-ranks-") as folder:
        job = ChildJob(function, pickle.dumps(args), Surroundings.here(nproc, backend, timeout, folder))
        ranks: list[_Rank] = []
        try:
            with ExitStack() as until_started:
                until_started.enter_context(Stage(f"starting {nproc} processes"))
                for rank in range(nproc):
                    ranks.append(_Rank(rank, _idle(kept, backend) or _Process(backend)))
                    ranks[-1].process.send(pickle.dumps((rank, job)))
                _collect(ranks, job, until_started)
            results = [pickle.loads(r.result) for r in ranks]
            if kept is not None:
                kept += _left(ranks)
                ranks = [r for r in ranks if r.process not in kept]
            return results
        finally:
            _end([r.process for r in ranks], [r.process for r in ranks if not r.done])


@contextlib.contextmanager
def kept_ranks() -> Iterator[None]:
    """Context manager in which `run_ranks` reuses its processes.

    This saves the time to start them, and to import what the compiler needs. Between two jobs a process leaves its
    process group, discards what was compiled, and restores its settings (`renewal`). Changes that a job made to modules
    remain, so a job that replaces parts of a module for good should run with `fresh=True`. Processes of a job that
    failed are not reused, nor are those in which threads of the job still run.
    """
    global _kept
    before, _kept = _kept, []
    try:
        yield
    finally:
        ended, _kept = _kept, before
        _end(ended)


def _read_at_import() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k.startswith(READ_AT_IMPORT) and k not in READ_LATER}


_when_preloaded = cache(_read_at_import)
"""Returns these variables as they were when the first ranks, and with them the server process, were started."""


def start_method(backend: str) -> str:
    """Return how to start ranks: "forkserver" or "spawn". With GPUs it is "spawn", as CUDA does not support forks."""
    copies = _when_preloaded() == _read_at_import() and sys.platform == "linux" and "nccl" not in backend
    return "forkserver" if copies else "spawn"


class _Process:
    """A process that runs jobs, and the parent's end of its pipe."""

    def __init__(self, backend: str) -> None:
        context: Any = multiprocessing.get_context(start_method(backend))
        context.set_forkserver_preload(PRELOADED)
        self.backend, self.environment = backend, _read_at_import()
        self.pipe, there = context.Pipe()
        self.process: BaseProcess = context.Process(target=rank_main, args=(there,), name="rank")
        self.process.start()
        there.close()

    def send(self, message: bytes) -> None:
        """Send `message` to the process. If the process has died, this is noticed when its answer is read."""
        with contextlib.suppress(ConnectionError):
            self.pipe.send_bytes(message)


_kept: list[_Process] | None = None
"""The idle processes under `kept_ranks`; None outside of it."""


def _idle(kept: list[_Process] | None, backend: str) -> _Process | None:
    """Remove and return a process of `kept` that fits `backend` and the present environment; None if there is none."""
    for process in kept or ():
        alike = process.backend == backend and process.environment == _read_at_import()
        if alike and process.process.is_alive():
            assert kept is not None
            kept.remove(process)
            return process
    return None


def _left(ranks: "list[_Rank]") -> list[_Process]:
    """Make ranks that have returned leave their process group; return the processes whose state was restored."""
    for r in ranks:
        r.process.send(LEAVE)
    deadline, restored = time.monotonic() + LEAVING, []
    for r in ranks:
        with contextlib.suppress(EOFError, ConnectionError):
            if r.process.pipe.poll(max(0.0, deadline - time.monotonic())):
                _, rest = pickle.loads(r.process.pipe.recv_bytes())
                restored += [] if rest else [r.process]
    return restored


@dataclass
class _Rank:
    """The parent's view of one rank of a job."""

    rank: int
    process: _Process
    started: bool = False
    result: bytes = b""
    failure: Failure | None = None

    @property
    def done(self) -> bool:
        return bool(self.result or self.failure)

    def receive(self) -> None:
        """Take the next message; if the process has ended, record that as the failure."""
        kind: str
        content: Any
        try:
            kind, content = pickle.loads(self.process.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.process.join(GRACE)
            line = f"its process ended with exit code {self.process.process.exitcode} and reported no error"
            kind, content = "raised", Failure(0.0, line, line + "\n")  # sorted before the failures it causes
        match kind:
            case "started":
                self.started = True
            case "returned":
                self.result = content
            case _:
                self.failure = content

    def stacks(self, job: ChildJob) -> str:
        """Return the stacks that the rank wrote when signalled, or a sentence why there are none."""
        if self.done:
            return "is done\n"
        if not self.started:
            return "has not started\n"
        return f"is in:\n{job.around.stacks_file(self.rank).read_text() or '(it wrote no stacks)'}\n"


def _receive(ranks: list[_Rank], deadline: float) -> list[_Rank]:
    """Wait until ranks that are not done send messages; return these ranks, or none if the deadline has passed."""
    waiting = {r.process.pipe: r for r in ranks if not r.done}
    ready = [waiting[pipe] for pipe in wait(list(waiting), max(0.0, deadline - time.monotonic()))]
    for r in ready:
        r.receive()
    return ready


def _collect(ranks: list[_Rank], job: ChildJob, until_started: ExitStack) -> None:
    """Wait for all ranks to return; raise on the first failure, and when the timeout has passed. `until_started` is
    closed when all have begun."""
    deadline = time.monotonic() + job.around.timeout
    while not all(r.done for r in ranks):
        ready = _receive(ranks, deadline)
        if not ready:
            raise _timed_out(ranks, job)
        if any(r.failure for r in ready):
            raise _failed(ranks)
        if all(r.started for r in ranks):
            until_started.close()


def _failed(ranks: list[_Rank]) -> RankError:
    """Return the error of the rank that failed first; ranks that fail soon after it, for lack of a peer, get a line
    each."""
    deadline = time.monotonic() + GRACE
    while not all(r.done for r in ranks) and _receive(ranks, deadline):
        pass
    failures = sorted([(r.failure.time, r.rank, r.failure) for r in ranks if r.failure])
    (_, rank, first), *others = failures
    text = f"rank {rank} of {len(ranks)} failed:\n{first.text}"
    text += "".join(f"rank {other} failed too: {failure.line}\n" for _, other, failure in others)
    return RankError(rank, text)


def _timed_out(ranks: list[_Rank], job: ChildJob) -> TimeoutError:
    """Make every rank write its stacks, print them, and return the error that holds them."""
    for r in ranks:
        process = r.process.process
        if r.started and not r.done and process.is_alive() and process.pid:
            os.kill(process.pid, STACKS_SIGNAL)
    time.sleep(GRACE)
    text = f"{job.function.qualname} was not done on {len(ranks)} ranks after {job.around.timeout:g} s\n"
    text += "".join(f"rank {r.rank} {r.stacks(job)}" for r in ranks)
    print(text, file=sys.stderr, flush=True)
    return TimeoutError(text)


def _end(processes: list[_Process], at_once: Sequence[_Process] = ()) -> None:
    """Close the pipes and wait a while for the processes to end by themselves; kill those in `at_once` immediately."""
    for p in processes:
        p.pipe.close()
    for p in at_once:
        p.process.kill()
    deadline = time.monotonic() + 5 * GRACE
    for p in processes:
        p.process.join(max(0.0, deadline - time.monotonic()))
        if p.process.is_alive():
            p.process.kill()
            p.process.join()
        p.process.close()


__all__ = ["PRELOADED", "TIMEOUT", "RankError", "kept_ranks", "run_ranks", "start_method"]
