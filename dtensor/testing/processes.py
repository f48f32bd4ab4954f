"""`run_ranks`: a function on several real processes that form one process group on this machine.

The parent starts one process for each rank (`child`), waits for what each says, and ends the ones it started. On Linux
they are copies of a process that has imported torch and this library and done nothing else, which saves each of them
some seconds; it ends with the parent. Whatever goes wrong is one exception in the parent: a rank's traceback, the exit
code of a rank that died, or, when time is up, the Python stacks of all ranks.

Under `kept_ranks` processes that did their job well, and could be put back as they were, take the next job.
"""

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from .child import LEAVE, STACKS_SIGNAL, Failure, Job, rank_main
from .references import FunctionReference

PRELOADED = ["dtensor.compile", "dtensor.testing.child", "torch._inductor.compile_fx"]
"""What the process has imported of which ranks are copies."""

READ_AT_IMPORT = ("TORCH", "PYTORCH", "DTENSOR", "OMP_", "MKL_", "PYTHON")
"""How variables begin that the imported may have read; if one has changed since, ranks import for themselves."""

READ_LATER = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Those that are not read at import, and that Inductor sets."""

TIMEOUT = 600.0
"""Seconds that all ranks have by default: against a hang, and so far more than slow ranks that compile need."""

LEAVING = 30.0
"""Seconds that a rank has to put its process back as it was; one that takes longer is not kept."""

GRACE = 1.0
"""Seconds left to the other ranks to report after the first failure, and to all to write their stacks."""


class RankError(RuntimeError):
    """A rank failed; the message holds its traceback.

    Attributes:
        rank: the rank that failed first.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def run_ranks(
    fn: Callable[..., Any],
    nproc: int,
    *args: Any,
    backend: str = "gloo",
    timeout: float = TIMEOUT,
    fresh: bool = False,
) -> list[Any]:
    """Call `fn(rank, *args)` in `nproc` processes and return what each returned, in the order of ranks.

    Each process has one torch thread, and the default process group is initialised. The processes are new, but for
    those that `kept_ranks` has.

    Args:
        fn: a function at the top level of a module.
        nproc: number of ranks.
        args: more arguments; they and the return values are pickled (tensors by value).
        backend: backend of the process group; with "nccl" rank r takes GPU r.
        timeout: seconds in which all ranks have to be done.
        fresh: whether the processes are new, and not kept, under `kept_ranks`, too.

    Raises:
        RankError: a rank raised, or died.
        TimeoutError: time is up; the message, also printed, holds every rank's Python stacks.
        ValueError: `fn` is not at the top level of a module, or `nproc` is no number of at least 1.
        TypeError: `timeout` is no number.
    """
    if not isinstance(nproc, int) or nproc < 1:
        raise ValueError(f"nproc is the number of ranks, at least 1; got {nproc!r}")
    if not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout is a number of seconds; got {timeout!r}")
    function = FunctionReference.of(fn)
    kept = None if fresh else _kept
    with tempfile.TemporaryDirectory(prefix="dtensor-ranks-") as folder:
        job = Job(
            function, pickle.dumps(args), nproc, backend, timeout, folder, dict(os.environ), os.getcwd(), list(sys.path)
        )
        ranks: list[_Rank] = []
        try:
            for rank in range(nproc):
                ranks.append(_Rank(rank, _idle(kept, backend) or _Process(backend)))
                ranks[-1].process.send(pickle.dumps((rank, job)))
            _collect(ranks, job)
            results = [pickle.loads(r.result) for r in ranks]
            if kept is not None:
                kept += _left(ranks)
                ranks = [r for r in ranks if r.process not in kept]
            return results
        finally:
            _end([r.process for r in ranks], [r.process for r in ranks if not r.done])


@contextlib.contextmanager
def kept_ranks() -> Iterator[None]:
    """Context in which `run_ranks` uses its processes again, which saves starting them, and what compiling imports.

    Between two jobs a process leaves its process group, forgets what was compiled, and puts settings back (`renewal`).
    What a job did to modules stays: one that replaces parts of them for good asks for `fresh=True`. The processes of a
    job that failed are not used again, nor those that still have threads of their own.
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
"""The variables as they were when the first ranks started, and with them the process of which they are copies."""


def _start_method(backend: str) -> str:
    """How ranks start: "forkserver" as copies, or "spawn"; with GPUs the latter, as CUDA allows no copies."""
    copies = _when_preloaded() == _read_at_import() and sys.platform == "linux" and "nccl" not in backend
    return "forkserver" if copies else "spawn"


class _Process:
    """A process that takes jobs, and the parent's end of its pipe."""

    def __init__(self, backend: str) -> None:
        context: Any = multiprocessing.get_context(_start_method(backend))
        context.set_forkserver_preload(PRELOADED)
        self.backend, self.environment = backend, _read_at_import()
        self.pipe, there = context.Pipe()
        self.process: BaseProcess = context.Process(target=rank_main, args=(there,), name="rank")
        self.process.start()
        there.close()

    def send(self, message: bytes) -> None:
        """Send to the process; that it has died shows where its answer is read."""
        with contextlib.suppress(ConnectionError):
            self.pipe.send_bytes(message)


_kept: list[_Process] | None = None
"""The idle processes under `kept_ranks`, None outside."""


def _idle(kept: list[_Process] | None, backend: str) -> _Process | None:
    """One of the kept processes for a job of now, taken out; None if there is none."""
    for process in kept or ():
        alike = process.backend == backend and process.environment == _read_at_import()
        if alike and process.process.is_alive():
            assert kept is not None
            kept.remove(process)
            return process
    return None


def _left(ranks: "list[_Rank]") -> list[_Process]:
    """Have ranks that returned leave their group; the processes that are then as they were."""
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
        """Take the next message, or the end of the process for one."""
        kind: str
        content: Any
        try:
            kind, content = pickle.loads(self.process.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.process.join(GRACE)
            line = f"its process ended with exit code {self.process.process.exitcode} and no word"
            kind, content = "raised", Failure(0.0, line, line + "\n")  # before all that follow from it
        match kind:
            case "started":
                self.started = True
            case "returned":
                self.result = content
            case _:
                self.failure = content

    def stacks(self, job: Job) -> str:
        """What the rank wrote when signalled; in words if it had nothing to write."""
        if self.done:
            return "is done\n"
        if not self.started:
            return "has not started\n"
        return f"is in:\n{job.stacks_file(self.rank).read_text() or '(it wrote no stacks)'}\n"


def _receive(ranks: list[_Rank], deadline: float) -> list[_Rank]:
    """Wait until a rank that is not done says something; the ranks that did, none if time is up."""
    waiting = {r.process.pipe: r for r in ranks if not r.done}
    ready = [waiting[pipe] for pipe in wait(list(waiting), max(0.0, deadline - time.monotonic()))]
    for r in ready:
        r.receive()
    return ready


def _collect(ranks: list[_Rank], job: Job) -> None:
    """Wait for all ranks to return; raise on the first failure and when time is up."""
    deadline = time.monotonic() + job.timeout
    while not all(r.done for r in ranks):
        ready = _receive(ranks, deadline)
        if not ready:
            raise _timed_out(ranks, job)
        if any(r.failure for r in ready):
            raise _failed(ranks)


def _failed(ranks: list[_Rank]) -> RankError:
    """The error for the rank that failed first; those that fail soon after, for want of a peer, get a line
    each."""
    deadline = time.monotonic() + GRACE
    while not all(r.done for r in ranks) and _receive(ranks, deadline):
        pass
    failures = sorted([(r.failure.time, r.rank, r.failure) for r in ranks if r.failure])
    (_, rank, first), *others = failures
    text = f"rank {rank} of {len(ranks)} failed:\n{first.text}"
    text += "".join(f"rank {other} failed too: {failure.line}\n" for _, other, failure in others)
    return RankError(rank, text)


def _timed_out(ranks: list[_Rank], job: Job) -> TimeoutError:
    """Have every rank write its stacks, print them, and give the error that shows them."""
    for r in ranks:
        process = r.process.process
        if r.started and not r.done and process.is_alive() and process.pid:
            os.kill(process.pid, STACKS_SIGNAL)
    time.sleep(GRACE)
    text = f"{job.function.qualname} was not done on {len(ranks)} ranks after {job.timeout:g} s\n"
    text += "".join(f"rank {r.rank} {r.stacks(job)}" for r in ranks)
    print(text, file=sys.stderr, flush=True)
    return TimeoutError(text)


def _end(processes: list[_Process], at_once: Sequence[_Process] = ()) -> None:
    """Let processes end by themselves, for a while; kill those `at_once`."""
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


__all__ = ["RankError", "kept_ranks", "run_ranks"]
