"""Agreement: ranks that share a process group run the same collectives on it, or all of them raise.

A compiled graph begins with `dtensor::agree`, whose text lists the graph's collectives group by group. On its first
run in a process each rank tells the others of each group what it is about to run there, by the store that the process
groups were made with, and waits until all have told the same; later runs look the text up in a set.

    a graph may run on a rank when every other rank of its groups has one that communicates alike

So a rank may compile anew where others do not, as with uneven shards. Two ranks that run different graphs find a
sequence in the other's list that they never had themselves; neither can be let go any more, and both raise. A rank
that does not come is waited for as long as a collective would wait, the default group's time-out.

Sizes that are symbols match any size.
"""

import hashlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from ._torch import default_group_timeout, default_store
from .collectives import group_ranks, library
from .environment import switched
from .errors import AgreementError

ENTRY = tuple[str, str]
"""A collective as it is compared ("all_reduce sum float32[4, ?]"), and where it was asked for."""

WORD = r"\w+|\?"
"""What a comparison compares of an entry, one by one."""

PAUSES = (0.001, 0.05)
"""Seconds between two looks at the store: the first, and the longest."""


@dataclass
class _Ledger:
    """What is known of one group.

    Attributes:
        told: how many sequences this rank told.
        mine: those of them that it did not raise about.
        agreed: those of them that all ranks have.
        theirs: rank -> the sequences it told, as far as they were read; None for one that was raised about.
    """

    told: int = 0
    mine: list[list[ENTRY]] = field(default_factory=list)
    agreed: list[list[ENTRY]] = field(default_factory=list)
    theirs: dict[int, list[list[ENTRY] | None]] = field(default_factory=dict)


@dataclass
class _State:
    """What was agreed by one store; another store, after the process groups were made anew, starts from nothing."""

    store: object = None
    agreed: set[str] = field(default_factory=set)
    ledgers: dict[tuple[int, ...], _Ledger] = field(default_factory=dict)


_state = _State()


def dumps(sequences: dict[str, list[ENTRY]]) -> str:
    """The text that `dtensor::agree` takes, from group name -> its collectives in order."""
    return json.dumps(sequences)


def agree(token: torch.Tensor, text: str) -> torch.Tensor:
    """Wait until all ranks of the groups named in `text` have told that they run the same on them; once per text.

    Takes and gives a tensor of one element: that the operator says it writes to the one keeps it in the compiled code,
    and what must run later can be made to depend on the other.

    Does nothing where the environment has DTENSOR_AGREEMENT=0.

    Raises:
        AgreementError: another rank runs something else, or does not come within the default group's time-out.
    """
    global _state
    done, store = torch.empty(1), default_store()
    if store is None or not switched("agreement", True):
        return done
    if store is not _state.store:
        _state = _State(store)
    if text not in _state.agreed:
        for name, entries in json.loads(text).items():
            _agree_on(store, group_ranks(name), [(what, where) for what, where in entries])
        _state.agreed.add(text)
    return done


def _agree_on(store, ranks: tuple[int, ...], entries: list[ENTRY]) -> None:
    ledger = _state.ledgers.setdefault(ranks, _Ledger())
    compared = [what for what, _ in entries]
    if len(ranks) == 1 or any(compared == [what for what, _ in old] for old in ledger.agreed):
        return
    me, prefix = dist.get_rank(), f"dtensor/agreement/{','.join(map(str, ranks))}"
    store.set(f"{prefix}/{me}/{ledger.told}", json.dumps(entries))
    ledger.told += 1
    ledger.mine.append(entries)
    arrived = f"{prefix}/{hashlib.sha256(json.dumps(compared).encode()).hexdigest()}"
    store.add(arrived, 1)
    try:
        _wait(store, ranks, entries, ledger, prefix, arrived)
    except AgreementError:
        store.add(arrived, -1)
        ledger.mine.remove(entries)
        raise
    ledger.agreed.append(entries)


def _wait(store, ranks: tuple[int, ...], entries: list[ENTRY], ledger: _Ledger, prefix: str, arrived: str) -> None:
    """Return when all ranks have told a sequence like `entries`; `arrived` counts those who told this very one."""
    me, timeout = dist.get_rank(), default_group_timeout()
    deadline, pause = time.monotonic() + timeout.total_seconds(), PAUSES[0]
    while store.add(arrived, 0) < len(ranks):
        missing = [r for r in ranks if r != me and not _has_alike(store, prefix, ledger, r, entries)]
        if not missing:
            return
        if time.monotonic() > deadline:
            raise AgreementError(_late(me, missing, ranks, entries, timeout))
        time.sleep(pause)
        pause = min(2 * pause, PAUSES[1])


def _has_alike(store, prefix: str, ledger: _Ledger, rank: int, entries: list[ENTRY]) -> bool:
    """Whether `rank` has told a sequence like `entries`.

    Raises:
        AgreementError: it told one that this rank never had: it will wait for this rank, and this rank for it.
    """
    known = ledger.theirs.setdefault(rank, [])
    while store.check([key := f"{prefix}/{rank}/{len(known)}"]):
        known.append([(what, where) for what, where in json.loads(store.get(key))])
    if any(other is not None and alike(entries, other) for other in known):
        return True
    for index, other in enumerate(known):
        if other is not None and not any(alike(mine, other) for mine in ledger.mine):
            known[index] = None
            raise AgreementError(difference({dist.get_rank(): entries, rank: other}))
    return False


def alike(one: Sequence[ENTRY], other: Sequence[ENTRY]) -> bool:
    """Whether two sequences communicate alike, as far as can be known: a size "?" may be any."""
    return len(one) == len(other) and all(_alike(a, b) for (a, _), (b, _) in zip(one, other))


def _alike(a: str, b: str) -> bool:
    words = re.findall(WORD, a), re.findall(WORD, b)
    return len(words[0]) == len(words[1]) and all(x == y or "?" in (x, y) for x, y in zip(*words))


def difference(sequences: dict[int, Sequence[ENTRY]]) -> str:
    """The message for two ranks that run different sequences: rank -> what it runs on the group they share."""
    (a, mine), (b, theirs) = sorted(sequences.items())
    index = next(
        (i for i, (x, y) in enumerate(zip(mine, theirs)) if not _alike(x[0], y[0])), min(len(mine), len(theirs))
    )
    lines = [f"ranks {a} and {b} run compiled graphs that communicate differently on the group they share:"]
    for rank, entries in ((a, mine), (b, theirs)):
        lines.append(f"  rank {rank}, collective {index} of {len(entries)}: {_said(entries, index)}")
    lines.append("make the model, its inputs and what the program depends on the same on all ranks")
    return "\n".join(lines)


def _said(entries: Sequence[ENTRY], index: int) -> str:
    if index >= len(entries):
        return "none"
    what, where = entries[index]
    return f"{what}, from {where}" if where else what


def _late(me: int, missing: list[int], ranks: Sequence[int], entries: Sequence[ENTRY], timeout: timedelta) -> str:
    return (
        f"rank {me} is about to run a compiled graph with {len(entries)} collectives on ranks {list(ranks)}, the first "
        f"{_said(entries, 0)}; within {timeout.total_seconds():.0f} s ranks {missing} came to none like it. They hang, "
        "or have left the program's common path; all ranks of a group have to run the same compiled graphs"
    )


library.define("agree(Tensor(a!) token, str text) -> Tensor")
library.impl("agree", agree, "CompositeExplicitAutograd")
torch.library.register_fake("dtensor::agree", lambda token, text: torch.empty(1), lib=library)

__all__ = ["agree", "alike", "difference", "dumps"]
