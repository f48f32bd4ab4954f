"""What a rank holds along a step, beside parameters, their gradients and optimizer states."""

from collections.abc import Iterator, Sequence
from typing import Any

from .states import State, parts
from .steps import Steps
from .tape import PARAMETER, Value


class Ends:
    """When memory is no longer needed, whatever the placements.

    Attributes:
        last: memory, or (parameter, whether in the backward) for one that is gathered -> index of the last operator
            that needs it.
        forward: memory -> index of the last operator of the forward that reads it.
        backward: memory -> index of the last operator of the backward that reads it.
        turn: index of the first operator of the backward.
        in_backward: parameters that the backward reads themselves, and not only views of them.
    """

    def __init__(self, steps: Steps) -> None:
        ops = steps.tape.ops
        self.last: dict[Any, int] = dict(steps.last)
        self.forward: dict[int, int] = {}
        self.backward: dict[int, int] = {}
        self.turn = next((k for k, op in enumerate(ops) if op.backward), len(ops))
        own = {v.storage: v for v in steps.tape.values.values() if v.kind == PARAMETER}
        read: dict[tuple[Value, bool], int] = {}
        for index, op in enumerate(ops):
            for v in op.operands:
                (self.backward if op.backward else self.forward)[v.storage] = index
                if v.storage in own:
                    read[own[v.storage], op.backward] = index
        self.in_backward = {v for op in ops if op.backward for v in op.operands if v.kind == PARAMETER}
        self.last |= read  # a gathered parameter, and views of it


class Memory:
    """What one run holds.

    Args:
        ends: of the step.
        count: number of operators.
    """

    def __init__(self, ends: Ends, count: int) -> None:
        self.ends = ends
        self._more, self._less, self._moved = ([0.0] * count for _ in range(3))
        self._size: dict[Any, float] = {}
        self._born: dict[Any, int] = {}
        self._read: dict[int, float] = {}

    def __contains__(self, key: Any) -> bool:
        return key in self._size

    def make(self, index: int, key: Any, bytes_: float) -> None:
        """An operator makes what stays until nothing needs it."""
        self._born[key], self._size[key] = index, bytes_
        self._more[index] += bytes_

    def copy(self, index: int, key: Any, bytes_: float, *, stays: bool) -> None:
        """An operator takes what another one made, in another state; `stays`: in place of itself, for others too."""
        self._moved[index] += bytes_
        if stays and index + 1 < len(self._more):
            self._size[key] += bytes_
            self._more[index + 1] += bytes_

    def read(self, key: int, part: float) -> None:
        """The backward takes this part of what the forward made, or of a view of it."""
        self._read[key] = max(self._read.get(key, 0.0), part)

    def grow(self, index: int, bytes_: float) -> None:
        """A gradient is there."""
        self._more[index] += bytes_

    def kept(self) -> Iterator[tuple[int, float]]:
        """Memory, and how much of it stays until the backward.

        Of what the backward takes in shards, compiled code keeps the shards.
        """
        ends = self.ends
        for key, size in self._size.items():
            end = ends.last[key]
            if isinstance(key, int) and self._born[key] < ends.turn <= end:
                explicit = ends.backward.get(key, -1) == end
                yield key, size * (self._read.get(key, 1.0) if explicit else 1.0)

    def peak(self, start: float) -> tuple[float, float]:
        """The most bytes held at once, and those at the end; `start`: those at the beginning."""
        kept = dict(self.kept())
        for key, size in self._size.items():
            stays = kept.get(key, size)
            self._less[self.ends.last[key]] += stays
            if stays < size:
                self._less[max(self._born[key], self.ends.forward.get(key, -1))] += size - stays
        live = most = start
        for more, moved, less in zip(self._more, self._moved, self._less):
            live += more
            most = max(most, live + moved)
            live -= less
        return most, live


def part_taken(have: State, wanted: State, sizes: Sequence[int]) -> float:
    """The part that the backward takes of a tensor: less than all if it takes shards of what is whole."""
    shards = all(a == b or (a is None and isinstance(b, int)) for a, b in zip(have, wanted))
    return parts(have, sizes) / parts(wanted, sizes) if shards else 1.0


__all__ = ["Ends", "Memory", "part_taken"]
