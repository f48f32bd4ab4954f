"""What the ranks of a job know about each other: which are alive, and whether one has failed.

A rank that fails where others will wait for it records this in the job's store (`failed`), and every other rank then
raises once: in `check`, which the agreement of a graph calls. The failures of a job are numbered. A rank counts the
failures that it has raised, both its own and those of others. So ranks that all fail in the same way share one failure,
and none of them raises it a second time later.

A thread in each rank writes a sign of life every `PULSE` seconds and reads the number of failures. If its rank cannot
look, because it waits in a collective for a rank that will not come, the thread breaks the connections of this rank's
process groups, which ends the wait with an error, and logs the reason. It does so, too, if one of the next ranks is
dead, and if ranks wait for each other in vain, in graphs or in eager collectives that not all of them run (`waits`).
A second thread does it if the store is gone or does not answer. All of it costs the program no more than a few
comparisons per call of a compiled graph, and one to two microseconds per eager collective.

A slow rank is not a dead one. A rank on the same host is dead if its process has ended or is stopped. One on another
host is if it has given no sign of life for `SILENCE` of this rank's own beats: on a loaded machine these are late, too.
Who was late recently has longer. For a rank that computes others wait as long as it takes, and say so now and then.

If a wait goes on although its connections are broken, in the program or when the groups are torn down, the process is
ended, so that torchrun starts it anew.

Keys in the store, of this round of the job only (`elastic`), under `dtensor/job/`:

    alive/{rank}     what the rank does (`dtensor.job.waits.RankState`), with a number that grows; ENDED when it ends
    process/{rank}   a name of its process, by which ranks on the same host see whether it runs
    failures         number of failures
    raised/{k}       how many ranks raised the k-th failure by themselves
    failure/{k}      the text of the first of them
    at/{rank}        position of a rank that has not moved for a while: name of a group -> number of graphs run,
                     collectives of the last one
"""

import atexit
import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist

from ..errors import AgreementError
from ..program.stages import now, waits
from ..torch_private.core import break_connections, cloned_store, default_store, on_error_of_collective
from ..torch_private.phases import compiling_at, is_compiling, places
from .collective_order import alike, difference, eager, text
from .elastic import end, own_keys, state_of, this_process, under_torchrun
from .groups import all_calls
from .waits import (
    ADVICE,
    Look,
    RankState,
    Waiting,
    foreign_wait,
    in_vain,
    late_message,
    missing,
    mixed_up,
    place_of,
    vain_message,
    whom,
)

PULSE = 1.0
"""Seconds between signs of life."""

SILENCE = 15.0
"""Seconds without a sign of life after which a rank counts as dead, in beats of the rank that misses it."""

LAST = 30.0
"""Seconds that a rank which failed has for its end under torchrun, which gives the others as many."""

GONE = 3.0
"""The same for a rank on this host whose process has ended."""

PATIENCE = 5.0
"""Seconds in one call after which a rank counts as waiting."""

TELL = 3.0
"""Seconds of waiting after which a rank that is at a stage, or waits for one that is, says so with its stages."""

WARN = 10.0
"""Seconds of waiting after which any rank first says for whom it waits."""

COMPARE = 3
"""Beats between two comparisons of the eager collectives that this rank and the next one of a group have begun."""

CROWD = 64
"""Ranks per beat by which those that wait look at others less often."""

NEIGHBOURS = 8
"""Number of other ranks whose signs of life a waiting rank looks for."""

CLOSED = ("onnection", "pair closure", "NCCL")
"""What the errors of backends say when a rank at the other end is gone, whose reason may not be known yet."""

AFTER = (
    "the program went on after that error, but connections were broken to end the wait of a rank: "
    "let it end the program, and start all ranks anew, as torchrun --max-restarts=3 does"
)
"""What else a rank is told that communicates after a failure which it has raised."""

ENDED = "left"
"""The sign of a rank that has ended its program."""

SAID = 2000
"""Maximum number of characters of an error that other ranks receive."""

log: logging.Logger = logging.getLogger("dtensor")


@dataclass
class Job:
    """This rank's view of a job: all ranks that share one store.

    Attributes:
        store: The main thread's connection to the store.
        rank: The global rank of this process.
        ranks: Number of ranks in the job.
        failures: Number of the job's failures that this rank has raised.
        news: The text of a failure that a thread has found and this rank has yet to raise; "" if there is none.
        broken: The text of the failure for which a thread broke this rank's connections; "" if it did not.
        idle: Whether this rank has done what all were called for, and waits until the others have, too.
    """

    store: Any
    rank: int
    ranks: int
    failures: int = 0
    news: str = ""
    broken: str = ""
    idle: bool = False

    def __post_init__(self) -> None:
        self.process: int = os.getpid()
        self._signs: dict[int, tuple[bytes, int]] = {}
        self._beat, self._late, self._since_heard = 0, 0.0, 0
        self._first: dict[int, int] = {}
        self._warn_after = WARN
        self._agreeing = False
        self._broken_at, self._stuck = 0.0, 0.0
        self._store_is_gone = False
        self._stop = threading.Event()
        self._main = threading.get_ident()
        self._threads = (
            threading.Thread(target=self._watch, name="dtensor job", daemon=True),
            threading.Thread(target=self._talk, args=(cloned_store(self.store),), name="dtensor store", daemon=True),
        )
        for thread in self._threads:
            thread.start()

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
            self._no_news()
            raise AgreementError(_told(self.store, self.failures))
        self._no_news()

    def _no_news(self) -> None:
        self.news, eager.raises = "", None

    def _have_news(self, said: str) -> None:
        self.news, eager.raises = said, self.check

    def _count_failure(self) -> None:
        """Count a failure, and restart the counts of graphs: after a failure they differ between ranks."""
        self.failures += 1
        eager.failures = self.failures
        for calls in all_calls():
            calls.restart()

    def absent(self, rank: int) -> str:
        """The reason why `rank` will never come, as far as is known; "" if it may still come."""
        if self._sign(self.store, rank) == ENDED.encode():
            return f"rank {rank} has left the program"
        return self._silent(self.store, rank)

    def does(self, rank: int) -> str:
        """What another rank does, as far as it has said so."""
        sign = self._sign(self.store, rank)
        return whom([rank], lambda _: _published(sign))

    @staticmethod
    def _sign(store: Any, rank: int) -> bytes:
        """The last sign of life of `rank`; empty if it has given none."""
        return store.get(key) if store.check([key := _key("alive", rank)]) else b""

    def _silent(self, store: Any, rank: int) -> str:
        """That `rank` is dead, as far as its silence tells; "" if it is alive, if it left, or if it has yet to come."""
        sign = self._sign(store, rank)
        if sign in (b"", ENDED.encode()) or rank == self.rank:
            return ""
        before, since = self._signs.get(rank, (b"", self._beat))
        if sign != before:
            since = self._beat
        self._signs[rank] = (sign, since)
        silent = (self._beat - since) * PULSE
        if silent < GONE:
            return ""
        state = state_of(store.get(key).decode()) if store.check([key := _key("process", rank)]) else ""
        if state == "ended":
            return _ended(rank, sign)
        if state == "running" or silent <= SILENCE:
            return ""
        allowed = SILENCE + 2 * max(self._late, RankState.of(json.loads(sign)).late)
        silence = f"rank {rank} has given no sign of life for {silent:.0f} s"
        return f"{silence}: its process is stopped" if state else silence if silent > allowed else ""

    def find_out(self) -> None:
        """After a connection was closed: raise the reason if it comes to be known within `GONE` seconds.

        Raises:
            AgreementError: Another rank has failed or ended, or this one has raised a failure before.
        """
        waits, place = eager.waits, place_of(sys._getframe())
        deadline = time.monotonic() + GONE
        while True:
            self.check()
            if gone := self._gone():
                what = f"waits in {text(waits.begun)}" if waits else "communicates"
                before = f"Before that:\n{_told(self.store, self.failures)}" if self.failures else ADVICE
                raise self.failing(f"rank {self.rank} {what} at {place}, but {gone}\n{before}")
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if self.failures:  # which this rank has raised, and for which another one broke its connections
            raise AgreementError(f"{_told(self.store, self.failures)}\n{AFTER}")

    def _gone(self) -> str:
        """That a rank has left, or that its process on this host has ended without a word; "" if none has."""
        for rank in range(min(self.ranks, CROWD)):
            key, sign = _key("process", rank), self._sign(self.store, rank)
            if sign == ENDED.encode():
                return f"rank {rank} has left the program"
            if rank == self.rank or not sign or not self.store.check([key]):
                continue
            if state_of(self.store.get(key).decode()) == "ended":
                return _ended(rank, sign)
        return ""

    def leave(self, error: BaseException | None = None) -> None:
        """End the threads, and record that this rank has left; with an `error`, also that it failed with it."""
        if self._stop.is_set():
            return
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * PULSE)
        try:
            if error is not None:
                self._say_why(error)
            self.store.set(_key("alive", self.rank), ENDED)
        except RuntimeError:
            pass  # the store is gone, and with it the rank that held it
        if error is not None:
            break_connections()  # a started collective that is never waited for would keep the process from ending

    def _say_why(self, error: BaseException) -> None:
        """Record the error that ends the program, or say which failure of another rank may be behind it."""
        try:
            self.check()
        except AgreementError as why:
            log.error("rank %d ends after a failure of the job: %s", self.rank, why)
        else:
            self.failed(f"rank {self.rank} ended with {type(error).__name__}: {error}")

    def _watch(self) -> None:
        """The loop of the thread that looks after this process. It waits for nothing, so that nothing can stop it."""
        place, since = None, time.monotonic()
        while not self._stop.wait(PULSE):
            now = time.monotonic()
            if (here := self._place()) != place:
                place, since = here, now
            self._since_heard += 1
            self._stuck, silent = now - since, self._since_heard * PULSE
            if min(self._stuck, silent) > SILENCE and not self._compiles():
                self._break("the job's store does not answer; the rank or the host that holds it is gone")
            in_vain = self.broken and self.news and min(self._stuck, now - self._broken_at) > SILENCE
            cut_off = min(self._stuck, silent) > 2 * SILENCE and not self._store_is_gone
            if (in_vain or cut_off) and under_torchrun():
                end(f"nothing else ends its wait: {self.broken or 'the store is silent'}")

    def _talk(self, store: Any) -> None:
        """The loop of the thread that talks to the store, which may not answer if the host that holds it is lost."""
        last = time.monotonic()
        while not self._store_is_gone:
            now = time.monotonic()
            self._beat += 1
            self._late, last = max(0.9 * self._late, now - last - PULSE), now
            state = self._state()
            try:
                if self._beat == 1:
                    store.set(_key("process", self.rank), this_process())
                store.set(_key("alive", self.rank), json.dumps(state.data()))
                if not self.news and store.add(_key("failures"), 0) > self.failures:
                    self._have_news(_told(store, self.failures + 1))
                if self._beat % COMPARE == 0 and not self.news:
                    self._compare(store, state)
                if self._stuck > TELL and not self.broken and not self._compiles():
                    if self.news or self._beat % (1 + self.ranks // CROWD) == 0:
                        look = self._others(store, state)
                        told = self._tell(state, look)
                        if self._stuck > PATIENCE:
                            self._look_around(store, state, look, told)
                else:
                    self._first.clear()
                    self._warn_after = WARN
                    waits("")
            except RuntimeError:
                self._store_is_gone = True  # the process group was destroyed, or its first rank has ended
                waits("")
            self._since_heard = 0
            if self._stop.wait(PULSE):
                return

    def _state(self) -> RankState:
        """What this rank does, for the others."""
        groups, waits = {}, eager.waits
        # While it compiles, Dynamo's own frames come and go on its stack: nobody may follow them from another thread.
        compiling = compiling_at(self._main)
        frame = None if compiling is not None else sys._current_frames().get(self._main)
        for calls in all_calls():
            calls.eager.sum_up()
            sums = sorted(set(calls.eager.checksums.values()))
            groups[calls.name] = (calls.ranks, calls.eager.count, calls.count, sums)
        found = None
        if self.idle:
            found = Waiting("call", "the end of this call, which it has done", "", tuple(range(self.ranks)))
        elif waits is not None and waits.group in groups:
            found = Waiting("eager", text(waits.begun), waits.group, groups[waits.group][0], waits.number)
        elif self._agreeing:
            found = Waiting("graph", "the agreement on a compiled graph")
        elif self._stuck > TELL:
            found = foreign_wait(frame)
        place = "" if self.idle else compiling or place_of(frame)
        stage = "" if self.idle else now(self._main) or ("compiling" if compiling is not None else "")
        return RankState(self._beat, self._late, self.failures, place, stage, self._stuck, found, groups)

    def _place(self) -> tuple[int, int] | None:
        """The position of the main thread. It stays the same within one call, and while the rank waits to agree."""
        frame = sys._current_frames().get(self._main)
        return None if self._agreeing or frame is None else (id(frame), frame.f_lasti)

    def _compiles(self) -> bool:
        """Whether the main thread compiles, which may take as long as it likes."""
        return is_compiling(self._main)

    def _tell(self, state: RankState, look: Look) -> bool:
        """Let the lines of stages say for whom this rank waits, if it or one of those is at a stage. Whether it is."""
        late = missing(self.rank, state, look)
        told = bool(late) and bool(state.stage or any(look(rank).stage for rank in late))
        if state.waits is not None and told:
            at = f" at {state.place}" if state.place else ""
            waits(f"waits in {state.waits.what}{at}", whom(late, look), self._stuck)
        else:
            waits("")
        return told

    def _look_around(self, store: Any, state: RankState, look: Look, told: bool) -> None:
        """For a rank that has not moved for a while: end its wait if that is in vain, or say for whom it waits, unless
        that is `told`."""
        said = self.news or self._at_odds(store) or self._dead(store) or self._waits_in_vain(state, look, told)
        if said:
            self._found(store, said)

    def _found(self, store: Any, said: str) -> None:
        """Tell all ranks of a failure that this one has found, and end its wait."""
        if not self.news:
            _add_failure(store, self.failures + 1, said)
        self._have_news(said)
        self._break(said)

    def _compare(self, store: Any, state: RankState) -> None:
        """Compare the eager collectives begun with those of the next rank of each group."""
        look = self._others(store, state)
        for ranks in {ranks for ranks, begun, _, _ in state.groups.values() if begun and len(ranks) > 1}:
            other = ranks[(ranks.index(self.rank) + 1) % len(ranks)]
            there = look(other)
            if not there.ended and (said := mixed_up(self.rank, state, other, there)):
                return self._found(store, said)

    def _others(self, store: Any, state: RankState) -> Look:
        """The states of other ranks, read when they are asked for."""

        @cache
        def look(rank: int) -> RankState:
            if rank == self.rank:
                return state
            return _published(self._sign(store, rank))

        return look

    def _waits_in_vain(self, state: RankState, look: Look, told: bool) -> str:
        """That this rank waits in vain; "" if it does not, or if that is not known for sure."""
        if state.waits is None:
            return ""
        vain = in_vain(self.rank, look)
        for other in state.waits.ranks:
            there = look(other)
            if other != self.rank and not there.ended and (said := mixed_up(self.rank, state, other, there)):
                return said
        states = {rank: there for rank in vain if not (there := look(rank)).ended}
        # What a rank published before this one began to wait may be out of date.
        fresh = [there.beat > self._first.setdefault(rank, there.beat) for rank, there in states.items()]
        if vain:
            sure = all(fresh) and all(there.stuck > PATIENCE for there in states.values())
            same = all(there.failures == self.failures for there in states.values())
            return vain_message(vain, look) if sure and same else ""
        if not told and state.stuck > self._warn_after and (late := missing(self.rank, state, look)):
            self._warn_after = 2 * state.stuck
            others = [look(rank) for rank in state.waits.ranks if rank < self.rank and rank not in late]
            if not any(not there.ended and there.waits == state.waits for there in others):
                log.warning("%s", late_message(self.rank, state, late, look))
        return ""

    def _break(self, said: str) -> None:
        """Break the connections of this rank, if it has any, unless it looks for failures itself."""
        if dist.is_initialized() and not self._agreeing and not self.broken:
            self.broken, self._broken_at = said, time.monotonic()
            log.error("rank %d gives up waiting and breaks its connections: %s", self.rank, said)
            break_connections()

    def _dead(self, store: Any) -> str:
        """That one of the next ranks gives no sign of life; "" if all do. A dead rank has a living one before it."""
        following = [(self.rank + k) % self.ranks for k in range(1, min(self.ranks, NEIGHBOURS + 1))]
        return next(filter(None, [self._silent(store, rank) for rank in following]), "")

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


def _published(sign: bytes) -> RankState:
    """The state of which a rank's sign of life tells; one without a beat if it has given none."""
    if sign == ENDED.encode():
        return RankState(ended=True)
    return RankState.of(json.loads(sign)) if sign else RankState()


def _ended(rank: int, sign: bytes) -> str:
    last = RankState.of(json.loads(sign)).does()
    return f"rank {rank} has ended without a word: its process is gone. The last that is known: it {last}"


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
    store = own_keys(default_store())
    if store is not _store:
        leave()
        _job, _store = (None, None) if store is None else (Job(store, dist.get_rank(), dist.get_world_size()), store)
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
    eager.raises, eager.failures = None, 0
    if gone is not None and gone.process == os.getpid():
        gone.leave(_error())


def _error() -> BaseException | None:
    """The error that ends the program, if there is one. In an interactive session an error does not end it."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def _leave_at_exit() -> None:
    """Leave the job at the end of the program, and make sure that a program that failed does end.

    A store that does not answer is waited for, and so is a group whose peer is silent, when it is torn down. The timer
    needs no interpreter. It is short where the connections are broken: nothing can come of them any more, and the ranks
    at their other ends wait for this one to be gone.
    """
    failed = _error() is not None and under_torchrun()
    if _job is not None and _job.process == os.getpid() and (_job.broken or failed):
        faulthandler.dump_traceback_later(PATIENCE if _job.broken else LAST, exit=True)
    leave()


@contextmanager
def failure_told(doing: str, *, unless: type[Exception] | tuple[Any, ...] = ()) -> Iterator[None]:
    """Context in which an error of this rank is recorded as a failure of the job, unless it is of a type in `unless`.

    An AgreementError is known to all ranks already.

    `doing` describes what the rank does there, such as "compiled".
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, (AgreementError, unless)) and (here := job()) is not None:
            with suppress(RuntimeError):  # of a store that is gone, or of ranks that do not exist: nobody is to be told
                here.failed(f"rank {here.rank} failed while it {doing}: {type(error).__name__}: {error}")
        raise


def explain(error: RuntimeError) -> None:
    """Raise the reason why a collective ended in `error`, if it is known.

    Raises:
        AgreementError: This rank waited in vain and its connections were broken for that; or another rank's were, and
            with them those to this rank.
    """
    if _job is None or isinstance(error, AgreementError):
        return
    if _job.broken:
        raise AgreementError(_job.broken) from error
    try:
        if any(words in str(error) for words in CLOSED):
            _job.find_out()
        else:
            _job.check()
    except AgreementError as why:
        raise why from error
    except RuntimeError:  # the store is gone, and with it the rank that held it
        if _job.news:
            raise AgreementError(_job.news) from error


on_error_of_collective(explain)
atexit.register(_leave_at_exit)

places.append(place_of)

__all__ = ["Job", "all_here", "explain", "failure_told", "job", "leave"]
