"""Checks the candidates of a sharding rule by brute force.

Authors of rules give calls as `Case`s to `wrong_candidates`. It runs each call in every way that the rule allows on one
mesh axis, on ranks that hold random shards and partial values, and compares the outputs with the plain call. `cut`
and `is_right` define what placements mean, without using the library.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...comm.collectives import emit
from ...dispatch.decision import call_of, carry_out
from ...dispatch.dispatch import run
from ...errors import ArgumentError
from ...layout.layout import Layout
from ...rules import local_calls, rule_of
from ...rules.call import is_in_place
from ...rules.choose import _assemble, _fits
from ...rules.rule import Candidate, candidates
from ...tensor.tensor import DTensor
from ...torch_private.core import OpOverload, overloads_of
from ..threads import run_threads

State = int | str | None
"""Placement of a tensor on the axis: a dim (Shard), a reduce op (Partial) or None (Replicate)."""


@dataclass
class Case:
    """An operator call on plain tensors, preferably of float64.

    Attributes:
        func: an OpOverload, or a custom operator or packet with a single overload.
        args: positional arguments of the plain call.
        at_least: the minimum number of candidates that the rule must offer.
        kwargs: keyword arguments of the plain call.

    Raises:
        ValueError: `func` does not name exactly one overload.
    """

    func: Any
    args: tuple[Any, ...]
    at_least: int = 1
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = overloads_of(self.func)
        if len(found) != 1:
            names = ", ".join(map(str, found))
            raise ArgumentError(f"a Case calls one operator, but {self.func!r} is {names or 'none'}; name the overload")
        self.func = found[0]


def case(func: OpOverload, *args: Any, at_least: int = 1, **kwargs: Any) -> Case:
    """Return the call `func(*args, **kwargs)` as a case."""
    return Case(func, args, at_least, kwargs)


def floats(*shape: int) -> torch.Tensor:
    """Return random float64 numbers from 0.5 to 1.5."""
    return torch.rand(shape, dtype=torch.float64) + 0.5


def integers(high: int, *shape: int) -> torch.Tensor:
    """Return random integers from 0 to `high` - 1."""
    return torch.randint(high, shape)


def booleans(*shape: int) -> torch.Tensor:
    """Return a random mask."""
    return torch.rand(shape) < 0.5


def mapped(value: Any, of: Any) -> Any:
    """Return `value` with `of` applied to the tensors inside its tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return of(value)
    if isinstance(value, dict):
        return {k: mapped(v, of) for k, v in value.items()}
    return type(value)(mapped(v, of) for v in value) if isinstance(value, (list, tuple)) else value


def tensors(value: Any) -> list[Any]:
    """The tensors in nested arguments, in order."""
    found: list[Any] = []
    mapped(value, found.append)
    return found


def as_list(out: Any) -> list[Any]:
    """The outputs of an operator as a list."""
    return list(out) if isinstance(out, (list, tuple)) else [out]


def cut(x: torch.Tensor, state: State, n: int) -> list[torch.Tensor]:
    """Return what each of `n` ranks holds of `x`; partial values are random, except for those of the last rank."""
    if state is None:
        return [x.clone() for _ in range(n)]
    if isinstance(state, int):
        chunks = list(torch.chunk(x, n, state))
        return [t.clone() for t in chunks] + [x.narrow(state, 0, 0).clone()] * (n - len(chunks))
    if state in ("max", "min"):
        beyond = 1 if state == "min" else -1
        return [*(x + beyond * torch.rand_like(x) for _ in range(n - 1)), x.clone()]
    if state == "product":
        parts = [torch.rand_like(x) + 0.5 for _ in range(n - 1)]
        return [*parts, x / torch.stack(parts).prod(0) if parts else x.clone()]
    assert state in ("sum", "avg"), f"no operand is ever P({state})"
    parts = [torch.randn_like(x) if is_real(x) else torch.randint_like(x, 9) for _ in range(n - 1)]
    return [*parts, x * (n if state == "avg" else 1) - sum(parts)]


def is_real(x: torch.Tensor) -> bool:
    """Return whether `x` holds floating-point or complex numbers."""
    return x.dtype.is_floating_point or x.dtype.is_complex


def can_be(x: torch.Tensor, state: State) -> bool:
    """Return whether an operand can have this placement: bools cannot be partial, and integers only as a sum."""
    return not isinstance(state, str) or is_real(x) or (x.dtype != torch.bool and state == "sum")


REDUCE: dict[str, Any] = {
    "sum": lambda x: x.sum(0),
    "avg": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "product": lambda x: x.prod(0),
}


def is_right(pieces: list[torch.Tensor], state: State, dense: torch.Tensor) -> bool:
    """Return whether the local tensors `pieces` of the ranks, placed as `state`, represent `dense`."""
    if isinstance(state, int):
        wanted = cut(dense, state, len(pieces))
    elif state is None:
        wanted = [dense] * len(pieces)
    else:
        if any(p.shape != dense.shape for p in pieces):
            return False
        pieces, wanted = [REDUCE[state](torch.stack(pieces)).to(pieces[0].dtype)], [dense]
    return all(p.shape == w.shape and p.dtype == w.dtype and close(p, w) for p, w in zip(pieces, wanted))


def close(a: Any, b: Any) -> bool:
    """Whether two results agree up to the rounding of their dtype; NaN equals NaN."""
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    single = a.dtype in (torch.float32, torch.complex64)
    return torch.allclose(
        a.to(wide), b.to(wide), rtol=1e-4 if single else 1e-6, atol=1e-5 if single else 1e-9, equal_nan=True
    )


def layout_of(state: State, ndim: int) -> Layout:
    """The layout on a mesh of one axis that shards the dim, or is partial by the reduction, that `state` names."""
    base = Layout.make(1, ((),) * ndim, ())
    return base.moved(0, dim=state) if isinstance(state, int) else base.moved(0, reduce_op=state)


def placed(case: Case, mesh: Any, states: Any, pieces: Any) -> tuple[Any, Any]:
    """Return the arguments of the case with DTensors in place of operands; those of state "plain" stay as they are."""
    supply = iter(zip(tensors((case.args, case.kwargs)), states, pieces))

    def one(_: Any) -> Any:
        x, state, piece = next(supply)
        if state == "plain":
            return x
        return DTensor(piece, mesh, layout_of(state, x.dim()), x.shape, x.stride())

    return mapped(case.args, one), mapped(case.kwargs, one)


def call_and_rule(case: Case, mesh: Any) -> Any:
    """A case as the call that a rule sees, and its rule."""
    states = [None] * len(tensors((case.args, case.kwargs)))
    args, kwargs = placed(case, mesh, states, tensors((case.args, case.kwargs)))
    call = call_of(case.func, args, kwargs, [t._spec for t in tensors((args, kwargs))])  # pyright: ignore[reportAttributeAccessIssue]
    make = rule_of(case.func)
    assert make is not None, f"{case.func} has no rule; give it one with dtensor.register_sharding"
    return call, make(call)


class _Counting:
    """`emit` for functions that run in place of operators: counts the all-reduces of each thread."""

    def __init__(self) -> None:
        self.seen = threading.local()

    def all_reduce(self, *args: Any) -> torch.Tensor:
        self.seen.count = self.count + 1
        return emit.all_reduce(*args)

    @property
    def count(self) -> int:
        return getattr(self.seen, "count", 0)


def run_candidate(
    case: Case, mesh: DeviceMesh, candidate: Candidate, pieces: Any, counting: "_Counting"
) -> list[torch.Tensor | None]:
    """Run the call as `candidate` and return the local outputs of this rank."""
    args, kwargs = placed(case, mesh, candidate.inputs, pieces)
    call, rule = call_and_rule(case, mesh)
    in_place = is_in_place(case.func)
    choice = _assemble(rule, [candidate], call.operands, False)
    decision = carry_out(call, replace(rule, home={}), choice, in_place)  # home={}: outputs keep their layout
    before = counting.count
    out = run(decision, case.func, args, kwargs)
    factors = candidate.factors
    said = rule.all_reduces.get(factors[0], 0) if len(factors) == 1 else 0
    said += [op for op, *_ in rule.inside.get(factors, ())].count("all_reduce")
    made = counting.count - before
    assert made == said, f"{made} all-reduces in the operator, and the rule says {said}"
    for o, want in zip(as_list(out), candidate.outputs):
        if isinstance(o, DTensor) and not in_place:
            assert o._spec.layout is layout_of(want, o.dim())
    return [o._local_tensor if isinstance(o, DTensor) else None for o in as_list(out)]


class OneAxis:
    """A stand-in for a mesh with one axis, with just enough attributes to make a rule or a decision."""

    ndim = 1
    device_type = "cpu"
    mesh_dim_names = None

    def __init__(self, n: Any) -> None:
        self.shape: tuple[int, ...] = (n,)
        self.mesh: torch.Tensor = torch.arange(n)

    def _get_root_mesh(self) -> Any:
        return self

    def get_coordinate(self) -> Any:
        return [0]

    def get_group(self, axis: Any) -> Any:
        return SimpleNamespace(group_name="")


@dataclass
class CandidateJob:
    """One candidate of a case to run.

    Attributes:
        case: the call.
        candidate: the candidate of the rule.
        pieces: `pieces[operand][rank]` is the local tensor of the operand on the rank.
        dense: outputs of the plain call.
    """

    case: Case
    candidate: Candidate
    pieces: list[list[torch.Tensor]]
    dense: list[torch.Tensor | None]

    def __str__(self) -> Any:
        states = [[layout_of(s, 9).text for s in side] for side in (self.candidate.inputs, self.candidate.outputs)]
        shapes = [list(t.shape) for t in tensors((self.case.args, self.case.kwargs))]
        return f"{self.case.func} {shapes}: {' '.join(states[0])} -> {' '.join(states[1])}"


def check_sizes(case: Case, call: Any, rule: Any) -> None:
    """Raise AssertionError unless each dim of the tensors is as long as its factors together."""
    given, made = (len(call.operands), len(call.outputs)), (len(rule.inputs), len(rule.outputs))
    assert given == made, f"{case.func}: a rule of {made} operands and outputs for {given}"
    pairs = [*zip(call.operands, rule.inputs), *zip(call.outputs, rule.outputs)]
    for tensor, dims in [(tensor, dims) for tensor, dims in pairs if tensor is not None and dims is not None]:
        assert len(dims) == tensor.ndim, f"{case.func}: a rule of {len(dims)} dims for a tensor of {tensor.ndim}"
        for size, dim in zip(tensor.shape, dims):
            length = prod(rule.sizes[f] for f in dim)
            fits = not dim or (length == size and isinstance(length, int))
            assert fits, f"{case.func}: a dim of length {size} has factors {dim}, whose sizes are {rule.sizes}"


def jobs_of(case: Case, n: int) -> list[CandidateJob]:
    """The candidates of a case that fit on `n` ranks, with each rank's operands and the dense results."""
    call, rule = call_and_rule(case, OneAxis(n))
    check_sizes(case, call, rule)
    operands = tensors((case.args, case.kwargs))
    made = as_list(case.func(*mapped(case.args, torch.clone), **mapped(case.kwargs, torch.clone)))
    dense = [x if isinstance(x, torch.Tensor) else None for x in made]
    table = candidates(rule)
    assert len(table) >= case.at_least, f"{case.func}: {len(table)} candidates, expected {case.at_least}"
    jobs = []
    for found in table:
        if _fits(rule, found, n, {}) and all(map(can_be, operands, found.inputs)):
            pieces = [
                cut(x, None if i in rule.own_inputs and s == "max" else s, n)
                for i, (x, s) in enumerate(zip(operands, found.inputs))
            ]
            for i in rule.unread:
                pieces[i] = [torch.full_like(p, 99) for p in pieces[i]]
            jobs.append(CandidateJob(case, found, pieces, dense))
    return jobs


def run_jobs(rank: Any, n: Any, jobs: Any, counting: _Counting) -> Any:
    """Run candidates on a rank; errors are given in place of outputs."""
    mesh = init_device_mesh("cpu", (n,))
    outs: list[Sequence[torch.Tensor | Exception | None]] = []
    for j in jobs:
        try:
            outs.append(run_candidate(j.case, mesh, j.candidate, [p[rank] for p in j.pieces], counting))
        except (RuntimeError, IndexError, AssertionError) as error:
            outs.append([error] * len(j.dense))
    return outs


def wrong_candidates(cases: list[Case], n: int) -> list[str]:
    """Run every candidate of every case on a mesh axis of `n` ranks, and return those that give wrong results.

    The ranks are threads. Their operands are shards or random partial values of the arguments. The local outputs are
    combined as the candidate states, and compared with the plain call. Choose some sizes that `n` divides and some that
    it does not. To check a rule of your own, see `dtensor.register_sharding`.

    Args:
        cases: the calls to check.
        n: number of ranks on the axis.

    Returns:
        One line for each wrong output or error; empty if all candidates are right.
    """
    jobs = [j for case in cases for j in jobs_of(case, n)]
    counting = _Counting()
    with patch.object(local_calls, "emit", counting):
        results = run_threads(run_jobs, n, n, jobs, counting)
    wrong = []
    for index, job in enumerate(jobs):
        for i, (dense, state) in enumerate(zip(job.dense, job.candidate.outputs)):
            pieces = [r[index][i] for r in results]
            failed = [p for p in pieces if isinstance(p, Exception)]
            if failed:
                wrong.append(f"{job}: {failed[0]!r}"[:300])
            elif not (all(p is None for p in pieces) if dense is None else is_right(pieces, state, dense)):
                wrong.append(f"{job} (output {i})")
    return wrong


__all__ = [
    "REDUCE",
    "Case",
    "OneAxis",
    "State",
    "as_list",
    "booleans",
    "call_and_rule",
    "case",
    "check_sizes",
    "cut",
    "floats",
    "integers",
    "is_right",
    "jobs_of",
    "mapped",
    "tensors",
    "wrong_candidates",
]
