"""What the ranks of a job know about each other: which are alive, and whether one has failed.

A rank that fails where others will wait for it records this in the job's store (`failed`), and every other rank then
raises once: in `check`, which the agreement of a graph calls. The failures of a job are numbered. A rank counts the
failures that it has raised, both its own and those of others. So ranks that all fail in the same way share one failure,
and none of them raises it a second time later.

A thread in each rank writes a sign of life every `PULSE` seconds and reads the number of failures. If its rank cannot
look, because it waits in a collective for a rank that will not come, the thread breaks the connections of this rank's
process groups, which ends the wait with an error, and logs the reason. It does the same if two ranks wait for each
other in different graphs that both know; the number of graphs that each has run on the shared group reveals this. All
of it costs the program no more than a few comparisons per call of a compiled graph.

Keys in the store, under `dtensor/job/`:

    alive/{rank}     a number that grows; LEFT when the program ends
    failures         number of failures
    raised/{k}       how many ranks raised the k-th failure by themselves
    failure/{k}      the text of the first of them
    at/{rank}        position of a rank that has not moved for a while: name of a group -> number of graphs run,
                     collectives of the last one
"""

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..errors import AgreementError
from ..torch_private.compiling import is_compiling
from ..torch_private.core import break_connections, cloned_store, default_store
from .collective_order import alike, difference
from .groups import all_calls

PULSE = 1.0
"""Seconds between signs of life."""

SILENCE = 15.0
"""Seconds without a sign of life after which a rank counts as dead."""

PATIENCE = 5.0
"""Seconds in one call after which a rank counts as waiting."""

LEFT = "left"

SAID = 2000
"""Maximum number of characters of an error that other ranks receive."""

log: logging.Logger = logging.getLogger("dtensor")


@dataclass
class Job:
    """This rank's view of a job: all ranks that share one store.

    Attributes:
        store: The main thread's connection to the store.
        rank: The global rank of this process.
        failures: Number of the job's failures that this rank has raised.
        news: The text of a failure that the thread has found and this rank has yet to raise; "" if there is none.
        broken: The text of the failure for which the thread broke this rank's connections; "" if it did not.
    """

    store: Any
    rank: int
    failures: int = 0
    news: str = ""
    broken: str = ""

    def __post_init__(self) -> None:
        self.process: int = os.getpid()
        self._signs: dict[int, tuple[bytes, float]] = {}
        self._agreeing = False
        self._stop = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(
            target=self._watch, args=(cloned_store(self.store),), name="dtensor job", daemon=True
        )
        self._thread.start()

    def failed(self, said: str) -> None:
        """Record in the store that this rank raises `said`. Ranks that have raised equally often share one failure."""
        self._count_failure()
        _add_failure(self.store, self.failures, said[:SAID])

    def failing(self, said: str) -> AgreementError:
        """Record the failure `said` in the store, and return the error to raise."""
        self.failed(said)
        return AgreementError(said)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context in which the calling thread waits for other ranks and looks for failures itself."""
        self._agreeing, self._main = True, threading.get_ident()
        try:
            yield
        finally:
            self._agreeing = False

    def check(self) -> None:
        """Raise the failure of another rank, if there is one that this rank has not raised.

        Raises:
            AgreementError: With the text of that failure.
        """
        if self.store.add(_key("failures"), 0) > self.failures:
            self._count_failure()
            self.news = ""
            raise AgreementError(_told(self.store, self.failures))
        self.news = ""

    def _count_failure(self) -> None:
        """Count a failure, and restart the counts of graphs: after a failure they differ between ranks."""
        self.failures += 1
        for calls in all_calls():
            calls.count, calls.last, calls.looked, calls.taken = 0, (), 0, 0

    def absent(self, rank: int) -> str:
        """The reason why `rank` will never come, as far as is known; "" if it may still come."""
        if not self.store.check([key := _key("alive", rank)]):
            return ""
        sign, now = self.store.get(key), time.monotonic()
        if sign == LEFT.encode():
            return f"rank {rank} has left the program"
        before, since = self._signs.get(rank, (b"", now))
        if sign != before:
            since = now
        self._signs[rank] = (sign, since)
        silent = now - since
        return f"rank {rank} has given no sign of life for {silent:.0f} s" if silent > SILENCE else ""

    def leave(self, error: BaseException | None = None) -> None:
        """End the thread, and record that this rank has left; with an `error`, also that it failed with it."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(2 * PULSE)
        try:
            if error is not None:
                self.failed(f"rank {self.rank} ended with {type(error).__name__}: {error}")
            self.store.set(_key("alive", self.rank), LEFT)
        except RuntimeError:
            pass  # the store is gone, and with it the rank that held it
        if error is not None:
            break_connections()  # a started collective that is never waited for would keep the process from ending

    def _watch(self, store: Any) -> None:
        """The loop of the thread."""
        beat, place, since = 0, None, time.monotonic()
        while not self._stop.is_set():
            try:
                beat += 1
                store.set(_key("alive", self.rank), str(beat))
                if not self.news and store.add(_key("failures"), 0) > self.failures:
                    self.news = _told(store, self.failures + 1)
                here = self._place()
                if here != place:
                    place, since = here, time.monotonic()
                elif time.monotonic() - since > PATIENCE and not self.broken:
                    self._look_around(store)
            except RuntimeError:
                return  # the store is gone: the process group was destroyed, or its first rank has ended
            self._stop.wait(PULSE)

    def _place(self) -> tuple[int, int] | None:
        """The position of the main thread. It stays the same within one call, and while the rank waits to agree."""
        frame = sys._current_frames().get(self._main)
        return None if self._agreeing or frame is None else (id(frame), frame.f_lasti)

    def _look_around(self, store: Any) -> None:
        """For a rank that has not moved for a while: end its wait if that is in vain."""
        if is_compiling(sys._current_frames().get(self._main)):
            return
        said = self.news or self._at_odds(store)
        if not said:
            return
        if not self.news:
            _add_failure(store, self.failures + 1, said)
        self.news = said
        if not self._agreeing:
            self.broken = said
            log.error("rank %d gives up waiting and breaks its connections: %s", self.rank, said)
            break_connections()

    def _at_odds(self, store: Any) -> str:
        """The difference to another rank, if both are stuck in different graphs on a shared group; else ""."""
        mine = all_calls()
        here = {calls.name: (calls.count, calls.last) for calls in mine}
        store.set(_key("at", self.rank), json.dumps([self.failures, here]))
        for rank in sorted({rank for calls in mine for rank in calls.ranks} - {self.rank}):
            if not store.check([key := _key("at", rank)]):
                continue
            failures, there = json.loads(store.get(key))
            for calls in mine:
                count, entries = there.get(calls.name, (0, ()))
                if failures == self.failures and count == calls.count > 0 and not alike(calls.last, entries):
                    return difference({self.rank: calls.last, rank: entries})
        return ""


def _key(*parts: object) -> str:
    return "/".join(["dtensor/job", *map(str, parts)])


def _add_failure(store: Any, number: int, said: str) -> None:
    """Record the `number`-th failure of a rank, with the text `said` unless another rank was first."""
    if store.add(_key("raised", number), 1) == 1:
        store.set(_key("failure", number), said)
        store.add(_key("failures"), 1)


def _told(store: Any, number: int) -> str:
    return store.get(_key("failure", number)).decode()


_job: Job | None = None
_store: Any = None


def job() -> Job | None:
    """The job of the default process group, which this rank joins on the first call.

    None if there are no other processes to communicate with.
    """
    global _job, _store
    store = default_store()
    if store is not _store:
        leave()
        _job, _store = (None, None) if store is None else (Job(store, dist.get_rank()), store)
    return _job


def all_here() -> None:
    """Check that all ranks of the default group are present, before they make a new group together.

    Making a group waits in the store, where a missing rank goes unnoticed. Over gloo only.

    Raises:
        RuntimeError: A rank is gone, or does not come within the group's timeout.
    """
    if default_store() is not None and "gloo" in dist.get_backend_config():
        dist.barrier()


def leave() -> None:
    """Leave the job, with the error that ends the program if there is one."""
    global _job, _store
    gone, _job, _store = _job, None, None
    if gone is not None and gone.process == os.getpid():
        interactive = hasattr(sys, "ps1")  # there an error does not end the program
        gone.leave(None if interactive else getattr(sys, "last_value", None))


@contextmanager
def failure_told(doing: str, *, unless: type[Exception] | tuple[Any, ...] = ()) -> Iterator[None]:
    """Context in which an error of this rank is recorded as a failure of the job, unless it is of a type in `unless`.

    `doing` describes what the rank does there, such as "compiled".
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, unless) and (here := job()) is not None:
            here.failed(f"rank {here.rank} failed while it {doing}: {type(error).__name__}: {error}")
        raise


def explain(error: RuntimeError) -> None:
    """Raise the reason why a collective ended in `error`, if it is known.

    Raises:
        AgreementError: This rank waited in vain and its connections were broken for that; or another rank's were, and
            with them those to this rank.
    """
    if _job is None:
        return
    if _job.broken:
        raise AgreementError(_job.broken) from error
    try:
        _job.check()
    except AgreementError as why:
        raise why from error
    except RuntimeError:
        pass  # the store is gone, and with it the rank that held it


atexit.register(leave)

__all__ = ["Job", "all_here", "explain", "failure_told", "job", "leave"]
