"""Process groups looked up by name, and the record of what this rank has run on each: graphs and eager collectives."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakKeyDictionary, ref

import torch

from ..torch_private.core import is_gloo, is_registered, register_alias, resolve_process_group
from .collective_order import Begun, Entry, Order, Wait

Rows = tuple[tuple[int, ...], ...]
"""The ranks of several groups."""


@dataclass
class Calls:
    """The compiled graphs and eager collectives that this rank has run on a process group.

    Attributes:
        name: Name of the group, the same on all its ranks. (Ranks do not identify it: other groups can have the same.)
        ranks: Global ranks of the group.
        over_gloo: Whether the group sends CPU tensors over gloo. A fake group that plays gloo sends nothing.
        count: Number of graphs run.
        last: The collectives of the last graph on the group.
        mark: Checksum that distinguishes the last graph from others; part of the tags of its messages
            (`dtensor.comm.start_collectives`).
        looked: The `count` at which the last replication check ran (`dtensor.comm.replication_check`).
        taken: Number of tensors that were assumed to be replicated in eager mode.
        eager: The eager collectives that this rank has begun on the group.
    """

    name: str
    ranks: tuple[int, ...]
    over_gloo: bool
    count: int = 0
    last: Sequence[Entry] = ()
    mark: int = 0
    looked: int = 0
    taken: int = 0
    eager: Order = field(default_factory=Order)

    def restart(self) -> None:
        """Count from zero again: after a failure the counts differ between ranks."""
        self.count, self.last, self.looked, self.taken, self.eager = 0, (), 0, 0, Order()


_calls: WeakKeyDictionary[torch.distributed.ProcessGroup, Calls] = WeakKeyDictionary()


def calls_on(group: torch.distributed.ProcessGroup) -> Calls:
    """The record of a process group; made on first use."""
    found = _calls.get(group)
    if found is None:
        ranks = tuple(torch.distributed.get_process_group_ranks(group))
        found = _calls[group] = Calls(
            group.group_name, ranks, is_gloo(group, "cpu") and torch.distributed.get_backend(group) != "fake"
        )
    return found


def calls_of(name: str) -> Calls:
    """The record of the named process group; made on first use."""
    group = resolve_process_group(name)
    found = vars(_calls)["data"].get(ref(group))  # as a weak dictionary looks it up, without its frame
    return calls_on(group) if found is None else found


def begin(begun: Begun) -> Wait:
    """Note that this rank begins an eager collective, and return what it may wait for."""
    calls = calls_of(begun[3][-1])
    return Wait(calls.name, calls.eager.begin(begun), begun)


def all_calls() -> list[Calls]:
    """The records of all registered groups. Destroyed groups may still be alive under a name that is in use again."""
    return [calls for group, calls in list(_calls.items()) if is_registered(group)]


_shared: WeakKeyDictionary[torch.distributed.ProcessGroup, str] = WeakKeyDictionary()
_given: WeakKeyDictionary[torch.distributed.ProcessGroup, dict[str, Rows]] = WeakKeyDictionary()
"""Default group -> names that were given since it was made, and for what. Graphs and caches may refer to a name longer
than its group lives, so that it never stands for other ranks."""


def shared_name(name: str, wanted: str, rows: Rows) -> str:
    """A name for a process group that is the same on all ranks of all groups of its kind: `wanted`, or `wanted.2`, …

    torch numbers the groups that this rank is in, so that the two groups along an axis of a 2 x 2 mesh have different
    numbers, and graphs that are the same otherwise differ in these. A group keeps the name that it is given first.

    Args:
        name: torch's name of the group.
        wanted: what the group is, such as `mesh.tp`.
        rows: the ranks of all groups of its kind.
    """
    group, world = resolve_process_group(name), torch.distributed.group.WORLD
    assert world is not None, "there are groups only after init_process_group"
    given = _given.setdefault(world, {})
    if (known := _shared.get(group)) is not None and register_alias(known, group):
        return known
    for k in count(1):
        label = wanted if k == 1 else f"{wanted}.{k}"
        if given.get(label, rows) == rows and register_alias(label, group):
            given[label] = rows
            _shared[group] = label
            return label
    raise AssertionError("unreachable")


def canonical(name: str) -> str:
    """The shared name of a process group that torch knows as `name`; `name` itself if it has none."""
    try:
        return _shared.get(resolve_process_group(name), name)
    except (RuntimeError, ValueError, KeyError):  # torch raises these for an unknown name
        return name


def is_alive(name: str) -> bool:
    """Whether there is a process group of that name, which was not destroyed."""
    try:
        return is_registered(resolve_process_group(name))
    except (RuntimeError, ValueError, KeyError):  # torch raises these for an unknown name
        return False


def group_size(group: str) -> int:
    """Number of ranks of the named process group."""
    return resolve_process_group(group).size()


def group_rank(group: str) -> int:
    """This process's rank within the named process group, or that of the rank it plays."""
    played = _played.get()
    return resolve_process_group(group).rank() if played is None else played(group)


_played: ContextVar[Callable[[str], int] | None] = ContextVar("played", default=None)


@contextmanager
def playing(rank_in: Callable[[str], int]) -> Iterator[None]:
    """Context in which operators that look up their rank run for another one, which `rank_in` knows in each group."""
    token = _played.set(rank_in)
    try:
        yield
    finally:
        _played.reset(token)


def group_ranks(group: str) -> tuple[int, ...]:
    """Global ranks of the named process group, in group order."""
    return tuple(torch.distributed.get_process_group_ranks(resolve_process_group(group)))


__all__ = [
    "Calls",
    "all_calls",
    "begin",
    "calls_of",
    "calls_on",
    "canonical",
    "group_rank",
    "group_ranks",
    "group_size",
    "is_alive",
    "playing",
    "shared_name",
]
