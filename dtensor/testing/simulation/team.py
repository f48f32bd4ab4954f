"""The processes of simulated ranks: starts them, has them run calls, prints what they print, and ends them.

A call ends in one of three ways: every rank returned; every rank failed in the same place, and all of them live on; or
one failed alone, died, was too slow or was interrupted, and all are ended. There is no fourth: a rank that waits in a
collective for one that has answered already is told so by the job (`dtensor.job.waits`), and fails.
"""

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from ...errors import ArgumentTypeError
from ..child import STACKS_SIGNAL, Surroundings
from ..processes import PRELOADED, RankError, start_method
from .lines import HOLD, Lines
from .rank import CallFailure, RankCall, Start, rank_main

TOGETHER = 4.0
"""Seconds in which the other ranks may fail as the first one did, and so live on."""

ENDING = 5.0
"""Seconds that ranks have to end by themselves, and a second of them to write their stacks."""

ENDED = "The ranks have been ended. The next call starts new ones, which do not have the variables of these."


class Team:
    """`n` ranks, of which each call may take `timeout` seconds; none when they have been ended, until they are started.

    Attributes:
        members: the ranks.
    """

    def __init__(self, n: int, timeout: float) -> None:
        self.n: int = n
        self.timeout: float = timeout
        self.members: list[_Member] = []
        self._shown: tuple[Lines, Lines] = Lines(n), Lines(n)
        self._folder: Any = None
        self._store: Any = None

    def start(self) -> None:
        """Start the processes. They make their process group while this one goes on."""
        self._folder = tempfile.TemporaryDirectory(prefix="dtensor-ranks-")
        self._around = Surroundings.here(self.n, "gloo", self.timeout, self._folder.name)
        self._store = dist.TCPStore("127.0.0.1", 0, self.n, True, wait_for_workers=False)
        self._shown = Lines(self.n), Lines(self.n)
        try:
            for rank in range(self.n):
                self.members.append(_Member(rank))
                self.members[-1].send(pickle.dumps(Start(rank, self._around, self._store.port)))
        except BaseException:
            self.end(at_once=True)
            raise

    def answers(self, name: str, call: RankCall) -> list[Any]:
        """Run `call`, which messages call `name`, on all ranks and return their values.

        Raises:
            RankError, TimeoutError, KeyboardInterrupt: the call failed, was too slow, or was interrupted.
            TypeError: a value cannot be read here.
        """
        if not self.members:
            self.start()
        for member in self.members:
            member.begin(pickle.dumps(call))
        try:
            self._collect(name)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(ENDED)
            self.end(at_once=True)
            raise
        self._show(last=True)
        if any(member.failure for member in self.members):
            raise self._failed()
        try:
            return [pickle.loads(member.result) for member in self.members]
        except Exception as error:
            raise ArgumentTypeError(
                f"what {name} gives cannot be read here: {type(error).__name__}: {error}; give tensors, numbers or "
                "text, or define its class outside of the ranks"
            ) from error

    def _collect(self, name: str) -> None:
        """Wait until all ranks have answered, or until one has failed and the others do not follow soon."""
        deadline = time.monotonic() + self.timeout
        failed_at: float | None = None
        while not all(member.done for member in self.members):
            self._receive()
            self._show()
            now = time.monotonic()
            if failed_at is None and any(member.failure for member in self.members):
                failed_at = now
            if failed_at is not None and now > failed_at + TOGETHER:
                return
            if now > deadline:
                raise self._too_late(name)

    def _receive(self) -> None:
        """Take what the ranks have sent and written; wait for something for at most half as long as lines do."""
        pipes: dict[Any, _Member] = {member.pipe: member for member in self.members if not member.done}
        streams: dict[Any, _Member] = {
            end: member for member in self.members for end in member.streams if end is not None
        }
        ready = wait([*pipes, *streams], HOLD / 2)
        for end in ready:
            if end in streams:
                self._read(streams[end], end)
        for end in ready:
            if end in pipes:
                pipes[end].receive()

    def _read(self, member: "_Member", end: Any) -> None:
        stream = member.streams.index(end)
        self._shown[stream].add(member.rank, member.read(stream))

    def _show(self, last: bool = False) -> None:
        """Print the lines that are ready; all that there are if this is the `last` time in a call."""
        if last:
            for member in self.members:
                for end in member.streams:
                    while end is not None and not end.closed and end.poll():
                        self._read(member, end)
            for lines in self._shown:
                lines.end()
        done = [member.done for member in self.members]
        for lines, file in zip(self._shown, (sys.stdout, sys.stderr)):
            shown = "".join([f"{line}\n" for line in lines.ready(done, last)])
            if shown:
                file.write(shown)
                file.flush()

    def _failed(self) -> RankError:
        """End the ranks, unless all of them failed in the same place; return the error, which begins with the first."""
        failures = [(m.failure.time, m.rank, m.failure) for m in self.members if m.failure]
        alike = len(failures) == self.n and all(failures[0][2].is_like(other) for _, _, other in failures)
        (_, rank, first), *others = failures if alike else sorted(failures, key=lambda f: f[:2])
        if alike:
            who = "the rank failed" if self.n == 1 else f"all {self.n} ranks failed in the same place; rank {rank}"
            return RankError(rank, f"{who}:\n{first.text.strip()}")
        self.end(at_once=True)
        text = f"rank {rank} of {self.n} failed:\n{first.text}"
        text += "".join(f"rank {other} failed too: {failure.line}\n" for _, other, failure in others)
        return RankError(rank, f"{text}{ENDED}")

    def _too_late(self, name: str) -> TimeoutError:
        late = [member for member in self.members if not member.done]
        for member in late:
            if member.process.is_alive():
                os.kill(member.process.pid, STACKS_SIGNAL)
        time.sleep(1.0)
        stacks = [f"rank {m.rank} is in:\n{self._around.stacks_file(m.rank).read_text()}" for m in late]
        self._show(last=True)
        self.end(at_once=True)
        return TimeoutError(
            f"{name} was not done on all ranks after {self.timeout:g} s; simulate(..., timeout=...) gives them longer\n"
            f"{''.join(stacks)}{ENDED}"
        )

    def end(self, at_once: bool = False) -> None:
        """End the processes: by asking them, and those that do not by force; all by force if `at_once`."""
        members, self.members = self.members, []
        for member in members:
            member.end(at_once)
        deadline = time.monotonic() + ENDING
        for member in members:
            member.join(max(0.0, deadline - time.monotonic()))
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = self._store = None


class _Member:
    """The parent's view of a rank: its process, and the ends of its pipes.

    Attributes:
        streams: what it writes to its standard output and error; None when that has ended.
        done: whether it has answered the present call.
        result: its value, pickled.
        failure: how it failed; None if it did not.
    """

    def __init__(self, rank: int) -> None:
        context: Any = multiprocessing.get_context(start_method("gloo"))
        context.set_forkserver_preload(PRELOADED)
        self.rank = rank
        self.pipe, there = context.Pipe()
        ends = [context.Pipe(duplex=False) for _ in range(2)]
        self.streams: list[Connection | None] = [ours for ours, _ in ends]
        self.done: bool = False
        self.result: bytes = b""
        self.failure: CallFailure | None = None
        theirs = (there, *[written for _, written in ends])
        self.process: Any = context.Process(target=rank_main, args=theirs, name=f"rank {rank}")
        with _without_main():
            self.process.start()
        for end in theirs:
            end.close()

    def begin(self, message: bytes) -> None:
        """Send a call."""
        self.done, self.result, self.failure = False, b"", None
        self.send(message)

    def send(self, message: bytes) -> None:
        """Send `message`. If the process has died, this is noticed when its answer is read."""
        with contextlib.suppress(ConnectionError):
            self.pipe.send_bytes(message)

    def receive(self) -> None:
        """Take the answer; if the process has ended, record that as the failure."""
        self.done = True
        kind: str
        content: Any
        try:
            kind, content = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join(1.0)
            line = f"its process ended with exit code {self.process.exitcode} and reported no error"
            kind, content = "raised", CallFailure(0.0, line, f"{line}\n", broken=True)
        if kind == "returned":
            self.result = content
        else:
            self.failure = content

    def read(self, stream: int) -> str:
        """What it has written to a stream."""
        end = self.streams[stream]
        assert end is not None, "a stream that has ended is not read"
        data = os.read(end.fileno(), 1 << 16)
        if not data:
            end.close()
            self.streams[stream] = None
        return data.decode("utf-8", "replace")

    def end(self, at_once: bool) -> None:
        """Ask the process to end, or end it."""
        self.pipe.close()
        if at_once:
            self.process.kill()

    def join(self, seconds: float) -> None:
        """Wait until the process has ended, and end it after `seconds`."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()
        for end in self.streams:
            if end is not None:
                end.close()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Context in which a process that is started does not run the script of this one first."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


__all__ = ["Team"]
