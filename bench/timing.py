"""Timing sides against each other: rounds in which they take turns, medians, and quartiles of the ratio.

A ratio is taken round by round, so that what else the machine does meets both sides.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """Medians of two sides, the median of their ratio by rounds, and its quartiles."""

    value: float
    peer_value: float
    ratio: float
    spread: tuple[float, float]


def seconds(run: Callable[[], object], calls: int = 1) -> float:
    """Mean time of a call."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def interleaved(
    runs: Mapping[str, Callable[[], object]], rounds: int, calls: int = 1, before: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of a call of each, in each round; each round begins with another side.

    Args:
        runs: name -> what is timed.
        rounds: how often each takes its turn.
        calls: calls in a turn, whose mean counts.
        before: what runs, untimed, before each turn.
    """
    names = list(runs)
    found: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        k = i % len(names)
        for name in names[k:] + names[:k]:
            before()
            found[name].append(seconds(runs[name], calls))
    return found


def compared(ours: Sequence[float], theirs: Sequence[float], scale: float = 1.0) -> Ratio:
    """The ratio of two sides' rounds; values are multiplied by `scale`."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = quartiles(ratios)
    return Ratio(scale * statistics.median(ours), scale * statistics.median(theirs), middle, (low, high))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third; of one value, that value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


__all__ = ["Ratio", "compared", "interleaved", "quartiles", "seconds"]
