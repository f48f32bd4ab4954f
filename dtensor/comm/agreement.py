"""Agreement: ranks that share a process group run the same collectives on it, or all ranks of the job raise.

A compiled graph begins with `dtensor::agree`, whose text lists the graph's collectives group by group. On its first
run in a process each rank tells the others of each group what it is about to run there, by the store that the process
groups were made with, and waits until all have told the same, and until they have found so of all their groups.

    a graph may run on a rank when every other rank of its groups has one that communicates alike

So a rank may compile anew where others do not. Two ranks that run different graphs find a sequence in the other's list
that they never had themselves; neither can be let go any more, and both raise, and every other rank of the job
(`job`). So it is with a rank that failed while it compiled, left, or died. One that just does not come is waited for as
long as a collective would wait, the default group's time-out.

Later runs look the text up, and note on the group which graph it is; ranks that call different ones of those they all
know are then found waiting for each other (`start_collectives`, `job`).

Sizes that are symbols match any size.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..mesh.collective_order import Entry, alike, difference, mark, said
from ..mesh.environment import switched
from ..mesh.groups import Calls, calls_on
from ..mesh.job import Job, job
from ..mesh.operator_library import library
from ..torch_private.core import default_group_timeout, resolve_process_group
from .replication_check import EVERY, Given, Look
from .start_collectives import meet

PAUSES = (0.001, 0.05)
"""Seconds between two looks at the store: the first, and the longest."""

LOOK = 1.0
"""Seconds between two looks at whether the ranks that are missing are alive."""


@dataclass
class _Told:
    """A sequence that a rank told: when the job had had so many failures, and what."""

    failures: int
    entries: Sequence[Entry]


@dataclass
class _Ledger:
    """What is known of one group.

    Attributes:
        mine: the sequences that this rank told.
        agreed: those of them that all ranks have.
        theirs: rank -> the sequences it told, as far as they were read.
    """

    mine: list[_Told] = field(default_factory=list)
    agreed: list[list[str]] = field(default_factory=list)
    theirs: dict[int, list[_Told]] = field(default_factory=dict)


@dataclass
class _Run:
    """What a graph runs on one group.

    Attributes:
        group: its name; a process group is to end with the program's last reference to it.
        meets: whether its first collective is one that would be taken for any other rank's.
    """

    group: str
    calls: Calls
    entries: list[Entry]
    mark: int
    meets: bool

    def begin(self) -> None:
        self.calls.count += 1
        self.calls.last = self.entries

    def go_on(self) -> None:
        self.calls.mark = self.mark
        if self.meets:
            meet(resolve_process_group(self.group))


@dataclass
class _State:
    """What was agreed in one job; after the process groups were made anew another one starts from nothing.

    Attributes:
        agreed: text of a graph -> what it runs.
        ledgers: by the ranks of a group.
        looked: what of which graphs' inputs is said, that ranks have compared.
    """

    job: Job | None = None
    agreed: dict[str, list[_Run]] = field(default_factory=dict)
    ledgers: dict[tuple[int, ...], _Ledger] = field(default_factory=dict)
    looked: set[str] = field(default_factory=set)


_state = _State()


def dumps(sequences: dict[str, list[Entry]], untagged: Sequence[str] = ()) -> str:
    """The text that `dtensor::agree` takes, from group name -> its collectives in order.

    Args:
        untagged: the groups whose first collective is not one of `starts`, whose messages tell graphs apart.
    """
    return json.dumps({name: [name in untagged, entries] for name, entries in sequences.items()})


def agree(token: torch.Tensor, text: str, alike: Sequence[torch.Tensor], said: str) -> None:
    """Wait until all ranks of the groups named in `text` have told that they run the same on them; once per text.

    `alike` are inputs of the graph that a plan takes as the same on all ranks, and `said` for each of them what a user
    knows it by, and the group: the first time and every so often ranks compare their values.

    Takes a tensor of one element, and says that it writes to it: that keeps it in the compiled code, and what must run
    later can be made to read the tensor. (Of a result that nothing reads, Inductor forgets who was to come after it.)

    Does nothing where the environment has DTENSOR_AGREEMENT=0.

    Raises:
        AgreementError: another rank runs something else, failed, is gone, or does not come within the default group's
            time-out.
    """
    global _state
    here = job()
    if here is None or not switched("agreement", True):
        return
    if here is not _state.job:
        _state = _State(here)
    if here.news:
        here.check()
    runs = _state.agreed.get(text)
    known = runs is not None
    if runs is None:
        runs = [_run(name, untagged, entries) for name, (untagged, entries) in json.loads(text).items()]
    for run in runs:
        run.begin()
    looks = _looks(here, runs, alike, said) if alike else []
    for look in looks:
        look.tell()
    if not known:
        _first(here, [run for run in runs if len(run.calls.ranks) > 1])
        _state.agreed[text] = runs
    for look in looks:
        look.hear()
    for run in runs:
        run.go_on()


def _looks(here: Job, runs: Sequence[_Run], alike: Sequence[torch.Tensor], said: str) -> list[Look]:
    """The looks at inputs that are due: for a graph that has had none, and on each group one in so many calls."""
    first = said not in _state.looked
    due = [run for run in runs if first or run.calls.count // EVERY != run.calls.looked // EVERY]
    if not due or (alike[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return []
    _state.looked.add(said)
    found, (_, told) = [], json.loads(said)
    for run in due:
        run.calls.looked = run.calls.count
        given = [Given(what, x) for (what, groups), x in zip(told, alike, strict=True) if run.group in groups]
        if given:
            found.append(Look(here, run.calls, str(run.calls.count), given))
    return found


def _run(name: str, untagged: bool, entries: list[list[str]]) -> _Run:
    calls = calls_on(resolve_process_group(name))
    sequence = [(what, where) for what, where in entries]
    return _Run(name, calls, sequence, mark(sequence), untagged and calls.over_gloo and len(calls.ranks) > 1)


def _first(here: Job, runs: list[_Run]) -> None:
    """Agree on what a graph runs that this rank has not run before."""
    talks = [_Talk(here, run.calls.ranks, run.entries) for run in runs]
    talks = [talk for talk in talks if not talk.is_agreed]
    with here.waiting():
        for talk in talks:
            talk.tell()
        for talk in talks:
            talk.hear()
        for talk in talks:
            talk.confirm()
        for talk in talks:
            talk.hear_all_confirm()


class _Talk:
    """The agreement of one group on one sequence."""

    def __init__(self, here: Job, ranks: tuple[int, ...], entries: list[Entry]) -> None:
        self.job, self.store, self.ranks, self.entries = here, here.store, ranks, entries
        self.compared = [what for what, _ in entries]
        self.ledger = _state.ledgers.setdefault(ranks, _Ledger())
        self.prefix = f"dtensor/agreement/{','.join(map(str, ranks))}"
        digest = hashlib.sha256(json.dumps(self.compared).encode()).hexdigest()
        self.arrived = f"{self.prefix}/{here.failures}/{digest}"
        self.others = [r for r in ranks if r != here.rank]

    @property
    def is_agreed(self) -> bool:
        return self.compared in self.ledger.agreed

    def tell(self) -> None:
        mine = self.ledger.mine
        self.index = len(mine)
        mine.append(_Told(self.job.failures, self.entries))
        self.store.set(f"{self.prefix}/{self.job.rank}/{self.index}", json.dumps([self.job.failures, self.entries]))
        self.store.add(self.arrived, 1)

    def hear(self) -> None:
        """Wait until all ranks have told a sequence like this one.

        Raises:
            AgreementError: one told a sequence that this rank never had: it will wait for this rank, and this for it.
        """
        self._wait(self.arrived, self._alike)

    def confirm(self) -> None:
        self.store.set(self._confirmed(self.job.rank, self.index), "")
        self.store.add(f"{self.arrived}/confirmed", 1)

    def hear_all_confirm(self) -> None:
        """Wait until the others have heard alike in their other groups, too: else they raise, and so does this rank."""
        self._wait(f"{self.arrived}/confirmed", self._confirmed_alike)
        self.ledger.agreed.append(self.compared)

    def _confirmed(self, rank: int, index: int) -> str:
        return f"{self.prefix}/{rank}/{index}/confirmed"

    def _wait(self, counter: str, has_come: Any) -> None:
        """Return when `counter` has counted all ranks, or `has_come` is true of all others."""
        timeout = default_group_timeout()
        pause, look = PAUSES[0], time.monotonic() + LOOK
        deadline = time.monotonic() + timeout.total_seconds()
        while self.store.add(counter, 0) < len(self.ranks):
            self.job.check()
            missing = [r for r in self.others if not has_come(r)]
            if not missing:
                return
            if time.monotonic() > look:
                look = time.monotonic() + LOOK
                for why in filter(None, map(self.job.absent, missing)):
                    raise self.job.failing(f"{self._waiting()}; {why}")
            if time.monotonic() > deadline:
                late = f"within {timeout.total_seconds():.0f} s ranks {missing} came to none like it"
                raise self.job.failing(f"{self._waiting()}; {late}. They hang, or have left the program's common path")
            time.sleep(pause)
            pause = min(2 * pause, PAUSES[1])

    def _alike(self, rank: int) -> bool:
        found = self._told_alike(rank)
        if found is None:
            for told in self.ledger.theirs[rank]:
                never_had = not any(alike(mine.entries, told.entries) for mine in self.ledger.mine)
                if told.failures == self.job.failures and never_had:
                    raise self.job.failing(difference({self.job.rank: self.entries, rank: told.entries}))
        return found is not None

    def _confirmed_alike(self, rank: int) -> bool:
        found = self._told_alike(rank)
        return found is not None and self.store.check([self._confirmed(rank, found)])

    def _told_alike(self, rank: int) -> int | None:
        """The index of a sequence like this one that `rank` told, and did not raise about."""
        known = self.ledger.theirs.setdefault(rank, [])
        while self.store.check([key := f"{self.prefix}/{rank}/{len(known)}"]):
            failures, entries = json.loads(self.store.get(key))
            known.append(_Told(failures, [(what, where) for what, where in entries]))
        for index, told in enumerate(known):
            if alike(self.entries, told.entries) and (
                told.failures == self.job.failures or self.store.check([self._confirmed(rank, index)])
            ):
                return index
        return None

    def _waiting(self) -> str:
        return (
            f"rank {self.job.rank} is about to run a compiled graph with {len(self.entries)} collectives on ranks "
            f"{list(self.ranks)}, the first {said(self.entries, 0)}"
        )


library.define("agree(Tensor(a!) token, str text, Tensor[] alike, str said) -> ()")
library.impl("agree", agree, "CompositeExplicitAutograd")
torch.library.register_fake("dtensor::agree", lambda token, text, alike, said: None, lib=library)

__all__ = ["agree", "dumps"]
