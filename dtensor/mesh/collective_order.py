"""What ranks compare of the graphs they run: the collectives of one on one group, in order."""

import re
import zlib
from collections.abc import Mapping, Sequence

Entry = tuple[str, str]
"""A collective as it is compared ("all_reduce sum of float32[4, ?]"), and where it was asked for."""

WORD = re.compile(r"\w+|\?")
"""What a comparison compares of an entry, one by one."""

SIZE = re.compile(r"(?<=[\[ ])(\d+|\?)(?=[,\]])")


def alike(one: Sequence[Entry], other: Sequence[Entry]) -> bool:
    """Whether two sequences communicate alike, as far as can be known: a size "?" may be any."""
    return len(one) == len(other) and all(_alike(a, b) for (a, _), (b, _) in zip(one, other))


def _alike(a: str, b: str) -> bool:
    words = WORD.findall(a), WORD.findall(b)
    return len(words[0]) == len(words[1]) and all(x == y or "?" in (x, y) for x, y in zip(*words))


def mark(entries: Sequence[Entry]) -> int:
    """A number of 32 bits that sequences have in common if they are alike, and others hardly have."""
    return zlib.crc32("\n".join([SIZE.sub("?", what) for what, _ in entries]).encode())


def difference(sequences: Mapping[int, Sequence[Entry]]) -> str:
    """The message for two ranks that run different sequences: rank -> what it runs on the group they share."""
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
    """The collective at `index` in words, "none" if there is no such one."""
    if index >= len(entries):
        return "none"
    what, where = entries[index]
    return f"{what}, from {where}" if where else what


__all__ = ["Entry", "alike", "difference", "mark", "said"]
