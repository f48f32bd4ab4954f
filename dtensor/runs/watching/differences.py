"""What differs between replicas: the words of `ReplicaError`, for which whole tensors are exchanged.

`Search` runs on all ranks of a scope after a comparison has failed. It fingerprints each tensor by itself, and of the
first that differs one rank sends its copy to all others, in parts. What each rank finds is exchanged, so that all of
them write the same message.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ...errors import ReplicaError
from ...mesh.mesh import mesh_shape
from ...tensor.tensor import DTensor
from .checksums import as_reals, checksum, has_infinities, is_spoilt
from .replicas import BUFFER, GENERATOR, GRADIENT, OPTIONS, PARAMETER, STATE, Holding, ReplicaPlace, Scope, digest

PART = 1 << 22
"""Elements of a tensor that are sent at once."""

LISTED = 4
"""Tensors that a message lists beside the first."""

FEW = 0.01
"""Part of the elements below which values were overwritten, rather than computed differently."""

ROUNDINGS = 64
"""Difference, in units of the last place of the largest element, that rounding may have caused."""

MANTISSA = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
"""Bits of the mantissa of a dtype."""

CAUSES = {
    GENERATOR: "Random operators on DTensors draw the same numbers on all of these ranks: write "
    "dtensor.random.manual_seed(seed, mesh), and draw equally often on all of them; or watch(…, rng=False)",
    OPTIONS: "Set the same options on all ranks: the metric that a scheduler follows has to be the same on all of them",
    "element": "One element alone points to the memory or the processor of {}: go on from a checkpoint, and test that "
    "machine",
    "part": "A part that differs was written to on some ranks only (under `if rank == 0:`, or by other indices), or "
    "its memory is damaged: go on from a checkpoint, and compare more often with watch(…, every=1)",
    "rounding": "The differences are those of rounding: kernels that add in an order of their own, or unlike machines. "
    "Write torch.use_deterministic_algorithms(True), or watch(…, skip=[…]) with the name",
    "start": "Nothing has been trained yet: write dtensor.random.manual_seed(seed) before the model is made, or load "
    "the same state on all ranks",
    "statistics": "It may follow from each rank's own batch: write nn.SyncBatchNorm for statistics, or "
    "watch(…, skip=[…]) with its name where ranks may differ",
    "plain": "So it is where each rank trains on a batch of its own and gradients are not summed: write "
    "fully_shard(model, mesh) or DistributedDataParallel(model), or dist.all_reduce(p.grad) before the step; or "
    "watch(…, skip=[…]) with its name where ranks may differ",
    "placed": "So it is where a gradient follows from this rank's part of a value and is not summed: look for "
    "to_local() without grad_placements, gradients that are set by hand, and set_requires_all_reduce(False)",
}
"""Role of a tensor, or what was found -> what may be the reason, and what to write or do."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class RankFinding:
    """How the copy of a rank differs from that of the rank that sent its own.

    Attributes:
        count: Number of elements that differ.
        size: Number of elements.
        where: Indices, in the global tensor, of the largest difference.
        theirs: The value there on the rank that sent.
        mine: The value there on this rank.
        bits: Numbers of the bits that differ there, 0 for the lowest.
        axes: Names of the mesh axes along which neighbours differ.
        ulps: The largest difference in units of the last place of the largest element; infinite for integers.
    """

    count: int
    size: int
    where: tuple[int, ...]
    theirs: str
    mine: str
    bits: tuple[int, ...]
    axes: tuple[str, ...]
    ulps: float


@dataclass(frozen=True)
class Sides:
    """The ranks that should hold the same tensor, by what they hold.

    Attributes:
        usual: Ranks of the most frequent copy; where none is, of that of the lowest rank.
        others: All other ranks.
        is_majority: Whether `usual` are more than those of any other copy.
    """

    usual: tuple[int, ...]
    others: tuple[int, ...]
    is_majority: bool


class Search:
    """The search for what differs, on each rank of a scope.

    Attributes:
        scope: The ranks.
        held: What this rank holds, without gradients.
        counted: What NaNs and infinities are counted of.
        device: The device of what is exchanged.
        when: When it was compared, such as "after step 100".
        is_start: Whether no step has been taken yet.
    """

    def __init__(self, scope: Scope, held: Sequence[Holding], device: torch.device, steps: int) -> None:
        self.scope: Scope = scope
        self.device: torch.device = device
        self.is_start: bool = steps == 0
        self.held: list[Holding] = [h for h in held if h.role != GRADIENT]
        self.counted: list[Holding] = [h for h in held if h.is_counted]
        self.when: str = f"after step {steps}" if steps else "before the first step"

    def different_lists(self) -> ReplicaError:
        """The error where ranks hold different sets of tensors, or different sizes."""
        mine = [h.text for h in self.held]
        lists = dict(zip(self.scope.ranks, self.scope.objects(mine)))
        first, *rest = sorted(lists)
        other = next(rank for rank in rest if lists[rank] != lists[first])
        a, b = lists[first], lists[other]
        at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        return ReplicaError(
            f"{self.when}, ranks hold different tensors, of which the first: rank {first} holds {_at(a, at)}, where "
            f"rank {other} holds {_at(b, at)}. The ranks that watch are to hold one model: build the same model and "
            "optimizer on all of them, and load the same state; or give watch the mesh whose ranks hold the same "
            "(mesh=), such as that of a pipeline stage"
        )

    def different_steps(self, steps: Sequence[int]) -> ReplicaError:
        """The error where ranks compare after different numbers of steps."""
        given = ", ".join(f"rank {rank}: {n}" for rank, n in sorted(zip(self.scope.ranks, steps)))
        return ReplicaError(
            f"ranks compare their replicas after different numbers of steps ({given}); call the optimizer's step on "
            "every rank equally often, on one that has no batch, too"
        )

    def different_values(self) -> ReplicaError:
        """The error where replicas differ in their values."""
        table = torch.stack([self._row(h) for h in self.held])
        rows = self.scope.gather(table).cpu().tolist()
        sides = [(h, self._sides([row[i] for row in rows])) for i, h in enumerate(self.held)]
        found = [(h, s) for h, s in sides if s is not None]
        if not found:
            return ReplicaError(f"{self.when}, replicas differed while they were compared; compare between the steps")
        holding, at = found[0]
        mine = self._finding(holding, at)
        by_rank = {r: f for r, f in zip(self.scope.ranks, self.scope.objects(mine)) if f is not None}
        rank = max(sorted(by_rank), key=lambda r: by_rank[r].ulps)
        return ReplicaError(self._message(holding, at, rank, by_rank[rank], [h for h, _ in found[1:]]))

    def _row(self, h: Holding) -> torch.Tensor:
        """The fingerprint of a tensor, before it the ranks that should have the same."""
        ranks = torch.tensor([digest(str(h.place.ranks))], device=self.device)
        return torch.cat([ranks, checksum([h.local] if h.is_compared else [], self.device)])

    def _sides(self, rows: Sequence[Any]) -> Sides | None:
        """The first ranks, from the lowest on, that should hold the same and do not; None if there are none."""
        groups: dict[int, dict[int, tuple[int, ...]]] = {}
        for rank, (ranks, *sums) in sorted(zip(self.scope.ranks, rows)):
            groups.setdefault(ranks, {})[rank] = tuple(sums)
        for by_rank in groups.values():
            (most, count), *rest = Counter(by_rank.values()).most_common()
            if rest:
                usual = tuple([rank for rank, sums in by_rank.items() if sums == most])
                others = tuple([rank for rank in by_rank if rank not in usual])
                return Sides(usual, others, count > rest[0][1])
        return None

    def _finding(self, h: Holding, sides: Sides) -> RankFinding | None:
        """What this rank finds when it compares its copy with that of the first of the usual ranks."""
        source = sides.usual[0]
        local = as_reals(h.local)
        is_mine = self.scope.rank in (*sides.usual, *sides.others)
        (size,) = {n for n in self.scope.objects(local.numel() if self.scope.rank == source else None) if n is not None}
        comparison = _Comparison(h)
        flat = local.reshape(-1)
        for begin in range(0, size, PART):
            sent = torch.empty(min(PART, size - begin), dtype=local.dtype, device=self.device)
            if is_mine:
                sent.copy_(flat[begin : begin + PART])
            mine = sent.clone()
            self.scope.broadcast(sent.view(torch.uint8), source)
            if is_mine:
                comparison.add(begin, sent, mine)
        return comparison.finding(_axes(h.place, sides)) if self.scope.rank in sides.others else None

    def _message(self, h: Holding, sides: Sides, rank: int, found: RankFinding, more: Sequence[Holding]) -> str:
        between = _between(sides)
        along = ""
        if found.axes:
            word = "axis" if len(found.axes) == 1 else "axes"
            along = f", along mesh {word} {' and '.join(map(repr, found.axes))}"
        if h.role == GENERATOR:
            what = f"{self.when}, {h.name} is in different states on {between}{along}"
        else:
            what = f"{self.when}, {_described(h)} differs between {between}{along}: {_largest(h, sides, rank, found)}"
        also = ""
        if more:
            names = [_short(other) for other in more[:LISTED]]
            also = f". So do {len(more)} more: {', '.join(names)}{', …' if len(more) > LISTED else ''}"
        return f"{what}{also}. {self._cause(h, sides, rank, found, more)}"

    def _cause(self, h: Holding, sides: Sides, rank: int, found: RankFinding, more: Sequence[Holding]) -> str:
        """What may be the reason, and what to write or do."""
        if h.role in CAUSES:
            return CAUSES[h.role]
        is_alone = all(other.name == h.name for other in more)
        if found.count == 1 and is_alone and (found.size > 1 or len(found.bits) == 1):
            return CAUSES["element"].format(f"rank {rank}" if sides.is_majority else "one of them")
        if found.count < FEW * found.size and is_alone:
            return CAUSES["part"]
        if found.ulps <= ROUNDINGS:
            return CAUSES["rounding"]
        if self.is_start:
            return CAUSES["start"]
        if h.role == BUFFER:
            return CAUSES["statistics"]
        return CAUSES["plain" if h.place.mesh is None else "placed"]


def _at(held: Sequence[str], at: int) -> str:
    return held[at] if at < len(held) else "nothing more"


class _Comparison:
    """The comparison of this rank's copy of a tensor with another rank's, part by part."""

    def __init__(self, of: Holding) -> None:
        self.of = of
        self.count, self.most, self.largest = 0, -1.0, 0.0
        self.at, self.values, self.bits = 0, ("", ""), 0

    def add(self, begin: int, theirs: torch.Tensor, mine: torch.Tensor) -> None:
        """Compare a part that begins at an element of the flat local tensor."""
        whole = INTEGERS[mine.element_size()]
        changed = theirs.view(whole) != mine.view(whole)
        amount = int(changed.sum())
        sizes = theirs.double().abs().nan_to_num(posinf=0.0)
        self.largest = max(self.largest, sizes.max().item())
        if not amount:
            return
        self.count += amount
        by = (theirs.double() - mine.double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        by = torch.where(changed, by, -1.0)
        most, at = by.max(0)
        if most.item() > self.most:
            i = int(at)
            self.most, self.at = most.item(), begin + i
            self.values = str(theirs[i].item()), str(mine[i].item())
            a, b = (int(x.view(whole)[i].item()) for x in (theirs, mine))
            self.bits = (a ^ b) & ((1 << 8 * mine.element_size()) - 1)

    def finding(self, axes: tuple[str, ...]) -> RankFinding:
        """What was found, along these axes of the mesh."""
        local, theirs, mine = as_reals(self.of.local), *self.values
        is_float = has_infinities(local)
        unit = torch.finfo(local.dtype).eps * self.largest if is_float else 0.0
        bits = tuple([i for i in range(64) if self.bits >> i & 1])
        index = _global_index(self.of, self.at)
        ulps = self.most / unit if unit else float("inf")
        return RankFinding(self.count, local.numel(), index, theirs, mine, bits, axes, ulps)


def _global_index(h: Holding, at: int) -> tuple[int, ...]:
    """Indices in the global tensor of an element of the flat local tensor; of a complex one, at real and imaginary."""
    x = h.value
    at = at // 2 if x.is_complex() else at
    index: list[int] = []
    for size in reversed(h.local.shape):
        at, i = divmod(at, max(size, 1))
        index.insert(0, i)
    if isinstance(x, DTensor) and (coordinate := x.device_mesh.get_coordinate()) is not None:
        box = x._spec.layout.local_box(x.shape, mesh_shape(x.device_mesh), coordinate)
        index = [begin + i for (begin, _), i in zip(box, index)]
    return tuple(index)


def _axes(place: ReplicaPlace, sides: Sides) -> tuple[str, ...]:
    """Names of the mesh axes along which there is a rank of one side next to one of the other."""
    if place.mesh is None:
        return ()
    names = tuple(place.mesh.mesh_dim_names or map(str, range(place.mesh.ndim)))
    found = []
    for name in place.axes:
        lines = place.mesh.mesh.movedim(names.index(name), -1).reshape(-1, place.mesh.size(names.index(name))).tolist()
        if any(set(line) & set(sides.usual) and set(line) & set(sides.others) for line in lines):
            found.append(name)
    return tuple(found)


def _between(sides: Sides) -> str:
    if sides.is_majority:
        return f"{_ranks(sides.others)} and {_ranks(sides.usual)}"
    return f"{_ranks(sides.usual)} and {_ranks(sides.others)}, neither a majority"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_list(ranks)}"


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, … ({len(ranks)} in all)" if len(ranks) > 8 else shown


def _short(h: Holding) -> str:
    what = {STATE: h.key, GRADIENT: GRADIENT}.get(h.role)
    return f"{what} of {h.name}" if what else h.name


def _described(h: Holding) -> str:
    if h.role == OPTIONS:
        return f"{h.name} of the optimizer"
    return f"{_short(h)} ({h.role}, {h.shown})"


def _largest(h: Holding, sides: Sides, rank: int, found: RankFinding) -> str:
    values = f"{found.theirs} on rank {sides.usual[0]} and {found.mine} on rank {rank}"
    if h.labels:
        return f"{h.labels[found.where[0]]} is {values}"
    count = f"{found.count} of {found.size} element{'s' if found.size > 1 else ''}"
    of_this = " of its part" if prod(h.value.shape) != h.local.numel() else ""
    text = f"{count}{of_this}, {'most' if found.count > 1 else 'that'} at {list(found.where)}, which is {values}"
    if found.count == 1:
        bit = max(found.bits)
        text += f"; {'only' if len(found.bits) == 1 else 'up to'} bit {bit} differs{_named(bit, h.local.dtype)}"
    return text


def _named(bit: int, dtype: torch.dtype) -> str:
    """What a bit is part of in a floating-point number."""
    dtype = dtype.to_real() if dtype.is_complex else dtype
    if dtype not in MANTISSA:
        return ""
    if bit == 8 * dtype.itemsize - 1:
        return " (the sign)"
    return " (of the exponent)" if bit >= MANTISSA[dtype] else " (of the mantissa)"


@dataclass(frozen=True)
class Spoilt:
    """A tensor with NaNs or infinities on a rank.

    Attributes:
        what: The tensor.
        nans: Number of NaNs.
        infinities: Number of infinities.
        size: Number of elements of this rank's part.
        where: Indices, in the global tensor, of the first.
    """

    what: str
    nans: int
    infinities: int
    size: int
    where: tuple[int, ...]


def spoilt_text(search: Search) -> str:
    """The text of an error about NaNs and infinities, the same on all ranks; "" if no rank has any."""
    device, counted = search.device, search.counted
    mine = [h for h in counted if is_spoilt([h.local], device)]
    # What a gradient holds goes on into states and parameters.
    mine.sort(key=lambda h: h.role != GRADIENT)
    found = dict(sorted(zip(search.scope.ranks, search.scope.objects((len(mine), _spoilt(mine[0]) if mine else None)))))
    having = {rank: (n, first) for rank, (n, first) in found.items() if first is not None}
    if not having:
        return ""
    rank, (_, first) = next(iter(having.items()))
    ranks = [r for r, (_, other) in having.items() if other.what == first.what]
    kinds = [f"{n} {word}" for n, word in ((first.nans, "NaN"), (first.infinities, "infinite")) if n]
    count = max(n for n, _ in having.values()) - 1
    also = f"; {count} more {'tensors hold' if count > 1 else 'tensor holds'} some" if count else ""
    return (
        f"{search.when}, {first.what} is not finite on {_ranks(ranks)}: {' and '.join(kinds)} of {first.size} elements "
        f"on rank {rank}, the first at {list(first.where)}{also}. Go on from a checkpoint with "
        "dtensor.watch(…, nan=True), which raises at the first operator that makes one out of finite inputs"
    )


def _spoilt(h: Holding) -> Spoilt:
    x = as_reals(h.local)
    x = x.float() if x.element_size() == 1 else x
    bad = (~torch.isfinite(x)).reshape(-1)
    at = int(bad.to(torch.uint8).argmax())
    what = _short(h) if h.role != PARAMETER else f"parameter {h.name}"
    return Spoilt(what, int(x.isnan().sum()), int(x.isinf().sum()), x.numel(), _global_index(h, at))


__all__ = ["Search", "spoilt_text"]
