"""What the kernels that a compiler makes of a sequence of operators read and write.

Compilers put operators that are fused into one kernel if nothing that is not fused lies between them: it reads what
several of them read once, and writes only what others need. An operator of any other kind is a kernel of its own. So
what is counted does not depend on how far operators were decomposed.

A *depth* is the number of kernels of the other kind on the longest way to an operator. Operators of one depth that
share memory are one kernel. What only operators of one greater depth read is computed there.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .operators import is_fused, is_picking

Memory = Hashable
"""Identifies a tensor and all views of it."""


@dataclass(frozen=True)
class Call:
    """A call of an operator.

    Attributes:
        fused: whether compilers fuse it with its neighbours.
        reads: for each operand its memory, and how many bytes of it are read.
        writes: for each output its memory and bytes; None for one that is no tensor.
        phase: calls of different phases are never one kernel.
    """

    fused: bool
    reads: Sequence[tuple[Memory, float]]
    writes: Sequence[tuple[Memory, float] | None]
    phase: int = 0

    @staticmethod
    def of(
        func: Any,
        reads: Sequence[tuple[Memory, float]],
        writes: Sequence[tuple[Memory, float] | None],
        phase: int = 0,
    ) -> "Call":
        """The call of an operator on these operands. Some read no more of the first one than they write."""
        if is_picking(func) and reads:
            (memory, bytes_), *rest = reads
            reads = [(memory, min(bytes_, sum([out[1] for out in writes if out is not None]))), *rest]
        return Call(is_fused(func), reads, writes, phase)


@dataclass
class Share:
    """The part of a kernel that is due to one call.

    Attributes:
        read: bytes for each operand.
        written: bytes for each output.
        launches: number of kernels.
    """

    read: list[float]
    written: list[float]
    launches: float = 0.0

    @property
    def moved(self) -> float:
        """Bytes read and written."""
        return sum(self.read) + sum(self.written)


def shares(calls: Sequence[Call], kept: Collection[Memory], sizes: dict[Memory, float]) -> list[Share]:
    """Return the share of each call in the kernels of a sequence of calls.

    Args:
        calls: in order; none that only hands memory on, as views do.
        kept: memory that is needed afterwards.
        sizes: bytes of memory, of which no kernel reads more. What is missing is as large as what is read.
    """
    return _Kernels(calls, kept, sizes).shares()


@dataclass
class _Touched:
    """Who writes and reads one memory, as (call, place)."""

    writers: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    readers: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


class _Kernels:
    def __init__(self, calls: Sequence[Call], kept: Collection[Memory], sizes: dict[Memory, float]) -> None:
        self.calls, self.kept, self.sizes = calls, kept, sizes
        self.touched: dict[Memory, _Touched] = {}
        for k, call in enumerate(calls):
            for place, (memory, _) in enumerate(call.reads):
                self.touched.setdefault(memory, _Touched()).readers.append((k, place))
            for place, out in enumerate(call.writes):
                if out is not None:
                    self.touched.setdefault(out[0], _Touched()).writers.append((k, place))
        self.depth = self._depths()
        self._sink()
        self.kernel = self._joined()

    def _depths(self) -> list[int]:
        known: dict[Memory, int] = {}
        found: list[int] = []
        for call in self.calls:
            depth = max([known.get(memory, 0) for memory, _ in call.reads], default=0)
            found.append(depth)
            for out in call.writes:
                if out is not None:
                    known[out[0]] = depth if call.fused else depth + 1
        return found

    def _sink(self) -> None:
        """Compute what only kernels of one greater depth read there."""
        for k in reversed(range(len(self.calls))):
            call = self.calls[k]
            made = [out[0] for out in call.writes if out is not None]
            users = {user for memory in made for user, _ in self.touched[memory].readers if user > k}
            if not call.fused or not users or any(m in self.kept or len(self.touched[m].writers) > 1 for m in made):
                continue
            depths = {self.depth[user] for user in users}
            if len(depths) == 1 and all(self.calls[user].fused for user in users):
                self.depth[k] = depths.pop()

    def _joined(self) -> list[int]:
        """The kernel of each call, as the index of one of its calls."""
        kernel = list(range(len(self.calls)))

        def root(k: int) -> int:
            while kernel[k] != k:
                kernel[k] = kernel[kernel[k]]
                k = kernel[k]
            return k

        for touched in self.touched.values():
            first: dict[tuple[int, int], int] = {}
            for k, _ in (*touched.writers, *touched.readers):
                if self.calls[k].fused:
                    kernel[root(k)] = root(first.setdefault((self.depth[k], self.calls[k].phase), k))
        return [root(k) for k in range(len(kernel))]

    def shares(self) -> list[Share]:
        found = [Share([0.0] * len(c.reads), [0.0] * len(c.writes)) for c in self.calls]
        for memory, touched in self.touched.items():
            self._read(memory, touched, found)
            self._written(memory, touched, found)
        count = Counter([k for share, k in zip(found, self.kernel) if share.moved])
        for share, k in zip(found, self.kernel):
            share.launches = 1 / count[k] if share.moved else 0.0
        return found

    def _read(self, memory: Memory, touched: _Touched, found: list[Share]) -> None:
        makers = sorted(k for k, _ in touched.writers)
        by_kernel: dict[int, list[tuple[int, int]]] = {}
        for k, place in touched.readers:
            before = [maker for maker in makers if maker < k]
            if not before or self.kernel[before[-1]] != self.kernel[k]:
                by_kernel.setdefault(self.kernel[k], []).append((k, place))
        for readers in by_kernel.values():
            bytes_ = [self.calls[k].reads[place][1] for k, place in readers]
            total = min(sum(bytes_), max(self.sizes.get(memory, 0.0), max(bytes_)))
            for k, place in readers:
                found[k].read[place] = total / len(readers)

    def _written(self, memory: Memory, touched: _Touched, found: list[Share]) -> None:
        by_kernel: dict[int, list[tuple[int, int]]] = {}
        for k, place in touched.writers:
            by_kernel.setdefault(self.kernel[k], []).append((k, place))
        for kernel, writers in by_kernel.items():
            last = max(k for k, _ in writers)
            read = any(self.kernel[k] != kernel and k > last for k, _ in touched.readers)
            if read or memory in self.kept:
                count = len({k for k, _ in writers})
                for k, place in writers:
                    out = self.calls[k].writes[place]
                    assert out is not None, "a writer has an output"
                    found[k].written[place] = out[1] / count


__all__ = ["Call", "Memory", "Share", "shares"]
