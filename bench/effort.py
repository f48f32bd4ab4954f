"""How much a case does: "tiny" only tests that it runs, "quick" gives figures within minutes, "full" gives all.

Each case has a table of what this means for it. `Effort` holds the choice and the device, and shows progress.
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
    """Settings of a run.

    Attributes:
        level: an element of `LEVELS`.
        device: type of the device on which cases run.
        quiet: whether to show no progress bars.
        only: if not empty, run only jobs with one of these texts in their name.
    """

    level: str = "quick"
    device: str = "cpu"
    quiet: bool = False
    only: tuple[str, ...] = ()

    def of(self, table: Mapping[str, T]) -> T:
        """Return the entry of a case's table for this level."""
        return table[self.level]

    def progress(self, jobs: Iterable[T], case: str) -> Iterator[T]:
        """Yield the jobs to run, with a progress bar on stderr."""
        wanted = [job for job in jobs if not self.only or any(word in named(job) for word in self.only)]
        bar = tqdm(wanted, desc=f"{case:<12}", unit="job", disable=self.quiet or None, file=sys.stderr)
        for job in bar:
            bar.set_postfix_str(named(job))
            yield job


def named(job: object) -> str:
    """Return the name of a job: its elements, separated by spaces."""
    return " ".join(map(str, job)) if isinstance(job, tuple) else str(job)


__all__ = ["LEVELS", "Effort", "named"]
