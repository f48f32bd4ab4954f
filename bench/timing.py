"""Times sides against each other in interleaved rounds; computes medians, and quartiles of the ratio.

Ratios are taken within each round, so that other load of the machine affects both sides.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """The comparison of two sides.

    Attributes:
        value: median over the rounds of the first side.
        peer_value: median over the rounds of the second side.
        ratio: median of the ratios of the rounds.
        spread: first and third quartile of these ratios.
    """

    value: float
    peer_value: float
    ratio: float
    spread: tuple[float, float]


def seconds(run: Callable[[], object], calls: int = 1) -> float:
    """Return the mean time of a call in seconds."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def interleaved(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int = 1,
    before: Callable[[], object] = lambda: None,
    warm: int = 0,
) -> dict[str, list[float]]:
    """Time functions in rounds, in which each takes a turn.

    Each two rounds have an order of their own, there and back, so that no function always runs after the same one. It
    depends on the number of the round alone, so that ranks that run this at once are in step.

    Args:
        runs: name -> function to time.
        rounds: number of rounds.
        calls: number of calls in a turn, over which the time is averaged.
        before: function to run, untimed, before each turn.
        warm: number of calls at the start of a turn that are not timed, so that caches hold what they hold in a loop.

    Returns:
        Name -> seconds of a call, in each round.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds):
        order = random.Random(i // 2).sample(list(runs), len(runs))
        for name in order if i % 2 == 0 else order[::-1]:
            before()
            for _ in range(warm):
                runs[name]()
            found[name].append(seconds(runs[name], calls))
    return found


def compared(ours: Sequence[float], theirs: Sequence[float], scale: float = 1.0) -> Ratio:
    """Return the comparison of the rounds of two sides; values, but not ratios, are multiplied by `scale`."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = quartiles(ratios)
    return Ratio(scale * statistics.median(ours), scale * statistics.median(theirs), middle, (low, high))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile; a single value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


__all__ = ["Ratio", "compared", "interleaved", "quartiles", "seconds"]
