"""What one rank does when: computation is one stream, and communication another, in which collectives run in the order
of their starts.

While a collective is under way, sending takes a part of the processor (`Machine.taken`), and computation goes on with
the rest. Inspection runs a graph through this, and the search a step that it would compile to such a graph.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Flight:
    """A collective that was started. Times are in seconds from the beginning.

    Attributes:
        start: when its first byte is sent.
        end: when it ends.
        taken: the part of the processor that sending takes.
        exposed: seconds that computation lost to it, by waiting or by being slower.
    """

    start: float
    end: float
    taken: float
    exposed: float = 0.0


class Streams:
    """The two streams.

    Attributes:
        now: seconds from the beginning, for computation.
    """

    def __init__(self) -> None:
        self.now: float = 0.0
        self._free = 0.0
        self._flying: deque[Flight] = deque()

    @property
    def end(self) -> float:
        """When both have ended, in seconds."""
        return max(self.now, self._free)

    def start(self, seconds: float, taken: float) -> Flight:
        """Start a collective of so many seconds, which takes this part of the processor."""
        begin = max(self.now, self._free)
        flight = Flight(begin, begin + seconds, taken)
        self._free = flight.end
        self._flying.append(flight)
        return flight

    def compute(self, seconds: float) -> None:
        """Compute what takes so many seconds where nothing is sent."""
        while self._flying:
            flight = self._flying[0]
            left = max(0.0, flight.end - self.now)
            if seconds < left * (1 - flight.taken):
                took = seconds / (1 - flight.taken)
                flight.exposed += took - seconds
                self.now += took
                return
            if seconds == 0.0:
                return
            flight.exposed += left * flight.taken
            seconds -= left * (1 - flight.taken)
            self.now += left
            self._flying.popleft()
        self.now += seconds

    def wait(self, flight: Flight) -> None:
        """Compute nothing until a collective has ended."""
        flight.exposed += max(0.0, flight.end - self.now)
        self.now = max(self.now, flight.end)


__all__ = ["Flight", "Streams"]
