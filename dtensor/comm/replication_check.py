"""The replication check: do ranks really have the same values where a tensor is assumed to be the same on all of them?

If the ranks of a tensor-parallel axis read different batches, training goes on without an error. So the tensors that a
style assumes to be replicated, and the plain tensors used with DTensors in a global view, are checked on first use and
periodically after that. Each rank writes a few numbers about the tensor to the job's store, and reads those that the
others have written for the same place in the program. No rank waits; the last one to come sees a difference, and then
all ranks of the job raise (`dtensor.job.job`).

Replicated values can differ in their last bits, so a norm and a few sums are compared; for integers, a checksum. In a
trace, the graph inputs that such a tensor is computed from are marked, and `dtensor.comm.agreement.agree` checks them.
"""

import json
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..job.groups import Calls, calls_on
from ..job.job import Job, explain, job
from ..mesh.operator_library import library
from ..mesh.provenance import LOCAL, TAKEN, Taken
from ..torch_private.core import (
    FakeTensor,
    FunctionalTensor,
    fx_traceback,
    graph_node,
    is_in_graph,
    resolve_process_group,
)
from ..torch_private.phases import compile_context

BY_STYLE = (
    "that a plan takes as the same on all ranks of its axis: the input of {}. Give all of them the same batch (seed a "
    "sampler by the rank along the data axis, not by the global one), write the layout Shard(dim) into the style where "
    "each gives a part, or parallelize_module(…, check_inputs=False)"
)
"""Description, for a message, of a tensor that a style assumes to be replicated: the input of the module {}."""

BY_VIEW = (
    "that stands beside DTensors and is taken as a global value, the same on all ranks: {}. "
    "Give all of them the same values, write DTensor.from_local(x, mesh, placements) where each has a part, or "
    "check_inputs=False into the distribute_model that sharded the model"
)
"""Description, for a message, of a tensor that a global view assumes to be replicated, at the place {}."""

DRAWN = (
    "of the state of the generator, from which the forward of a model sharded by distribute_model draws random numbers "
    "that count as the same on all ranks. Give all ranks one seed, torch.manual_seed(0), draw with a generator of your "
    "own what is to differ, or write distribute_model(…, check_inputs=False)"
)
"""Description, for a message, of the default generator's state."""

FIRST = 2
"""Number of first uses in eager mode that are checked."""

EVERY = 100
"""Of later uses, one in this many is checked."""

STRIDES = (1, 2, 3, 7)
"""Strides of the elements, from the first one on, whose sums are compared."""

TOLERANCE = 0.05
"""Allowed difference relative to the norm: far above rounding errors, and below the difference of other data."""

COMMUNICATES = ("dtensor", "_c10d_functional")
"""Namespaces of operators that communicate, so that their results do not depend on this rank's inputs alone."""

KEPT = 256
"""Number of entries of this rank that are kept in the store."""

_told: deque[tuple[Job, str]] = deque()


class Given(NamedTuple):
    """A tensor that is assumed to be the same on all ranks, and its description for a message."""

    said: str
    x: torch.Tensor


def numbers(x: torch.Tensor) -> torch.Tensor:
    """The norm of a plain tensor and sums of its elements, in float64; for integers, a checksum."""
    flat = x.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    if not flat.is_floating_point():
        weights = torch.arange(flat.shape[0], device=flat.device) * 2654435761 + 1
        return ((flat.to(torch.int64) * weights).sum() % (1 << 50)).double()[None]
    wide = torch.promote_types(flat.dtype, torch.float32)
    sums = [flat[::step].sum(dtype=wide) for step in STRIDES]
    return torch.stack([torch.linalg.vector_norm(flat, dtype=wide), *sums]).double()


class Look:
    """One check of some tensors by this rank, at a place in the program that the ranks of a group share."""

    def __init__(self, job: Job, calls: Calls, place: str, given: Sequence[Given]) -> None:
        self.job: Job = job
        self.given: Sequence[Given] = given
        self.ranks: tuple[int, ...] = calls.ranks
        self.prefix: str = f"dtensor/alike/{calls.name}/{job.failures}/{place}"

    def tell(self) -> None:
        """Write the numbers of this rank to the store."""
        self.mine: list[list[Any]] = [
            [said, str(x.dtype), list(x.shape), numbers(x).tolist()] for said, x in self.given
        ]
        key = f"{self.prefix}/{self.job.rank}"
        self.job.store.set(key, json.dumps(self.mine))
        _told.append((self.job, key))
        if len(_told) > KEPT:
            job, old = _told.popleft()
            if job is self.job:  # the file behind the store of a job that has ended may be gone: torch waits for it
                job.store.delete_key(old)

    def hear(self) -> None:
        """Compare with the numbers that other ranks have written so far.

        Raises:
            AgreementError: A rank has different values.
        """
        for rank in self.ranks:
            key = f"{self.prefix}/{rank}"
            if rank != self.job.rank and self.job.store.check([key]):
                others = json.loads(self.job.store.get(key))
                if [said for said, *_ in others] != [said for said, *_ in self.mine]:
                    continue  # that rank has compiled another graph
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
    """Whether to check the use that follows `uses` others."""
    return uses < FIRST or uses % EVERY == 0


def compare(said: str, x: torch.Tensor, group: str, due: bool) -> None:
    """In eager mode: check a plain tensor if that is `due`. Call it for every use, on all ranks, to keep them in step.

    Raises:
        AgreementError: Other ranks of the group have different values; detected here or on another rank.
    """
    if isinstance(x, (FakeTensor, FunctionalTensor)) or is_in_graph():
        return
    calls = calls_on(resolve_process_group(group))
    place, calls.taken = calls.taken, calls.taken + 1
    here = job() if due and not x.requires_grad else None
    if here is None or len(calls.ranks) == 1:
        return
    look = Look(here, calls, f"eager {place}", [Given(said, x)])
    try:
        look.tell()
        look.hear()
    except RuntimeError as error:
        explain(error)
        raise


_noting: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""Context of a compilation -> the groups over which a tensor in it is assumed to be replicated."""


_drawing: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""Context of a compilation -> the groups over which random numbers drawn in it are assumed to be the same."""


def noted() -> tuple[str, ...]:
    """The groups over which a tensor in the current compilation is assumed to be replicated.

    Part of the identity of compiled code: the same code without this assumption is different.
    """
    return _of_context(_noting)


def drawn() -> tuple[str, ...]:
    """The groups over which random numbers drawn in the current compilation are assumed to be the same; likewise."""
    return _of_context(_drawing)


def _of_context(known: WeakKeyDictionary[Any, set[str]]) -> tuple[str, ...]:
    context = compile_context()
    return tuple(sorted(known.get(context, ()))) if context is not None else ()


def note_drawn(groups: Sequence[str]) -> None:
    """While a graph is traced: the ranks of `groups` are assumed to draw the same random numbers."""
    context = compile_context()
    if context is not None:
        _drawing.setdefault(context, set()).update(groups)


library.define("generator_state(Device device) -> Tensor")


def _generator_state(device: torch.device) -> torch.Tensor:
    """A checksum of the state of the device's default generator, an integer on the CPU."""
    on_cpu = device.type == "cpu"
    state = torch.get_rng_state() if on_cpu else torch.get_device_module(device).get_rng_state(device)
    return torch.tensor([zlib.crc32(bytes(state.numpy()))])


library.impl("generator_state", _generator_state, "CompositeExplicitAutograd")
torch.library.register_fake(
    "dtensor::generator_state", lambda device: torch.empty(1, dtype=torch.int64, device="cpu"), lib=library
)


def note_taken(local: torch.Tensor, groups: Sequence[str], said: str) -> None:
    """While a graph is traced: mark the inputs that `local` is computed from as to be the same over `groups`."""
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
    "DRAWN",
    "EVERY",
    "STRIDES",
    "TOLERANCE",
    "Given",
    "Look",
    "compare",
    "drawn",
    "is_due",
    "note_drawn",
    "note_taken",
    "noted",
    "numbers",
]
