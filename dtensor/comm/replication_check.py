"""Likeness: whether ranks have the same values where a tensor counts as the same on all of them.

Ranks of a tensor parallel axis that read different batches train on without a word. So what a style takes as the same,
and what stands plain beside DTensors in a global view, is looked at on its first use, and every so often then: each
rank writes a few numbers of it into the job's store, and looks at what the others have written for the same place in
the program. Nobody waits; whoever comes last sees a difference, and a failure is everybody's (`job`).

Values that are alike may differ in their last bits, so a norm and a few sums are compared; of integers a checksum. In a
trace a note goes to the inputs of the graph that such a tensor is computed from, and `agree` looks at these.
"""

import json
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..mesh.groups import Calls, calls_on
from ..mesh.job import Job, job
from ..mesh.provenance import LOCAL, TAKEN, Taken
from ..torch_private.compiling import compile_context
from ..torch_private.core import (
    FakeTensor,
    FunctionalTensor,
    fx_traceback,
    graph_node,
    is_in_graph,
    resolve_process_group,
)

BY_STYLE = (
    "that a plan takes as the same on all ranks of its axis: the input of {}. Give all of them the same batch (seed a "
    "sampler by the rank along the data axis, not by the global one), write the layout Shard(dim) into the style where "
    "each gives a part, or parallelize_module(…, check_inputs=False)"
)
"""How it is said what a style takes, of the module {}."""

BY_VIEW = (
    "that stands beside DTensors in a model sharded by distribute_model, and so counts as the same on all ranks: {}. "
    "Give all of them the same values, write DTensor.from_local(x, mesh, placements) where each has a part, or "
    "distribute_model(…, check_inputs=False)"
)
"""How it is said what a global view takes, at {}."""

FIRST = 2
"""How many first uses in eager mode are looked at."""

EVERY = 100
"""Of so many uses later ones are looked at once."""

STRIDES = (1, 2, 3, 7)
"""Of what elements the sums are compared: each of these, counted from the first."""

TOLERANCE = 0.05
"""By how much values may differ, relative to their norm: rounding stays below it by far, other data does not."""

COMMUNICATES = ("dtensor", "_c10d_functional")
"""Namespaces of operators whose results do not follow from what this rank was given."""

KEPT = 256
"""How many notes of this rank stay in the store."""

_told: deque[tuple[Job, str]] = deque()


class Given(NamedTuple):
    """A tensor that counts as the same on all ranks, and what is said of it."""

    said: str
    x: torch.Tensor


def numbers(x: torch.Tensor) -> torch.Tensor:
    """The norm of a plain tensor and sums of its elements, in float64; of integers a checksum."""
    flat = x.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    if not flat.is_floating_point():
        weights = torch.arange(flat.shape[0], device=flat.device) * 2654435761 + 1
        return ((flat.to(torch.int64) * weights).sum() % (1 << 50)).double()[None]
    wide = torch.promote_types(flat.dtype, torch.float32)
    sums = [flat[::step].sum(dtype=wide) for step in STRIDES]
    return torch.stack([torch.linalg.vector_norm(flat, dtype=wide), *sums]).double()


class Look:
    """This rank's look at some tensors at one place of the program that the ranks of a group have in common."""

    def __init__(self, job: Job, calls: Calls, place: str, given: Sequence[Given]) -> None:
        self.job: Job = job
        self.given: Sequence[Given] = given
        self.ranks: tuple[int, ...] = calls.ranks
        self.prefix: str = f"dtensor/alike/{calls.name}/{job.failures}/{place}"

    def tell(self) -> None:
        """Write down what this rank has."""
        self.mine: list[list[Any]] = [
            [said, str(x.dtype), list(x.shape), numbers(x).tolist()] for said, x in self.given
        ]
        key = f"{self.prefix}/{self.job.rank}"
        self.job.store.set(key, json.dumps(self.mine))
        _told.append((self.job, key))
        if len(_told) > KEPT:
            job, old = _told.popleft()
            job.store.delete_key(old)

    def hear(self) -> None:
        """Look at what other ranks have written.

        Raises:
            AgreementError: one has other values.
        """
        for rank in self.ranks:
            key = f"{self.prefix}/{rank}"
            if rank != self.job.rank and self.job.store.check([key]):
                others = json.loads(self.job.store.get(key))
                if [said for said, *_ in others] != [said for said, *_ in self.mine]:
                    continue  # a rank that has compiled another graph
                for (said, *mine), (_, *theirs) in zip(self.mine, others):
                    if not _are_alike(mine, theirs):
                        raise self.job.failing(_error(said, {self.job.rank: mine, rank: theirs}))


def _are_alike(a: Any, b: Any) -> bool:
    *kind, mine = a
    *other_kind, theirs = b
    if kind != other_kind:
        return False
    tolerance = 0.0 if len(mine) == 1 else TOLERANCE * max(abs(mine[0]), abs(theirs[0]))
    return all(x == y or abs(x - y) <= tolerance or (x != x and y != y) for x, y in zip(mine, theirs))


def _error(said: str, by_rank: dict[int, Any]) -> str:
    ranks = " and ".join(map(str, sorted(by_rank)))
    kinds = {f"{dtype} {shape}" for dtype, shape, _ in by_rank.values()}
    differ = f"in {' and '.join(sorted(kinds))}" if len(kinds) > 1 else f"in the values of a {kinds.pop()}"
    return f"ranks {ranks} differ {differ} {said}"


def is_due(uses: int) -> bool:
    """Whether the use after so many others is one to look at."""
    return uses < FIRST or uses % EVERY == 0


def compare(said: str, x: torch.Tensor, group: str, due: bool) -> None:
    """In eager mode: look at a plain tensor, if that is due; to be called for it in any case, on all ranks.

    Raises:
        AgreementError: other ranks of the group have other values, here or on another rank.
    """
    if isinstance(x, (FakeTensor, FunctionalTensor)) or is_in_graph():
        return
    calls = calls_on(resolve_process_group(group))
    place, calls.taken = calls.taken, calls.taken + 1
    here = job() if due and not x.requires_grad else None
    if here is None or len(calls.ranks) == 1:
        return
    look = Look(here, calls, f"eager {place}", [Given(said, x)])
    look.tell()
    look.hear()


_noting: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""What is compiled -> the groups over which something in it is to be alike."""


def noted() -> tuple[str, ...]:
    """The groups over which something in what is compiled now is to be alike: the same code, otherwise, is not."""
    context = compile_context()
    return tuple(sorted(_noting.get(context, ()))) if context is not None else ()


def note_taken(local: torch.Tensor, groups: Sequence[str], said: str) -> None:
    """While a graph is traced: note on its inputs that what `local` is computed from is to be alike over `groups`."""
    node = graph_node(local)
    if node is None:
        return
    meta, context = fx_traceback.current_meta, compile_context()
    if context is not None:
        _noting.setdefault(context, set()).update(groups)
    taken = Taken(said, tuple(groups), meta.get("nn_module_stack") or {}, meta.get("stack_trace") or "")
    todo = [node]
    while todo:
        n = todo.pop()
        if TAKEN in n.meta or LOCAL in n.meta or getattr(n.target, "namespace", None) in COMMUNICATES:
            continue
        n.meta[TAKEN] = taken
        todo += n.all_input_nodes


__all__ = [
    "BY_STYLE",
    "BY_VIEW",
    "EVERY",
    "STRIDES",
    "TOLERANCE",
    "Given",
    "Look",
    "compare",
    "is_due",
    "note_taken",
    "noted",
    "numbers",
]
