"""How much a case does: "tiny" shows that it runs, "quick" gives figures within minutes, "full" all of them.

Each case has a table of what that means for it; `Effort` carries the choice, the device, and shows progress.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tqdm import tqdm

LEVELS = ("tiny", "quick", "full")
T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """The level, the device that cases run on, whether to keep quiet, and what the names of jobs have in them, if not
    all are to run."""

    level: str = "quick"
    device: str = "cpu"
    quiet: bool = False
    only: tuple[str, ...] = ()

    def of(self, table: Mapping[str, T]) -> T:
        """What a case's table has for this level."""
        return table[self.level]

    def progress(self, jobs: Iterable[T], case: str) -> Iterator[T]:
        """The jobs that are to run, one by one, with a bar on stderr."""
        wanted = [job for job in jobs if not self.only or any(word in named(job) for word in self.only)]
        bar = tqdm(wanted, desc=f"{case:<12}", unit="job", disable=self.quiet or None, file=sys.stderr)
        for job in bar:
            bar.set_postfix_str(named(job))
            yield job


def named(job: object) -> str:
    """The name of a job: its words."""
    return " ".join(map(str, job)) if isinstance(job, tuple) else str(job)


__all__ = ["LEVELS", "Effort", "named"]
