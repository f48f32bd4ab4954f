"""Merges what ranks print: equal lines stand once, with the ranks that printed them.

    rank 0 prints "step 0", "loss 1.5"         ranks 0, 1: step 0
    rank 1 prints "step 0", "loss 1.5"    ->   ranks 0, 1: loss 1.5

A line waits `HOLD` seconds for its like of other ranks. So nothing is held back for long, and what ranks print at about
the same time is merged in the same way each time.
"""

import time
from collections import deque
from collections.abc import Iterator

from ...tensor.visualize import ranks_text

HOLD = 1.0
"""Seconds for which a line waits for the other ranks."""


class Lines:
    """The lines of one stream of `n` ranks that are not shown yet."""

    def __init__(self, n: int) -> None:
        self.begun: list[str] = [""] * n
        self.waiting: list[deque[tuple[float, str]]] = [deque() for _ in range(n)]

    def add(self, rank: int, text: str) -> None:
        """Take `text`, written by `rank`. Of a line that was written over, as in a progress bar, the end counts."""
        *lines, self.begun[rank] = (self.begun[rank] + text).split("\n")
        now = time.monotonic()
        self.waiting[rank].extend([(now, line.removesuffix("\r").rpartition("\r")[2]) for line in lines])

    def end(self) -> None:
        """Take lines that have not ended as they are."""
        for rank, text in enumerate(self.begun):
            if text:
                self.add(rank, "\n")

    def ready(self, done: list[bool], all_: bool = False) -> Iterator[str]:
        """Yield the lines to show now; `done` says which ranks write no more, and `all_` leaves none."""
        while any(self.waiting):
            late = min(lines[0][0] for lines in self.waiting if lines) + HOLD < time.monotonic()
            if not (late or all_ or all(lines or ended for lines, ended in zip(self.waiting, done))):
                return
            line = self._next()
            ranks = [rank for rank, lines in enumerate(self.waiting) if lines and lines[0][1] == line]
            for rank in ranks:
                self.waiting[rank].popleft()
            yield f"{ranks_text(ranks)}: {line}"

    def _next(self) -> str:
        """The first line that no rank has still to come to; if there is none, that of the first rank."""
        heads = [lines[0][1] for lines in self.waiting if lines]
        for head in heads:
            later = [lines for lines in self.waiting if lines and lines[0][1] != head]
            if not any(line == head for lines in later for _, line in lines):
                return head
        return heads[0]


__all__ = ["HOLD", "Lines"]
