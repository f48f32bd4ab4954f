"""Agreement: ranks that share a process group run the same collectives on it, or all ranks of the job raise an error.

A compiled graph begins with `dtensor::agree`, whose text lists the graph's collectives group by group. When the graph
first runs in a process, each rank publishes what it is about to run on each group, through the store that the process
groups were made with. It waits until all ranks of a group have published the same, and until they have confirmed this
for all of their groups. The rule is:

    a graph may run on a rank if every other rank of its groups has a graph with the same collectives

So a rank may recompile where others do not. If two ranks run different graphs, each finds a sequence in the other's
list that it never had itself. Neither can go on, and both raise, and so does every other rank of the job
(`dtensor.job.job`). The same happens for a rank that failed while it compiled, left, or died. A rank that merely does
not come is waited for as long as a collective would wait, for the default group's timeout.

Later runs look the text up and record on the group which graph runs. Ranks that call different graphs, all of them
known to each, are then found waiting for each other (`dtensor.comm.start_collectives`, `dtensor.job.job`).

Symbolic sizes match any size.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..job.collective_order import Entry, alike, difference, mark, said
from ..job.groups import Calls, calls_on
from ..job.job import Job, job
from ..mesh.operator_library import library
from ..program.environment import switched
from ..torch_private.core import default_group_timeout, profiler_enabled, resolve_process_group
from .profiled import mark_graph
from .replication_check import EVERY, Given, Look
from .start_collectives import meet

PAUSES = (0.001, 0.05)
"""Seconds between polls of the store: the first pause, and the longest."""

LOOK = 1.0
"""Seconds between checks whether the missing ranks are alive."""


@dataclass
class _Told:
    """A sequence that a rank published, and the number of failures that the job had had by then."""

    failures: int
    entries: Sequence[Entry]


@dataclass
class _Ledger:
    """What is known about one group.

    Attributes:
        mine: The sequences that this rank published.
        agreed: Those of them that all ranks have, without places in the source.
        theirs: Rank -> the sequences that it published, as far as they have been read.
    """

    mine: list[_Told] = field(default_factory=list)
    agreed: list[list[str]] = field(default_factory=list)
    theirs: dict[int, list[_Told]] = field(default_factory=dict)


@dataclass
class _Run:
    """What a graph runs on one group.

    Attributes:
        group: Name of the group. (Not the group itself, which must end with the program's last reference to it.)
        calls: The record of the group.
        entries: The collectives, in order.
        mark: Their checksum.
        meets: Whether `meet` must come first, because the first collective has no tags and would match that of any
            other graph.
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
    """What has been agreed in one job. It starts empty again after the process groups have been remade.

    Attributes:
        job: The job.
        agreed: Text of a graph -> what it runs.
        ledgers: Ranks of a group -> what is known about it.
        looked: The `said` texts of the graphs whose inputs ranks have compared at least once.
    """

    job: Job | None = None
    agreed: dict[str, list[_Run]] = field(default_factory=dict)
    ledgers: dict[tuple[int, ...], _Ledger] = field(default_factory=dict)
    looked: set[str] = field(default_factory=set)


_state = _State()


def dumps(sequences: dict[str, list[Entry]], untagged: Sequence[str] = ()) -> str:
    """The text that `dtensor::agree` takes.

    Args:
        sequences: Group name -> its collectives, in order.
        untagged: The groups whose first collective is not one of `starts`, so that its messages have no tags to
            distinguish graphs.
    """
    return json.dumps({name: [name in untagged, entries] for name, entries in sequences.items()})


def agree(token: torch.Tensor, text: str, alike: Sequence[torch.Tensor], said: str) -> None:
    """Wait until all ranks of the groups named in `text` have agreed to run the same on them; once per text.

    Does nothing if the environment has DTENSOR_AGREEMENT=0.

    Args:
        token: A tensor of one element, declared as written to. That keeps the operator in the compiled code, and
            operators that must run later can be made to read the tensor. (If it were a result that nothing reads,
            Inductor would drop the dependences of later operators on it.)
        text: What `dumps` returned.
        alike: Inputs of the graph that are assumed to be the same on all ranks. Ranks compare their values on the first
            run and periodically after that.
        said: JSON: the direction of the graph; for each of `alike`, the description for a message and the names of the
            groups; and the `profiled.packed` names of the graph and its collectives.

    Raises:
        AgreementError: Another rank runs something else, has failed, is gone, or does not come within the default
            group's timeout.
    """
    global _state
    if profiler_enabled():
        mark_graph(said)
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
    """The comparisons of inputs that are due: on a graph's first run, and then once in `EVERY` calls on a group."""
    first = said not in _state.looked
    due = [run for run in runs if first or run.calls.count // EVERY != run.calls.looked // EVERY]
    if not due or (alike[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return []
    _state.looked.add(said)
    found, told = [], json.loads(said)[1]
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
    """Agree on the collectives of a graph that this rank has not run before."""
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
        """Wait until all ranks have published a matching sequence.

        Raises:
            AgreementError: A rank published a sequence that this rank never had: the two would wait for each other.
        """
        self._wait(self.arrived, self._alike)

    def confirm(self) -> None:
        self.store.set(self._confirmed(self.job.rank, self.index), "")
        self.store.add(f"{self.arrived}/confirmed", 1)

    def hear_all_confirm(self) -> None:
        """Wait until the others have confirmed that their other groups agree, too; otherwise all of them raise."""
        self._wait(f"{self.arrived}/confirmed", self._confirmed_alike)
        self.ledger.agreed.append(self.compared)

    def _confirmed(self, rank: int, index: int) -> str:
        return f"{self.prefix}/{rank}/{index}/confirmed"

    def _wait(self, counter: str, has_come: Any) -> None:
        """Return when `counter` has counted all ranks, or `has_come` is true for all others."""
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
                late = f"ranks {missing} did not reach a matching graph within {timeout.total_seconds():.0f} s"
                raise self.job.failing(f"{self._waiting()}; {late}. They hang or took another path in the program")
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
        """The index of a matching sequence that `rank` published and did not raise for; None if there is none."""
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
