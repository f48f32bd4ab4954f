"""Readings: what the tensors of several ranks are together, where no spec says so.

A plain tensor of one rank of many may be a copy of the global tensor, the rank's part of it along one dim, or a term of
a sum; in data parallelism gradients of a rank's own mean loss are as many times as large as there are ranks. `readings`
lists what fits the shape of the tensor they are compared with; the one with the smallest difference counts.

From the optimizer on there is less choice: it works on the elements that each rank has, so what it is given must be the
gradient, or a part of it. A term of a sum there is one that nobody added up.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import numpy as np

from ..records import fingerprint as fp
from ..records.fingerprint import Vector
from .values import Copy, RecordedValue

Mesh = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Reading:
    """One way to read a value.

    Attributes:
        said: what it is, such as "parts of dim 0"; "" if specs say it.
        copies: the global tensors that it holds, which are to be the same.
    """

    said: str
    copies: tuple[Copy, ...]


def is_known(value: RecordedValue) -> bool:
    """Whether it is known which global tensor the ranks hold: specs on one mesh say so, or there is one rank."""
    if len(value.parts) == 1:
        return True
    meshes = {None if p.spec is None else p.spec.mesh.tobytes() for p in value.parts.values()}
    return None not in meshes and len(meshes) == 1


def readings(
    value: RecordedValue, shape: Sequence[int], mesh: Mesh | None = None, strict: bool = True
) -> Iterator[Reading]:
    """What `value` may be, compared with a tensor of that shape.

    Args:
        value: the value.
        shape: the shape of the global tensor that it is compared with.
        mesh: the ranks of the whole job by mesh axes, if they are known: tensors may be copies over some of the axes.
        strict: whether to leave out what an optimizer cannot work on.
    """
    shape = tuple(shape)
    groups = [[c for c in group if c.vector is not None] for group in value.groups]
    if not groups or not all(groups):
        return
    if is_known(value):
        yield Reading("", tuple([c for group in groups for c in group]))
        return
    tensors = _arranged(groups, mesh)
    is_final = strict and value.phase in FINAL
    factors = (
        [1]
        if is_final
        else sorted({math.prod(s) for k in range(tensors.ndim + 1) for s in combinations(tensors.shape, k)})
    )
    for roles in product(("copies", "parts") if is_final else ROLES, repeat=tensors.ndim):
        found = _by_roles(tensors, roles, shape)
        if found is None:
            continue
        for factor in factors:
            said = ", ".join([role for role in dict.fromkeys(roles) if role]) + (f", x {factor}" if factor > 1 else "")
            yield Reading(said, tuple([_times(c, 1 / factor) for c in found]))
            if value.op in FLATTENED and any(c.parts for c in found):
                yield Reading(f"{said}, interleaved", tuple([_interleaved(_times(c, 1 / factor)) for c in found]))


FLATTENED = ("bmm", "baddbmm")
"""Operators whose dim 0 is often several dims in one, such as batch and heads. Parts along the second of them are not
consecutive."""

ROLES = ("copies", "terms", "parts")
"""What the tensors along a mesh axis may be: copies, terms of a sum, or parts along a dim."""
FINAL = ("gradient", "optimizer", "updated")
"""The phases of what an optimizer is given and computes."""


def _arranged(groups: Sequence[Sequence[Copy]], mesh: Mesh | None) -> np.ndarray[Any, Any]:
    """The first tensor of each group, by mesh axes as far as they differ there; in one row if that is unknown."""
    row = sorted([group[0] for group in groups], key=lambda c: c.ranks)
    if mesh is not None:
        at = {int(rank): place for place, rank in np.ndenumerate(mesh)}
        places = [at[c.ranks[0]] for c in row]
        axes = [a for a in range(mesh.ndim) if len({p[a] for p in places}) > 1]
        shape = [mesh.shape[a] for a in axes]
        if math.prod(shape) == len(row):
            found = np.empty(shape, dtype=object)
            for copy, place in zip(row, places):
                found[tuple([place[a] for a in axes])] = copy
            return found
    found = np.empty(len(row), dtype=object)
    found[:] = row
    return found


def _by_roles(tensors: np.ndarray[Any, Any], roles: Sequence[str], shape: tuple[int, ...]) -> list[Copy] | None:
    """The global tensors if the axes have these roles; None if the shapes do not fit."""
    order = [a for role in ROLES for a, r in enumerate(roles) if r == role]
    counts = [math.prod([n for n, r in zip(tensors.shape, roles) if r == role]) for role in ROLES]
    found: list[Copy] = []
    for terms in tensors.transpose(order).reshape(counts):
        whole = []
        for parts in terms:
            joined = parts[0] if len(parts) == 1 else _joined(parts, shape)
            if joined is None or joined.shape != shape:
                return None
            whole.append(joined)
        found.append(whole[0] if len(whole) == 1 else _total(whole))
    return found


def _total(terms: Sequence[Copy]) -> Copy:
    vectors: list[Vector] = [c.vector for c in terms if c.vector is not None]
    total = np.sum(vectors, axis=0)
    total[fp.SQUARES] = np.nan  # those of a sum are not known
    return Copy(tuple([r for c in terms for r in c.ranks]), total, None, terms[0].shape)


def _times(copy: Copy, factor: float) -> Copy:
    if copy.vector is None or factor == 1:
        return copy
    found = copy.vector * factor
    found[fp.NONFINITE], found[fp.SQUARES] = copy.vector[fp.NONFINITE], copy.vector[fp.SQUARES] * factor**2
    return replace(copy, vector=found)


def _joined(copies: Sequence[Copy], shape: tuple[int, ...]) -> Copy | None:
    """The tensor whose equal parts along one dim are `copies`, in their order, if there is such a dim.

    The ranks did not know where their parts lie, so they began to count indices at 0: what depends on the signs of that
    dim is not known, and NaN.
    """
    local = copies[0].shape
    if len(local) != len(shape) or any(c.shape != local for c in copies):
        return None
    cut = [d for d, (n, m) in enumerate(zip(local, shape)) if n != m]
    if len(cut) != 1 or local[cut[0]] * len(copies) != shape[cut[0]]:
        return None
    (dim,) = cut
    seen = _seen(copies[0])
    whole = (*shape, *seen[len(shape) :])
    vectors: list[Vector] = [c.vector for c in copies if c.vector is not None]
    vector = np.full(fp.length(whole), np.nan)
    vector[fp.NONFINITE], vector[fp.SQUARES] = (sum([v[k] for v in vectors]) for k in (fp.NONFINITE, fp.SQUARES))
    known, given = fp.sums(vector, whole), [fp.sums(v, seen) for v in vectors]
    if dim == 0:
        turned = [_turned(s[0], k * local[0]) for k, s in enumerate(given)]
        for kind in fp.kinds(0):
            known[0][kind][:] = _merged(np.concatenate([s[kind] for s in turned]), local[0], shape[0])
        for d in range(1, len(whole)):
            known[d]["rows"][:] = np.sum([s[d]["rows"] for s in given], axis=0)
    else:
        kinds = fp.kinds(dim)
        for kind in kinds:
            known[dim][kind][:] = _merged(np.concatenate([s[dim][kind] for s in given]), local[dim], shape[dim])
    return Copy(tuple([r for c in copies for r in c.ranks]), vector, None, shape, tuple(copies))


def _interleaved(copy: Copy) -> Copy:
    """A joined tensor without what depends on the order of the indices of dim 0."""
    if copy.vector is None or not copy.parts or copy.parts[0].shape[0] == copy.shape[0]:
        return copy
    vector = copy.vector.copy()
    for sums in fp.sums(vector, _seen(copy))[0].values():
        sums[:] = np.nan
    return replace(copy, vector=vector, parts=())


def _turned(sums: Mapping[str, Vector], offset: int) -> dict[str, Vector]:
    """The sums along dim 0 of a part that begins at `offset`."""
    (angle,) = fp.angles(offset, 1)
    c, s = math.cos(angle), math.sin(angle)
    cosine = c * sums["cosine"] - s * sums["sine"]
    return {"signed": sums["signed"], "cosine": cosine, "sine": s * sums["cosine"] + c * sums["sine"]}


def _seen(copy: Copy) -> tuple[int, ...]:
    """The shape that the fingerprint was made of: one dim more for complex numbers."""
    assert copy.vector is not None
    shape = copy.shape or (1,)
    return shape if fp.length(shape) == len(copy.vector) else (*shape, 2)


def _merged(along: Vector, local: int, length: int) -> Vector:
    """The sums of ranges of a whole dim from those of its parts; NaN if the ranges do not fit."""
    count = min(length, fp.BUCKETS)
    if local <= fp.BUCKETS:
        found = np.zeros(count)
        np.add.at(found, fp.ranges(length, 0, length), along)
        return found
    if local % fp.BUCKETS or len(along) % count:
        return np.full(count, np.nan)
    return along.reshape(count, -1).sum(1)


__all__ = ["Reading", "is_known", "readings"]
