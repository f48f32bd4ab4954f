"""The sequence of collectives that a graph runs on a process group, and how ranks compare their sequences."""

import re
import zlib
from collections.abc import Mapping, Sequence

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


__all__ = ["Entry", "alike", "difference", "mark", "said"]
