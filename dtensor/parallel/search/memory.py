"""What a rank holds along a step, beside parameters, their gradients and optimizer states."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .states import State, parts
from .steps import Steps
from .tape import BORDER, PARAMETER, Op, Value


class Ends:
    """When memory is no longer needed, whatever the placements.

    Attributes:
        last: memory, or (parameter, whether in the backward) for one that is gathered -> index of the last operator
            that needs it.
        forward: memory -> index of the last operator of the forward that reads it.
        backward: memory -> index of the last operator of the backward that reads it. again: of the first one.
        own: memory -> the parameter that it belongs to.
        turn: index of the first operator of the backward.
        in_backward: parameters that the backward reads themselves, and not only views of them.
        handed: indices of the borders after which memory is read only as they handed it on.
        place: operator -> its index.
        needs: index of an operator -> those of the operators that make its operands.
    """

    def __init__(self, steps: Steps) -> None:
        ops = steps.tape.ops
        self.last: dict[Any, int] = dict(steps.last)
        self.forward: dict[int, int] = {}
        self.backward: dict[int, int] = {}
        self.again: dict[int, int] = {}
        self.turn: int = next((k for k, op in enumerate(ops) if op.backward), len(ops))
        self.own: dict[int, Value] = {v.storage: v for v in steps.tape.values.values() if v.kind == PARAMETER}
        read: dict[tuple[Value, bool], int] = {}
        for index, op in enumerate(ops):
            for v in op.operands:
                (self.backward if op.backward else self.forward)[v.storage] = index
                if op.backward:
                    self.again.setdefault(v.storage, index)
                if v.storage in self.own:
                    read[self.own[v.storage], op.backward] = index
        self.in_backward: set[Value] = {v for op in ops if op.backward for v in op.operands if v.kind == PARAMETER}
        self.last |= read  # a gathered parameter, and views of it
        self.handed: set[int] = set(handing_all_on(ops))
        self.place: dict[Op, int] = {op: index for index, op in enumerate(ops)}
        self.needs: list[list[int]] = [[self.place[v.maker] for v in op.operands if v.maker is not None] for op in ops]


def handing_all_on(ops: Sequence[Op]) -> Iterator[int]:
    """Indices of the borders after which nothing reads the memory but what they handed on, and views of it."""
    readers: dict[int, list[tuple[int, Op]]] = {}
    for index, op in enumerate(ops):
        for storage in {v.storage for v in op.operands}:
            readers.setdefault(storage, []).append((index, op))
    for storage, found in readers.items():
        for index, border in found:
            if border.func != BORDER:
                continue
            views: set[Value | None] = set(border.outputs)
            after = [op for k, op in found if k > index]
            for op in after:
                read = {v for v in op.operands if v.storage == storage}
                if not read <= views:
                    break
                views.update([v for v in op.outputs if v is not None and v.storage == storage])
            else:
                yield index


@dataclass(frozen=True)
class Held:
    """What shares a bucket with others.

    Attributes:
        index: of the operator that needs what is gathered, or that makes the gradient to be reduced.
        whole: bytes of what was gathered, or is reduced.
        part: bytes of what a rank has of it before, or after.
    """

    index: int
    whole: float
    part: float


def packed(given: Iterable[Held], full: float) -> list[list[Held]]:
    """Buckets, in the order of the operators, each as large as it gets or a single tensor."""
    found: list[list[Held]] = []
    held = 0.0
    for one in sorted(given, key=lambda h: h.index):
        held += one.whole
        if not found or held > full:
            found.append([])
            held = one.whole
        found[-1].append(one)
    return found


class Memory:
    """What one run holds.

    Args:
        ends: of the step.
        count: number of operators.
    """

    def __init__(self, ends: Ends, count: int) -> None:
        self.ends = ends
        self._more, self._less, self._moved, self._reserved = ([0.0] * count for _ in range(4))
        self._size: dict[Any, float] = {}
        self._born: dict[Any, int] = {}
        self._read: dict[int, float] = {}
        self._gathered: dict[bool, list[Held]] = {False: [], True: []}

    def __contains__(self, key: Any) -> bool:
        return key in self._size

    def make(self, index: int, key: Any, bytes_: float) -> None:
        """An operator makes what stays until nothing needs it."""
        self._born[key], self._size[key] = index, bytes_
        self._more[index] += bytes_

    def copy(self, index: int, key: Any, bytes_: float, before: float, *, stays: bool) -> None:
        """An operator takes what another one made, in another state; `stays`: for others too, and in place of itself if
        they are all that read it."""
        self._moved[index] += bytes_
        if stays and index + 1 < len(self._more):
            more = bytes_ - (before if index in self.ends.handed else 0.0)
            self._size[key] += more
            self._more[index + 1] += more

    def read(self, key: int, part: float) -> None:
        """The backward takes this part of what the forward made, or of a view of it."""
        self._read[key] = max(self._read.get(key, 0.0), part)

    def grow(self, index: int, bytes_: float) -> None:
        """A gradient is there."""
        self._more[index] += bytes_

    def hold(self, first: int, last: int, bytes_: float) -> None:
        """Something stays from one operator to another."""
        self._more[first] += bytes_
        self._less[last] += bytes_

    def take(self, index: int, key: tuple[Value, bool], moved: Held) -> None:
        """A parameter is gathered, for the forward or the backward, and stays until nothing there needs it."""
        self._gathered[key[1]].append(moved)
        if key in self._size:
            self._moved[index] += moved.whole
        else:
            self.make(index, key, moved.whole)

    def gather(self, full: float) -> None:
        """What is gathered comes in buckets, of which each starts when the one before it is waited for, and from which
        parameters are copied when they are needed."""
        for given in self._gathered.values():
            buckets = packed(given, full)
            for before, bucket in zip([[], *buckets], buckets):
                first, last = (before or bucket)[0].index, bucket[-1].index
                if len(bucket) > 1:
                    self.hold(first, last, sum([h.whole for h in bucket]))
                self.hold(first, bucket[0].index, sum([h.part for h in bucket]))

    def reduce(self, given: Sequence[Held], full: float) -> None:
        """Reduce gradients in buckets.

        Where all ranks get the sums, a bucket is there when its first gradient is made, is summed in place, and is
        waited for at the end. One of which each rank gets a part is put together when the last one is made, and is
        waited for when the next one starts; or it, too, is there from the first one on, as a compiler orders kernels.
        A gradient that is alone is sent as it is. What arrived is copied.
        """
        buckets = packed(given, full)
        for bucket, after in zip(buckets, [*buckets[1:], []]):
            first, last, end = bucket[0].index, bucket[-1].index, len(self._more) - 1
            whole, part = (sum(x) for x in ([h.whole for h in bucket], [h.part for h in bucket]))
            if part >= whole:
                self.hold(first, end, whole)
            else:
                end = after[-1].index if after else end
                self.hold(last, end, whole)
                if len(bucket) > 1:
                    self._reserved[first] += whole
                    for one in bucket:
                        self.hold(one.index, last, one.whole)
                        self._reserved[one.index] -= one.whole
            self.grow(end, part)
            self._moved[end] = max(self._moved[end], part)

    def kept(self) -> Iterator[tuple[int, float]]:
        """Memory, and how much of it stays until the backward.

        Compiled code keeps what the backward takes.
        """
        ends = self.ends
        for key, size in self._size.items():
            end = ends.last[key]
            if isinstance(key, int) and self._born[key] < ends.turn <= end:
                explicit = ends.backward.get(key, -1) == end
                yield key, size * (self._read.get(key, 1.0) if explicit else 1.0)

    def peak(self, start: float) -> tuple[float, float]:
        """The most bytes held at once, and the most that there may be; `start`: those at the beginning."""
        kept = dict(self.kept())
        for key, size in self._size.items():
            stays = kept.get(key, size)
            self._less[self.ends.last[key]] += stays
            turned = max(self._born[key], self.ends.forward.get(key, -1))
            self._less[turned] += max(0.0, size - stays)
            self._more[min(turned + 1, len(self._more) - 1)] += max(0.0, stays - size)
        live = most = at_most = start
        reserved = 0.0
        for more, moved, less, empty in zip(self._more, self._moved, self._less, self._reserved):
            live += more
            reserved += empty
            most, at_most = max(most, live + moved), max(at_most, live + moved + reserved)
            live -= less
        return max(most, live), max(at_most, live)


def part_taken(have: State, wanted: State, sizes: Sequence[int], saved: bool) -> float:
    """What is kept of a tensor that the backward takes, as a part of it: shards, if it takes shards of what is whole or
    of a sum; what the forward gathered; else the tensor itself."""
    if have == wanted:
        return 1.0
    smaller = all(a == b or not isinstance(a, int) for a, b in zip(have, wanted))
    return parts(have, sizes) / parts(wanted, sizes) if smaller or saved else 1.0


__all__ = ["Ends", "Held", "Memory", "handing_all_on", "part_taken"]
