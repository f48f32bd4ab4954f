"""The sequence of collectives on a process group, of a graph and of eager code, and how ranks compare theirs.

Every rank of a group begins the same eager collectives in the same order. The program only counts them and notes their
arguments (`Order.begin`, one to two microseconds); the thread of the job (`dtensor.job.job`) turns the notes into text
and checksums and compares them with those of other ranks.
"""

import re
import threading
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

Entry = tuple[str, str]
"""A collective in the text form that is compared ("all_reduce sum of float32[4, ?]"), and its place in the source."""

WORD = re.compile(r"\w+|\?")
"""The units of an entry that are compared one by one."""

SIZE = re.compile(r"(?<=[\[ ])(\d+|\?)(?=[,\]])")


def alike(one: Sequence[Entry], other: Sequence[Entry]) -> bool:
    """Whether two sequences are the same, as far as that is known: a size "?" matches any size."""
    return len(one) == len(other) and all(_alike(a, b) for (a, _), (b, _) in zip(one, other))


def _alike(a: str, b: str) -> bool:
    words = WORD.findall(a), WORD.findall(b)
    return len(words[0]) == len(words[1]) and all(x == y or "?" in (x, y) for x, y in zip(*words))


def mark(entries: Sequence[Entry]) -> int:
    """A 32-bit checksum that is equal for matching sequences and almost certainly different for others."""
    return zlib.crc32("\n".join([SIZE.sub("?", what) for what, _ in entries]).encode())


def difference(sequences: Mapping[int, Sequence[Entry]]) -> str:
    """The error message for two ranks that run different sequences.

    Args:
        sequences: Rank -> what it runs on the group that the two share.
    """
    (a, mine), (b, theirs) = sorted(sequences.items())
    index = next(
        (i for i, (x, y) in enumerate(zip(mine, theirs)) if not _alike(x[0], y[0])), min(len(mine), len(theirs))
    )
    lines = [f"ranks {a} and {b} run compiled graphs that communicate differently on the group they share:"]
    for rank, entries in ((a, mine), (b, theirs)):
        lines.append(f"  rank {rank}, collective {index} of {len(entries)}: {said(entries, index)}")
    lines.append("make the model, its inputs and what the program depends on the same on all ranks")
    return "\n".join(lines)


def said(entries: Sequence[Entry], index: int) -> str:
    """The collective at `index` as text for a message; "none" past the end."""
    if index >= len(entries):
        return "none"
    what, where = entries[index]
    return f"{what}, from {where}" if where else what


MOST = 4096
"""Number of notes after which the program turns them into a checksum itself."""

Begun = tuple[str, torch.dtype, torch.Size, tuple[Any, ...]]
"""The operator, dtype and shape of the local tensor, and the operator's other arguments, of which the last is the
group."""


class Order:
    """The eager collectives that this rank has begun on a group.

    Attributes:
        count: Their number.
        last: The last one.
        checksums: Exponent k -> the greatest multiple of 2**k among the numbers of those collectives, and the checksum
            of all up to this one. Two ranks that have begun about as many have multiples in common.
    """

    __slots__ = ("_fresh", "_lock", "_sum", "_summed", "checksums", "count", "last")

    def __init__(self) -> None:
        self.count: int = 0
        self.last: Begun | None = None
        self.checksums: dict[int, tuple[int, int]] = {}
        self._fresh: deque[Begun] = deque()
        self._sum, self._summed, self._lock = 0, 0, threading.Lock()

    def begin(self, begun: Begun) -> int:
        """Note that this rank begins a collective, and return its number, from 1."""
        self.count += 1
        self.last = begun
        self._fresh.append(begun)
        if len(self._fresh) > MOST:
            self.sum_up()
        return self.count

    def sum_up(self) -> None:
        """Add what was begun since the last call to the checksums."""
        with self._lock:
            while self._fresh:
                self._sum = zlib.crc32(text(self._fresh.popleft()).encode(), self._sum)
                self._summed += 1
                number, k = self._summed, 0
                while not number & (1 << k) - 1:
                    self.checksums[k] = number, self._sum
                    k += 1
                    if 1 << k > number:
                        break


class Wait(NamedTuple):
    """The eager collective that this rank waits for: its group, its number there, and what it is."""

    group: str
    number: int
    begun: Begun


class Eager:
    """What the program and the thread of the job tell each other.

    Attributes:
        waits: What the program waits for; None if it waits for no eager collective.
        mark: Checksum that distinguishes the operator which starts a collective from others; 0 while none does.
        raises: Called when the next collective begins, to raise the failure of another rank; None if there is none.
        failures: Number of the job's failures that this rank has raised; part of the tags of messages, so that what a
            rank sends after a failure is not taken by one that has yet to hear of it.
    """

    waits: Wait | None = None
    mark: int = 0
    raises: Callable[[], None] | None = None
    failures: int = 0


eager: Eager = Eager()


@lru_cache(1024)
def _mark_of(op: str, dtype: torch.dtype, argument: str) -> int:
    return zlib.crc32(f"{op} {dtype} {argument}".encode())


def mark_of(op: str, dtype: torch.dtype, argument: Any) -> int:
    """The mark of an operator; `argument` is its first one after the tensor, which names a reduction if it is text."""
    return _mark_of(op, dtype, argument if isinstance(argument, str) else "")


def text(begun: Begun) -> str:
    """A collective as ranks compare it and as messages name it, such as "all_reduce(sum) of float32[4, 8]"."""
    op, dtype, shape, args = begun
    return _text(op, dtype, shape, ", ".join(map(str, args[:-1])))


@lru_cache(1024)
def _text(op: str, dtype: torch.dtype, shape: torch.Size, args: str) -> str:
    """Lengths that differ between ranks with uneven shards are left out."""
    sizes = list(map(str, shape)) if op in ("all_reduce", "reduce_scatter", "collective_permute") else ["…"]
    return f"{op}({args}) of {str(dtype).removeprefix('torch.')}[{', '.join(sizes)}]"


__all__ = [
    "Begun",
    "Eager",
    "Entry",
    "Order",
    "Wait",
    "alike",
    "difference",
    "eager",
    "mark",
    "mark_of",
    "said",
    "text",
]
