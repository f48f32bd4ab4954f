"""Who waits for whom: what the ranks of a job publish about themselves, and what follows from it.

A rank that computes, or that waits in a collective which all ranks of its group have entered, will go on. So will a
rank that waits only for ranks that will go on. All others wait in vain: for a rank that has ended, or for one that
waits, directly or by others, for them. A rank that takes its time never makes the wait of others vain.

What a rank waits in (`Waiting.kind`), and for whom:

    eager    an eager collective of this library: the ranks of its group that have begun fewer on it
    graph    a compiled graph: those that have begun fewer graphs on a group than this rank has
    torch    a collective of torch.distributed. It is not known whether others have passed it, so this rank waits in
             vain only if all ranks of the group do that are not in one themselves
    call     the end of what all ranks were called for, in a notebook: those that have not done it
"""

import linecache
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ..program.source_lines import is_users

_TORCH = Path(torch.__path__[0])
_DISTRIBUTED = f"{_TORCH}/distributed/"
_CALLS = f"{_TORCH}/_ops.py"
_MEETS, _WAITS = str(Path(__file__).parent.parent / "comm" / "start_collectives.py"), ("meet", "_arrive")


@dataclass
class Waiting:
    """What a rank waits in.

    Attributes:
        kind: "eager", "graph", "torch" or "call".
        what: A description for messages.
        group: Name of the group; "" for a graph, which may use several.
        ranks: Global ranks of the group.
        number: Of an eager collective, its number on the group.
    """

    kind: str
    what: str
    group: str = ""
    ranks: tuple[int, ...] = ()
    number: int = 0


Group = tuple[tuple[int, ...], int, int, list[tuple[int, int]]]
"""What a rank publishes about one of its groups, see `RankState.groups`."""


@dataclass
class RankState:
    """What a rank publishes about itself.

    Attributes:
        beat: Number of this sign of life.
        late: Seconds by which this and recent signs were late.
        failures: Number of the job's failures that the rank has raised.
        place: Line of the user's program that runs, "file.py:12"; "" if there is none.
        stage: What it is at that may take long (`dtensor.program.stages`), with seconds; "" if it is at nothing such.
        stuck: Seconds for which the rank has been at the same place.
        waits: What it waits in; None if it computes.
        groups: Name of a group -> the ranks of the group, the numbers of eager collectives and of graphs begun, and
            checksums (`dtensor.job.collective_order.Order`).
        ended: Whether the rank has ended its program; all else is then unknown.
    """

    beat: int = 0
    late: float = 0.0
    failures: int = 0
    place: str = ""
    stage: str = ""
    stuck: float = 0.0
    waits: Waiting | None = None
    groups: dict[str, Group] = field(default_factory=dict)
    ended: bool = False

    def data(self) -> dict[str, Any]:
        """The state for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> "RankState":
        """The state that `data` was made of."""
        waits = data["waits"]
        return cls(**{**data, "waits": waits and Waiting(**{**waits, "ranks": tuple(waits["ranks"])})})

    def begun(self, group: str) -> tuple[int, int]:
        """The numbers of eager collectives and of graphs begun on a group."""
        _, eager, graphs, _ = self.groups.get(group, ((), 0, 0, []))
        return eager, graphs

    def does(self) -> str:
        """What the rank does, for a message."""
        at = (f" at {self.place}" if self.place else "") + (f" [{self.stage}]" if self.stage else "")
        return f"waits in {self.waits.what}{at}" if self.waits else f"computes{at}"


Look = Callable[[int], RankState]
"""Rank -> its state, one without a beat if it has published none."""


def missing(rank: int, state: RankState, look: Look) -> list[int]:
    """The ranks that `rank` waits for; empty if it computes or all have entered what it waits in."""
    waits = state.waits
    if waits is None:
        return []

    def is_missing(other: int) -> bool:
        there = look(other)
        if waits.kind == "torch":
            inside = None if there.ended else there.waits
            return inside is None or (inside.kind, inside.group) != ("torch", waits.group)
        if there.ended:
            return True
        if waits.kind == "call":
            return there.waits is None or there.waits.kind != "call"
        if waits.kind == "eager":
            return there.begun(waits.group)[0] < waits.number
        return any(
            there.begun(name)[1] < graphs for name, (ranks, _, graphs, _) in state.groups.items() if other in ranks
        )

    ranks = waits.ranks or {r for ranks, _, graphs, _ in state.groups.values() if graphs for r in ranks}
    return [other for other in sorted(ranks) if other != rank and is_missing(other)]


def in_vain(rank: int, look: Look) -> list[int]:
    """The ranks that wait in vain or have ended, as far as `rank` waits for them; empty if `rank` will go on."""
    waits_for: dict[int, list[int]] = {}
    open_ = [rank]
    while open_:
        here = open_.pop()
        state = look(here)
        waits_for[here] = [] if state.ended else missing(here, state, look)
        open_ += [other for other in waits_for[here] if other not in waits_for]
    goes_on: set[int] = set()
    while True:
        more = {r for r in waits_for if r not in goes_on and _goes_on(look(r), waits_for[r], goes_on)}
        if not more:
            break
        goes_on |= more
    return [] if rank in goes_on else [rank, *sorted(r for r in waits_for if r not in goes_on and r != rank)]


def _goes_on(state: RankState, waits_for: Sequence[int], goes_on: set[int]) -> bool:
    if state.ended:
        return False
    some = any if state.waits is not None and state.waits.kind == "torch" and waits_for else all
    return some(r in goes_on for r in waits_for)


def mixed_up(rank: int, mine: RankState, other: int, there: RankState) -> str:
    """The error for two ranks that have begun different eager collectives under the same number; "" if they have not.

    They were found in each other's place: what the two received since is wrong.
    """
    if mine.failures != there.failures:
        return ""
    a, b = mine.waits, there.waits
    if a and b and a.kind == b.kind == "eager" and (a.group, a.number) == (b.group, b.number) and a.what != b.what:
        return _told({rank: mine, other: there}, "ranks wait for each other in different collectives")
    for name, (ranks, _, _, sums) in mine.groups.items():
        known = dict(there.groups[name][3]) if other in ranks and name in there.groups else {}
        for number, checksum in sorted(sums):
            if known.get(number, checksum) != checksum:
                why = (
                    f"ranks {min(rank, other)} and {max(rank, other)} differ in the first {number} eager collectives "
                    f"on their group {name}, so that each may have received what was meant for another operator"
                )
                return _told({rank: mine, other: there}, why)
    return ""


ADVICE = (
    "a collective has to be run by all ranks of its group, in the same order: `v = x.item()` on all ranks, and then "
    "`if rank == 0: print(v)`; the same for full_tensor, redistribute, clip_grad_norm_, "
    "save_pretrained and modules of fully_shard"
)


def vain_message(ranks: Sequence[int], look: Look) -> str:
    """The error for `ranks`, which wait in vain or have ended."""
    return _told({r: look(r) for r in ranks}, "ranks wait for each other in collectives that not all of them run")


def late_message(rank: int, state: RankState, late: Sequence[int], look: Look) -> str:
    """The warning of a rank that waits for others which take their time."""
    return f"rank {rank} {state.does()} since {state.stuck:.0f} s: {whom(late, look)}"


def whom(late: Sequence[int], look: Look) -> str:
    """The ranks that are late, and what they do."""
    more = [f"and {len(late) - SHOWN} more"] if len(late) > SHOWN else []
    return "; ".join([*[f"rank {r} {_does(look(r))}" for r in late[:SHOWN]], *more])


SHOWN = 4
"""Number of ranks that a message names."""


def _told(states: dict[int, RankState], why: str) -> str:
    lines = [f"  rank {r} {_does(state)}" for r, state in sorted(states.items())[:SHOWN]]
    more = [f"  and {len(states) - SHOWN} more"] if len(states) > SHOWN else []
    return "\n".join([f"{why}:", *lines, *more, ADVICE])


def _does(state: RankState) -> str:
    if state.ended:
        return "has left the program"
    return state.does() if state.beat else "has not made or joined a mesh"


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of a thread, from the innermost."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def place_of(frame: FrameType | None) -> str:
    """The line of the user's program that a thread runs, as "file.py:12"."""
    for each in frames(frame):
        file = each.f_code.co_filename
        if is_users(file):
            return f"{os.path.relpath(file) if file.startswith(os.getcwd()) else file}:{each.f_lineno}"
    return ""


def foreign_wait(frame: FrameType | None) -> Waiting | None:
    """What a thread waits in that is no eager collective of this library, as far as its frames tell."""
    top = next((each for each in frames(frame) if each.f_code.co_filename != _CALLS), None)
    if top is None:
        return None
    file = top.f_code.co_filename
    if file.startswith(_DISTRIBUTED):
        found = top
        for each in frames(top):
            if not each.f_code.co_filename.startswith(_DISTRIBUTED):
                break
            outer = each.f_code.co_filename == file and each.f_code.co_name != "wrapper"
            found = each if outer else found  # what torch's checkpoints call is a collective of another file
        group = top.f_locals.get("group") or top.f_locals.get("pg") or dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            return None
        ranks = tuple(dist.get_process_group_ranks(group))
        return Waiting("torch", f"torch.distributed.{found.f_code.co_name}", group.group_name, ranks)
    if "wait_tensor" in linecache.getline(file, top.f_lineno) or (file == _MEETS and top.f_code.co_name in _WAITS):
        return Waiting("graph", "a compiled graph")
    return None


__all__ = [
    "ADVICE",
    "Look",
    "RankState",
    "Waiting",
    "foreign_wait",
    "in_vain",
    "late_message",
    "missing",
    "mixed_up",
    "place_of",
    "vain_message",
    "whom",
]
