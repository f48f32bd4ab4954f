"""Reads a record: the files of all ranks, and from the fingerprints of their shards those of global tensors.

    folder -> lines of each rank -> values that all ranks recorded, by key -> `RecordedRun`

A value is known by its key: step, phase, module, operator, which result, shape, and how often that came before. Ranks
record the same keys. Where a value is a DTensor, its spec says which shards add up to the global tensor, and which
ranks hold copies. A plain tensor of one rank of many may be anything: a copy, a rank's part of the batch, a term of a
sum; what it is follows from what it is compared with (`readings`).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import RecordError
from ..records import fingerprint as fp
from ..records.fingerprint import Vector
from ..records.storage import read, unpacked

Key = tuple[Any, ...]


@dataclass(frozen=True, repr=False)
class RecordedSpec:
    """How a recorded tensor was distributed.

    Attributes:
        mesh: ranks of the mesh, an array of one dim for each axis.
        names: names of its axes.
        dims: for each dim of the tensor, the axes that shard it.
        partial: axis -> reduction.
        text: the layout as text.
        shape: the global shape.
    """

    mesh: np.ndarray[Any, Any]
    names: tuple[str, ...]
    dims: tuple[tuple[int, ...], ...]
    partial: Mapping[int, str]
    text: str
    shape: tuple[int, ...]

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """The axes over which ranks hold copies."""
        used = {a for axes in self.dims for a in axes} | set(self.partial)
        return tuple([a for a in range(self.mesh.ndim) if a not in used])

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Index of a rank along each axis."""
        return tuple([int(k) for k in np.argwhere(self.mesh == rank)[0]])

    def box(self, rank: int) -> tuple[tuple[int, int], ...]:
        """First and one past the last index of a rank's shard in each dim (as `Layout.local_box`)."""
        coordinate, found = self.coordinate(rank), []
        for length, axes in zip(self.shape, self.dims):
            begin = 0
            for axis in axes:
                part = -(-length // self.mesh.shape[axis])
                offset = min(coordinate[axis] * part, length)
                begin, length = begin + offset, min(part, length - offset)
            found.append((begin, begin + length))
        return tuple(found)

    def __str__(self) -> str:
        return ", ".join(f"{name}: {p}" for name, p in zip(self.names, placements(self)))

    def __repr__(self) -> str:
        return f"<RecordedSpec of {list(self.shape)} on {self}>"


def placements(spec: RecordedSpec) -> list[str]:
    """One text for each axis."""
    found = ["R"] * spec.mesh.ndim
    for dim, axes in enumerate(spec.dims):
        for axis in axes:
            found[axis] = f"S({dim})"
    for axis, reduction in spec.partial.items():
        found[axis] = f"P({reduction})"
    return found


@dataclass(repr=False)
class RecordedPart:
    """What one rank recorded of a value."""

    rank: int
    line: dict[str, Any]
    vector: Vector
    spec: RecordedSpec | None

    def __repr__(self) -> str:
        return f"<RecordedPart on rank {self.rank}: {list(self.line['g'])}>"


@dataclass(repr=False)
class Copy:
    """A whole tensor: the sum of the fingerprints of the ranks that hold parts of it.

    Attributes:
        ranks: those ranks.
        vector: the fingerprint; None if reductions other than sums and means stand between.
        spec: the spec; None for a plain tensor.
        shape: its global shape.
        parts: what it was joined from, in order along one dim, if no spec says so.
    """

    ranks: tuple[int, ...]
    vector: Vector | None
    spec: RecordedSpec | None
    shape: tuple[int, ...]
    parts: "tuple[Copy, ...]" = ()

    def __repr__(self) -> str:
        return f"<Copy on ranks {list(self.ranks)}: {list(self.shape)}>"


@dataclass(repr=False)
class RecordedValue:
    """A value of a run.

    Attributes:
        key: what it is known by.
        order: where it stands in the order of execution.
        parts: what each rank recorded, by rank.
        inputs: the keys of the values that it was computed from.
        first: the line of the first rank that has it.
    """

    key: Key
    order: int
    parts: dict[int, RecordedPart]
    inputs: tuple[Key, ...] = ()

    @cached_property
    def first(self) -> dict[str, Any]:
        """The line of its record on the lowest rank."""
        return self.parts[min(self.parts)].line

    @property
    def kind(self) -> str:
        """What it is: the result of an operator, or a kind of its own such as "gradient"."""
        return self.first["k"]

    @property
    def dtype(self) -> str:
        """Name of its dtype."""
        return self.first["d"]

    @property
    def exact(self) -> bool:
        """Whether its elements are integers or bools, which are not rounded."""
        return bool(self.first.get("e"))

    @property
    def step(self) -> int:
        """The step of training in which it was computed, from 0."""
        return self.first["s"]

    @property
    def phase(self) -> str:
        """Where in the step: "forward", "backward", "recompute", "optimizer" or "check"."""
        return self.first["p"]

    @property
    def module(self) -> str:
        """Path of the module that computed it."""
        return self.first["m"]

    @property
    def op(self) -> str:
        """Name of the operator."""
        return self.first["o"]

    @property
    def line(self) -> str:
        """File and line of the user's code; "" if there is none."""
        return self.first["l"]

    @property
    def spec(self) -> RecordedSpec | None:
        """How it is distributed; None for a plain tensor."""
        return self.parts[min(self.parts)].spec

    @property
    def seen(self) -> tuple[int, ...]:
        """The shape whose dims the fingerprint sums along."""
        shape = tuple(self.first["g"])
        return (*shape, 2) if self.dtype.startswith("complex") else shape or (1,)

    @cached_property
    def groups(self) -> list[list[Copy]]:
        """The global tensors that the ranks of each mesh hold, one for each set of ranks that holds a whole one. Plain
        tensors are groups of their own."""
        found = []
        for group in self._groups():
            spec = group[0].spec
            if spec is None:
                found += [[Copy((p.rank,), p.vector, None, tuple(p.line["g"]))] for p in group]
            else:
                found.append(list(_combined(group, spec)))
        return found

    @cached_property
    def copies(self) -> list[Copy]:
        """Those of all groups."""
        return [copy for group in self.groups for copy in group]

    def _groups(self) -> Iterator[list[RecordedPart]]:
        """The parts that share a mesh."""
        meshes: dict[Any, list[RecordedPart]] = {}
        for part in self.parts.values():
            where = None if part.spec is None else part.spec.mesh.tobytes()
            meshes.setdefault((where, part.rank if where is None else -1), []).append(part)
        yield from meshes.values()

    @cached_property
    def norm(self) -> float:
        """The Frobenius norm, estimated where the tensor is partial."""
        return max([_norm(copy, self.seen) for copy in self.copies], default=0.0)

    @cached_property
    def terms(self) -> float:
        """The norm of what all ranks hold together: of a partial tensor that of its terms."""
        return math.sqrt(sum([max(float(part.vector[fp.SQUARES]), 0.0) for part in self.parts.values()]))

    @property
    def nonfinite(self) -> float:
        """The number of NaN and infinities on all ranks."""
        return sum([float(part.vector[fp.NONFINITE]) for part in self.parts.values()])

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.op}{where} ({self.phase}, {self.dtype}{list(self.first['g'])})"

    def __repr__(self) -> str:
        return f"<RecordedValue {self}, step {self.step}>"


def _norm(copy: Copy, seen: Sequence[int]) -> float:
    if copy.vector is None:
        return 0.0
    if copy.spec is not None and copy.spec.partial:
        return fp.norm(copy.vector, seen)
    return float(np.sqrt(max(copy.vector[fp.SQUARES], 0.0)))


def _combined(parts: Sequence[RecordedPart], spec: RecordedSpec) -> Iterator[Copy]:
    """One copy for each place along the axes that replicate."""
    at = {part.rank: spec.coordinate(part.rank) for part in parts}
    mean = float(np.prod([spec.mesh.shape[a] for a, op in spec.partial.items() if op == "avg"] or [1]))
    summed = all(op in ("sum", "avg") for op in spec.partial.values())
    for place in product(*[range(spec.mesh.shape[a]) for a in spec.replicated]):
        mine = [p for p in parts if tuple([at[p.rank][a] for a in spec.replicated]) == place]
        if mine:
            vector = np.sum([p.vector for p in mine], axis=0) / mean if summed else None
            yield Copy(tuple([p.rank for p in mine]), vector, spec, spec.shape)


@dataclass(repr=False)
class RecordedRun:
    """A record that was read.

    Attributes:
        folder: its folder.
        headers: what each rank wrote first, by rank.
        values: key -> value, in the order of execution.
        steps: number of steps.
        failed: rank -> the error that ended its program while it was recorded.
    """

    folder: Path
    headers: dict[int, dict[str, Any]]
    values: dict[Key, RecordedValue]
    steps: int = 1
    failed: Mapping[int, str] = field(default_factory=dict)

    @cached_property
    def mesh(self) -> np.ndarray[Any, Any] | None:
        """The ranks of the whole job by the axes of the mesh with most axes; None if no mesh has all of them."""
        specs = {id(p.spec): p.spec for v in self.values.values() for p in v.parts.values() if p.spec is not None}
        meshes = [spec.mesh for spec in specs.values() if spec.mesh.size == self.world]
        return max(meshes, key=lambda m: m.ndim, default=None)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.headers)

    def __repr__(self) -> str:
        ranks, steps = f"rank{'s' * (self.world > 1)}", f"step{'s' * (self.steps > 1)}"
        return f"<RecordedRun {self.folder}: {self.world} {ranks}, {self.steps} {steps}, {len(self.values):,} values>"


def load(folder: str | Path) -> RecordedRun:
    """Read a record.

    Args:
        folder: the folder of the record.

    Raises:
        RecordError: there is no record, or a file of it is damaged, missing or not finished.
    """
    folder = Path(folder)
    paths = sorted(folder.glob("rank*.jsonl"))
    if not paths:
        raise RecordError(f"{folder} holds no record; name the folder that was given to dtensor.record")
    headers, found, order, failed = {}, {}, {}, {}
    steps = 1
    for path in paths:
        header, lines, end = read(path)
        rank = header["rank"]
        headers[rank] = header
        steps = max(steps, end["steps"])
        if end.get("failed"):
            failed[rank] = end["failed"]
        _read_rank(rank, lines, found, order)
    world = next(iter(headers.values()))["world"]
    absent = sorted(set(range(world)) - set(headers))
    if absent:
        raise RecordError(
            f"{folder} lacks the files of ranks {absent} of {world}; copy them there (each rank writes its own), or "
            "record the run again"
        )
    values = [RecordedValue(key, order[key], parts) for key, parts in found.items()]
    run = RecordedRun(
        folder, headers, {value.key: value for value in sorted(values, key=lambda v: v.order)}, steps, failed
    )
    for value in run.values.values():
        value.inputs = value.first["inputs"]
    return run


def _read_rank(rank: int, lines: Sequence[dict[str, Any]], found: dict[Key, Any], order: dict[Key, int]) -> None:
    meshes: dict[int, dict[str, Any]] = {}
    specs: dict[int, RecordedSpec] = {}
    counts: Counter[Key] = Counter()
    keys: dict[int, Key] = {}
    for line in lines:
        if "mesh" in line:
            meshes[line["mesh"]] = line
        elif "spec" in line:
            mesh = meshes[line["on"]]
            partial = dict(line["partial"])
            dims = tuple([tuple(axes) for axes in line["dims"]])
            ranks, names = np.array(mesh["ranks"]), tuple(mesh["names"])
            specs[line["spec"]] = RecordedSpec(ranks, names, dims, partial, line["text"], tuple(line["shape"]))
        else:
            known = (line["s"], line["p"], line["m"], line["o"], line["n"], len(line["g"]), line["d"])
            key = keys[line["i"]] = (*known, counts[known])
            counts[known] += 1
            line["inputs"] = tuple([keys[i] for i in line["in"] if i in keys])
            spec = None if line["b"] is None else specs[line["b"]]
            found.setdefault(key, {})[rank] = RecordedPart(rank, line, unpacked(line.pop("f")), spec)
            order.setdefault(key, line["i"])


__all__ = ["Copy", "Key", "RecordedPart", "RecordedRun", "RecordedSpec", "RecordedValue", "load", "placements"]
