"""Process groups by name, and which compiled graph this rank ran last on each."""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from ..torch_private.core import is_gloo, is_registered, resolve_process_group
from .collective_order import Entry


@dataclass
class Calls:
    """The compiled graphs that this rank has run on a group.

    Attributes:
        name: the group's, which all its ranks know it by: other groups may have the same ranks.
        ranks: the global ranks of the group.
        over_gloo: whether it carries CPU tensors over gloo.
        count: how many graphs.
        last: the collectives of the last one on the group.
        mark: a number that tells the last one from others; part of the tags of its messages (`start_collectives`).
        looked: at which count what is taken as the same on all ranks was last looked at (`replication_check`).
        taken: how many tensors styles have taken so in eager mode.
    """

    name: str
    ranks: tuple[int, ...]
    over_gloo: bool
    count: int = 0
    last: Sequence[Entry] = ()
    mark: int = 0
    looked: int = 0
    taken: int = 0


_calls: WeakKeyDictionary[torch.distributed.ProcessGroup, Calls] = WeakKeyDictionary()


def calls_on(group: torch.distributed.ProcessGroup) -> Calls:
    """What this rank has run on a process group."""
    found = _calls.get(group)
    if found is None:
        ranks = tuple(torch.distributed.get_process_group_ranks(group))
        found = _calls[group] = Calls(group.group_name, ranks, is_gloo(group, "cpu"))
    return found


def all_calls() -> list[Calls]:
    """What this rank has run on each of its groups; those that were destroyed may live on under a name of today's."""
    return [calls for group, calls in list(_calls.items()) if is_registered(group)]


def group_size(group: str) -> int:
    """Number of ranks of the named process group."""
    return resolve_process_group(group).size()


def group_rank(group: str) -> int:
    """This process's rank within the named process group."""
    return resolve_process_group(group).rank()


def group_ranks(group: str) -> tuple[int, ...]:
    """Global ranks of the named process group, in group order."""
    return tuple(torch.distributed.get_process_group_ranks(resolve_process_group(group)))


__all__ = ["Calls", "all_calls", "calls_on", "group_rank", "group_ranks", "group_size"]
