"""When each part of a step runs: what the passes make of a forward or a backward, and how long it takes.

What collectives send is computed first, in their order. Moves that computation waits for run where their operator does.
Collectives of parameters and of gradients share buckets: a gather of parameters starts when the one needed before it is
waited for, a reduction of gradients when its last gradient is there.
"""

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import inf
from operator import itemgetter

from ...prices.links import Network, terms
from ...prices.machine import Machine
from ...prices.overlap import joins
from ...prices.streams import Flight, Streams
from .states import Sending


@dataclass(slots=True)
class _Shared:
    """A collective of a bucket, or a bucket.

    Attributes:
        index: of the operator that needs what is gathered, or that makes the gradient.
        sending: what is sent.
        bytes: as in `Sending`.
        copied: bytes that are copied before and after.
        count: number of collectives.
    """

    index: int
    sending: Sending
    bytes: float
    copied: float
    count: int = 1


class Half:
    """The forward or the backward of one run.

    Args:
        network: the mesh.
        machine: what a rank computes with.
        needs: index of an operator -> those of the operators that make its operands.

    Attributes:
        computing: seconds of computation.
        beside: seconds of moves that may run beside it.
        taken: seconds that these take of computation.
    """

    def __init__(self, network: Network, machine: Machine, needs: Sequence[Sequence[int]]) -> None:
        self.network: Network = network
        self.machine: Machine = machine
        self.needs: Sequence[Sequence[int]] = needs
        self.computing: float = 0.0
        self.beside: float = 0.0
        self.taken: float = 0.0
        self._events: list[tuple[int, float, float, float]] = []  # index, computed, then moved, of the processor taken
        self._sent: list[tuple[int, int, int]] = []  # index, that of what makes what is sent, that of the event
        self._ahead = 0.0  # bytes of the largest collective, as many as those of one kind in flight may have together
        self._shared: tuple[list[_Shared], list[_Shared]] = [], []

    @property
    def least(self) -> float:
        """Seconds, without those of moves that are waited for, if whatever can be hidden were hidden."""
        return max(self.computing + self.taken, self.beside)

    def compute(self, index: int, seconds: float) -> None:
        """An operator computes for so many seconds."""
        self.computing += seconds
        self._events.append((index, seconds, 0.0, 0.0))

    def wait(self, index: int, seconds: float, maker: int, sending: Sending | None = None) -> None:
        """An operator waits for a move of what another one makes."""
        if sending is not None:
            self._ahead = max(self._ahead, in_flight(sending, sending.bytes, self.network))
        self._sent.append((index, maker, len(self._events)))
        self._events.append((index, 0.0, seconds, inf))

    def send(self, index: int, seconds: float, taken: float, maker: int) -> None:
        """A move of what another operator makes runs beside what follows, and takes a part of the processor."""
        self.beside += seconds
        self.taken += seconds * taken
        self._sent.append((index, maker, len(self._events)))
        self._events.append((index, 0.0, seconds, taken))

    def share(self, index: int, sending: Sending, *, gradient: bool) -> None:
        """A collective that shares a bucket with others: of a gradient that an operator makes, or of a parameter that
        it needs."""
        self._shared[gradient].append(_Shared(index, sending, sending.bytes, sending.alone))
        if gradient:
            self._sent.append((index, index, -1))

    def seconds(self) -> float:
        """Seconds from the beginning to the end; once, when all is known."""
        streams = Streams()
        gathers, sums = (self._packed(some, gradient=bool(k)) for k, some in enumerate(self._shared))
        place, events = self._ordered({b.index for b in gathers})
        for buckets in (gathers, sums):
            for b in buckets:
                b.index = place[b.index]
            buckets.sort(key=lambda b: b.index)
        ahead = max(self._ahead, *[in_flight(b.sending, b.bytes, self.network) for b in (*gathers, *sums)], 0.0)
        gathered, summed = _Gathers(self, streams, gathers, ahead), _Sums(self, streams, sums, ahead)
        gathered.fill()
        for index, computed, moved, taken in events:
            summed.until(index)
            gathered.until(index)
            streams.compute(computed)
            if moved:
                flight = streams.start(moved, min(taken, 1.0))
                if taken == inf:
                    streams.wait(flight)
        summed.until(inf)
        return streams.end

    def _ordered(self, gathered: Set[int]) -> tuple[list[int], list[tuple[int, float, float, float]]]:
        """The place of each operator, where what collectives send is computed first; and events in that order. What
        stood before an operator that waits, be it for what is `gathered`, is computed before that."""
        place, count, filled, own = [-1] * len(self.needs), 0, 0, dict[int, int]()

        def put(k: int) -> None:
            nonlocal count
            if place[k] < 0:
                place[k] = count
                count += 1

        def fill(end: int) -> None:
            nonlocal filled
            for k in range(filled, end):
                put(k)
            filled = max(filled, end)

        for index, maker, event in sorted(self._sent):
            todo, missing = [maker], set[int]()
            while todo:
                k = todo.pop()
                if k >= 0 and place[k] < 0 and k not in missing:
                    missing.add(k)
                    todo += self.needs[k]
            for k in sorted(missing):
                if k in gathered:
                    fill(k)
                put(k)
            if event >= 0:
                own[event] = count
                count += 1
                if self._events[event][3] == inf:
                    fill(index)
        fill(len(place))
        events = [(own.get(k, place[e[0]]), *e[1:]) for k, e in enumerate(self._events)]
        return place, sorted(events, key=itemgetter(0))

    def _packed(self, given: list[_Shared], *, gradient: bool) -> list[_Shared]:
        """Buckets, in the order of the operators, as the passes fill them."""
        found: list[_Shared] = []
        last: dict[tuple[str, int], tuple[_Shared, int]] = {}
        for one in sorted(given, key=lambda s: s.index):
            op, axis = one.sending.op, one.sending.axis
            fixed, per_byte = self._terms(op, axis)
            key = op, axis
            small = 2 * one.bytes / self.network.links[axis].memory < fixed
            bucket, ready = last.get(key, (None, 0))
            later = gradient and one.index > ready
            if small and bucket is not None and joins(bucket.bytes, one.bytes, fixed, per_byte, later=later):
                if bucket.count == 1:
                    bucket.copied = bucket.sending.shared
                bucket.bytes += one.bytes
                bucket.copied += one.sending.shared
                bucket.count += 1
                bucket.index = one.index if gradient else bucket.index
                last[key] = bucket, one.index
            else:
                found.append(one)
                if small:
                    last[key] = one, one.index
        return found

    def _terms(self, op: str, axis: int) -> tuple[float, float]:
        return terms(op, self.network.sizes[axis], self.network.links[axis])

    def start(self, b: _Shared, streams: Streams, *, gradient: bool) -> Flight:
        """Start a bucket."""
        fixed, per_byte = self._terms(b.sending.op, b.sending.axis)
        seconds, copying = fixed + per_byte * b.bytes, 2 * b.copied / self.machine.memory
        taken = self.machine.taken(self.network.links[b.sending.axis], gradient)
        self.beside += seconds
        self.taken += seconds * taken + copying
        streams.compute(copying)
        return streams.start(seconds, taken)


class _Buckets:
    """Buckets of one kind, on their way; `left` are those that did not start yet."""

    def __init__(self, half: Half, streams: Streams, left: list[_Shared], ahead: float) -> None:
        self.half, self.streams, self.left, self.ahead = half, streams, deque(left), ahead
        self.flying: deque[tuple[_Shared, float, Flight]] = deque()
        self.held = 0.0

    def put(self, held: float, *, gradient: bool) -> None:
        """Start the next one, which holds so many bytes until it is waited for."""
        b = self.left.popleft()
        self.flying.append((b, held, self.half.start(b, self.streams, gradient=gradient)))
        self.held += held

    def take(self) -> None:
        """Wait for the oldest."""
        _, held, flight = self.flying.popleft()
        self.held -= held
        self.streams.wait(flight)


class _Gathers(_Buckets):
    def fill(self) -> None:
        """Start the next ones, as far as there is room, and at least one."""
        while self.left:
            held = in_flight(self.left[0].sending, self.left[0].bytes, self.half.network)
            if self.flying and self.held + held > self.ahead:
                return
            self.put(held, gradient=False)

    def until(self, index: int) -> None:
        """Wait for what an operator needs."""
        while self.flying and self.flying[0][0].index <= index:
            self.take()
            self.fill()


class _Sums(_Buckets):
    def until(self, index: float) -> None:
        """Start what operators before this one have made; nothing is held for sums that all ranks get."""
        while self.left and self.left[0].index < index:
            b = self.left[0]
            held = 0.0 if b.sending.op == "all_reduce" else in_flight(b.sending, b.bytes, self.half.network)
            while self.flying and held and self.held + held > self.ahead:
                self.take()
            self.put(held, gradient=True)


def in_flight(sending: Sending, bytes_: float, network: Network) -> float:
    """Bytes of what is sent and of what arrives, where so many are sent."""
    return bytes_ * (1 + 1 / network.sizes[sending.axis] if sending.op in ("all_gather", "reduce_scatter") else 2)


__all__ = ["Half"]
