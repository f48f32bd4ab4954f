"""A crew: rank processes that stay alive and run one program after the other.

Each rank connects to the parent, takes a pickled (program, setting), checks it, and says how that went. The parent
waits for all of them; ranks that are silent for too long, or while another has failed, write their stacks and are
killed, and the next program gets new ones. So a program that hangs or crashes is one failure, and no end of the run.
"""

import faulthandler
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path

import torch

from dtensor.testing import RankError, run_ranks

from .program import Program
from .running import Setting, check

PATIENCE = 240.0
"""Seconds a program may take, compilation included."""
AFTER_ANOTHER = 10.0
"""Seconds that ranks may still take when one has failed."""
GRACE = 0.5
"""Seconds for writing stacks."""


@dataclass(frozen=True)
class Outcome:
    """How a program went on the ranks.

    Attributes:
        kind: "ok", "wrong", "raised" (alike on all ranks), "apart" (ranks raise differently, or only some),
            "hung" (some neither failed nor came to an end), "died".
        line: the first failure in one line.
        text: tracebacks and stacks.
    """

    kind: str
    line: str = ""
    text: str = ""


def serve(rank: int, address: str, folder: str) -> None:
    """Be a rank of a crew, until the parent closes the connection."""
    with Client(address, "AF_UNIX") as parent, Path(folder, f"stacks-{rank}").open("w") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        parent.send((rank, os.getpid()))
        while True:
            try:
                program, setting = pickle.loads(parent.recv_bytes())
            except (EOFError, ConnectionError):
                return
            parent.send(_attempt(rank, program, setting))


@dataclass(frozen=True)
class Said:
    """How a program went on one rank.

    Attributes:
        line: an error; "" if all is well.
        text: its traceback.
        graphs: group -> how many compiled graphs this rank has run on it.
    """

    line: str = ""
    text: str = ""
    graphs: dict[str, int] = field(default_factory=dict)


def _attempt(rank: int, program: Program, setting: Setting) -> Said:
    try:
        return Said(graphs=check(rank, program, setting))
    except Exception as error:
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        return Said(line, "".join(traceback.format_exception(error)))
    finally:
        if setting.compiled:
            torch.compiler.reset()


def _apart(said: dict[int, Said]) -> str:
    """Which ranks of a group have run other numbers of graphs on it; "" for none."""
    for group in {name for s in said.values() for name in s.graphs}:
        counts = {r: s.graphs[group] for r, s in said.items() if group in s.graphs}
        if len({*counts.values()}) > 1:
            return f"ranks have run other numbers of graphs: {counts}"
    return ""


class Crew:
    """Ranks that run programs. Start them with `with`; they start anew by themselves after a failure."""

    def __init__(self, ranks: int, patience: float = PATIENCE):
        self.n, self.patience, self.started = ranks, patience, 0
        self._pipes: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._folder: tempfile.TemporaryDirectory | None = None
        self._thread: threading.Thread | None = None
        self._error = ""

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def run(self, program: Program, setting: Setting) -> Outcome:
        """Have all ranks check the program."""
        if not self._pipes:
            self._start()
        message = pickle.dumps((program, setting))
        for pipe in self._pipes.values():
            pipe.send_bytes(message)
        said, late, died = self._wait()
        failed = {r: s for r, s in said.items() if s.line}
        apart = "" if failed or late or died else _apart(said)
        if not (failed or late or died or apart):
            return Outcome("ok")
        text = "".join(f"rank {r}: {s.text}\n" for r, s in failed.items())
        first = next((s.line for s in failed.values()), "")
        text += self._stacks(late)
        self.stop()  # who knows what they still send each other
        if apart:
            return Outcome("apart", apart)
        if late or died:
            kind = "died" if died else "hung"
            ranks = f"ranks {sorted(died or late)} {'died' if died else 'wait'}"
            return Outcome(kind, f"{ranks}; {first}" if first else ranks, text or self._error)
        alike = len(failed) == self.n and len({s.line.split(":")[0] for s in failed.values()}) == 1
        return Outcome("wrong" if first.startswith("Wrong") else "raised" if alike else "apart", first, text)

    def _wait(self) -> tuple[dict[int, Said], set[int], set[int]]:
        """What ranks said, those who said nothing in time, and those that died."""
        said: dict[int, Said] = {}
        died: set[int] = set()
        deadline = time.monotonic() + self.patience
        while open_ := {p: r for r, p in self._pipes.items() if r not in said and r not in died}:
            ready = wait(list(open_), max(0.0, deadline - time.monotonic()))
            if not ready:
                return said, set(open_.values()), died
            for pipe in ready:
                rank = open_[pipe]
                try:
                    said[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    died.add(rank)
                if rank in died or said[rank].line:
                    deadline = min(deadline, time.monotonic() + AFTER_ANOTHER)
        return said, set(), died

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-crew-")
        address = f"{self._folder.name}/socket"
        with Listener(address, "AF_UNIX", backlog=self.n) as listener:
            self._thread = threading.Thread(target=self._host, args=(address, self._folder.name), daemon=True)
            self._thread.start()
            for _ in range(self.n):
                pipe = listener.accept()
                rank, self._pids[rank] = pipe.recv()
                self._pipes[rank] = pipe
        self.started += 1

    def _host(self, address: str, folder: str) -> None:
        try:
            run_ranks(serve, self.n, address, folder, timeout=24 * 3600)
        except (RankError, TimeoutError, OSError) as error:
            self._error = str(error)

    def _stacks(self, late: set[int]) -> str:
        assert self._folder is not None
        for rank in late:
            os.kill(self._pids[rank], signal.SIGUSR2)
        time.sleep(GRACE if late else 0)
        return "".join(f"rank {r} is in:\n{Path(self._folder.name, f'stacks-{r}').read_text()}\n" for r in sorted(late))

    def stop(self) -> None:
        """End the ranks: those that wait for a program by themselves, the others are killed."""
        for pipe in self._pipes.values():
            pipe.close()
        if self._thread is not None:
            self._thread.join(2)
            for pid in self._pids.values() if self._thread.is_alive() else ():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self._thread.join(10)
        self._pipes, self._pids, self._thread = {}, {}, None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


_crews: dict[int, Crew] = {}


def crew_of(ranks: int) -> Crew:
    """The crew of so many ranks in this process; it is made where there is none."""
    return _crews.setdefault(ranks, Crew(ranks))


def stop_all() -> None:
    """End all crews."""
    while _crews:
        _crews.popitem()[1].stop()
