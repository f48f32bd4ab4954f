"""The lock of a program's communication, with which `dtensor check` compares a dump.

The lock is a text file for review by people. It has one line for each kind of collective, with how often the program
sends it:

    2 x forward all_reduce sum over tp, float32 [[8, 64, 64]], 16,384 bytes, implicit P->R in layers.0.attention.wo

It holds no line numbers and no estimates, so that code that moves and new calibrations do not break it. Frames are not
distinguished, nor are ranks: all ranks of a program run the same sequence, and the lock holds that of the first.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtensor.errors import ArgumentError

from .reading import communicating, read

HEAD = "# dtensor lock 1: what a program communicates; `dtensor check --write` makes it anew"
LINE = re.compile(r"(\d+) x (.+)")


@dataclass(frozen=True)
class Checked:
    """The differences between a dump and a lock.

    Attributes:
        added: lines that are new or occur more often than in the lock, with their places in the code.
        gone: lines that occur less often than in the lock.
    """

    added: tuple[str, ...]
    gone: tuple[str, ...]


def line(c: dict[str, Any]) -> str:
    """Return the line of the lock for a collective of a manifest."""
    reduced = f" {c['reduce_op']}" if c["reduce_op"] else ""
    move = f" {c['move']}" if c["move"] else ""
    module = f" in {c['module']}" if c["module"] else ""
    return (
        f"{c['direction']} {c['op']}{reduced} over {c['axis']}, {c['dtype']} {c['shapes']}, {c['bytes']:,} bytes, "
        f"{c['how']}{move}{module}"
    )


def locked(root: Path) -> str:
    """Return the lock for a dump.

    Raises:
        ValueError: there is no dump.
    """
    counts = Counter([line(c) for c in _first(root)])
    return "\n".join([HEAD, *[f"{n} x {text}" for text, n in counts.items()]]) + "\n"


def check(lock: Path, root: Path) -> Checked:
    """Compare a dump with a lock.

    Raises:
        ValueError: there is no dump, or the file is not a lock.
        OSError: the lock cannot be read.
    """
    known, found = _read(lock), _first(root)
    now = Counter([line(c) for c in found])
    added = [
        f"{text} ({n} instead of {known[text]}){_places(text, found)}" for text, n in now.items() if n > known[text]
    ]
    gone = [f"{text} ({now[text]} instead of {n})" for text, n in known.items() if n > now[text]]
    return Checked(tuple(added), tuple(gone))


def _places(text: str, found: list[dict[str, Any]]) -> str:
    places = dict.fromkeys(
        [f"\n    {c['file']}:{c['line']}: {c['code']}" for c in found if line(c) == text and c["file"]]
    )
    return "".join(places)


def _first(root: Path) -> list[dict[str, Any]]:
    frames = read(root)
    return [c for _, c in communicating(frames, min([f.rank for f in frames], default=0))]


def _read(lock: Path) -> Counter[str]:
    lines = lock.read_text(encoding="utf-8").splitlines()
    if lines[:1] != [HEAD]:
        raise ArgumentError(f"{lock} is not a communication lock; write one with `dtensor check --write {lock} SCRIPT`")
    counts = Counter[str]()
    for text in filter(None, lines[1:]):
        m = LINE.fullmatch(text)
        if m is None:
            raise ArgumentError(f"{lock} is damaged at {text!r}; rewrite it with `dtensor check --write`")
        counts[m[2]] += int(m[1])
    return counts


__all__ = ["Checked", "check", "line", "locked"]
