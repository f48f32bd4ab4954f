"""operators: which operators run without communication, and which fail, by family, compared with torch DTensor.

A pair is one call from torch's operator database and one way to place its tensors on a mesh of two ranks: each tensor
replicated, sharded on a dim that two divides, or, in separate rows, Partial(sum). In-place calls and calls with out=
are included. Both libraries get the same values with the same placements, and run the forward. One process on a fake
process group counts the collectives that the call starts: `_c10d_functional::*`, `c10d::*`, and this library's
`dtensor::*`, each of which starts one of the former (except `dtensor::shard`, the local slice):

    local          it ran, and started no collective
    communicates   it ran, and started collectives
    fails          it raised an exception

Calls that raise on plain tensors are left out. If a pair is local with torch only, two simulated ranks run torch's call
and compare the gathered results, including written arguments, with the plain call. The pair is "wrong" if values or
shapes differ, or "random" if in addition the call draws random numbers (with the same seed). Every such pair is
listed. No other results are compared here; tests/sweep does that for this library.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import tensor as theirs
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import dtensor as ours
from dtensor.testing import run_threads
from dtensor.testing.rules.candidates import mapped, tensors
from dtensor.testing.rules.operators import Sample, drawn, operator_names, place, placements, samples

from ..effort import Effort
from ..record import Record, Setting

WORLD, TORCH = 2, "torch eager"
AMOUNTS = {"tiny": (1, 1), "quick": (1, 2), "full": (3, 5)}
"""(calls of each operator, without in-place and out=; ways to shard a call, and as many with partial tensors)."""
TINY = 40
"""A tiny run takes one in so many operators."""
FAMILIES = ("nn.functional", "linalg", "fft", "masked", "special", "signal", "sparse", "torch")
"""Prefixes of operator names; the last stands for all others."""
SPACES = ("dtensor", "_c10d_functional", "c10d")
KINDS = ("replicated", "sharded", "partial")
NAMES = {"R": lambda p: theirs.Replicate(), "S": lambda p: theirs.Shard(p.dim), "P": lambda p: theirs.Partial("sum")}


class Collectives(TorchDispatchMode):
    """Dispatch mode that counts started collectives, and records whether random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(t, (ours.DTensor, theirs.DTensor)) for t in types):
            return NotImplemented  # the library then dispatches, and its local operators come back here
        space, name = func.name().split("::")
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        if space not in SPACES or name.startswith(("wait_tensor", "shard")):
            return func(*args, **(kwargs or {}))
        self.count += 1
        made = func(*args, **(kwargs or {}))
        # The fake group leaves these results uninitialised, and they may be used as indices.
        return made.zero_() if name.startswith(("all_to_all", "reduce_scatter")) else made


@dataclass
class Pair:
    """A call, its placements, and the outcome with both libraries."""

    operator: str
    call: str
    placements: str
    kind: str
    ours: str = ""
    theirs: str = ""
    collectives: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    torch_is: str = ""


def their_place(x: torch.Tensor, mesh: Any, target: Any, parts: bool = False) -> torch.Tensor:
    """Return a DTensor of torch, as `dtensor.testing.rules.operators.place` returns one of this library.

    With `parts`, the partial values of a Partial tensor are random; zeros would hide an operator that is not linear.
    """
    if target is None:
        return x
    (p,) = target
    p = NAMES[str(p)[0]](p)
    if isinstance(p, theirs.Partial):
        part = torch.zeros_like(x.detach())
        if parts:
            part = part + torch.rand(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
        local = x.detach() - part if mesh.get_local_rank() == 0 else part
        made = theirs.DTensor.from_local(local, mesh, [p], run_check=False, shape=x.shape, stride=x.stride())
    else:
        made = theirs.distribute_tensor(x.detach(), mesh, [p], src_data_rank=None)
    return made.detach().requires_grad_(x.requires_grad)


def on_dtensors(sample: Sample, mesh: Any, where: tuple, make: Any) -> tuple[Any, int]:
    """Run the call on DTensors; return (results, arguments afterwards) and the number of collectives it started."""
    fresh, supply = sample.fresh(), iter(where)
    args, kwargs = mapped((fresh.args, fresh.kwargs), lambda x: make(x, mesh, next(supply)))
    torch.manual_seed(3)
    with Collectives() as seen:
        made = sample.call(*args, **kwargs)
    return (made, tensors((args, kwargs))), seen.count


def plain(sample: Sample) -> tuple[Any, bool]:
    """Run the call on plain tensors; return (results, arguments afterwards) and whether it draws random numbers."""
    fresh = sample.fresh()
    torch.manual_seed(3)
    with Collectives() as seen:
        made = sample.call(*fresh.args, **fresh.kwargs)
    return (made, tensors((fresh.args, fresh.kwargs))), seen.draws


def pairs_of(sample: Sample, mesh: Any, most: int) -> list[tuple[str, tuple]]:
    """Return the replicated placement, up to `most` even shardings, and as many placements with a partial tensor."""
    shapes = [x.shape for x in tensors((sample.args, sample.kwargs))]
    found = defaultdict(list)
    for where in placements(sample, mesh, 1024):
        one = [p[0] for p in where if p is not None]
        if all(s[w[0].dim] % WORLD == 0 for w, s in zip(where, shapes) if w and isinstance(w[0], ours.Shard)):
            kind = 2 if any(p.is_partial() for p in one) else int(any(p.is_shard() for p in one))
            found[KINDS[kind]].append(where)
    key = f"{sample.operator} {shapes}"
    return [(k, where) for k in KINDS for where in drawn(list(dict.fromkeys(found[k])), most, key)]


def measured(sample: Sample, mesh: Any, kind: str, where: tuple) -> Pair:
    text = " ".join("-" if p is None else str(p[0]) for p in where)
    pair = Pair(sample.operator, str(sample), text, kind)
    for name, make in (("ours", place), ("theirs", their_place)):
        try:
            _, count = on_dtensors(sample, mesh, where, make)
            pair.collectives[name] = count
            setattr(pair, name, "communicates" if count else "local")
        except Exception as error:
            pair.errors[name] = f"{type(error).__name__}: {error}"[:400]
            setattr(pair, name, "fails")
    return pair


def flat(out: Any) -> list[Any]:
    if isinstance(out, (list, tuple)):
        return [x for one in out for x in flat(one)]
    whole = out.full_tensor() if isinstance(out, theirs.DTensor) else out
    return [whole.detach() if isinstance(whole, torch.Tensor) else whole]


def same(a: Any, b: Any) -> bool:
    try:
        torch.testing.assert_close(flat(a), flat(b), rtol=2e-4, atol=2e-4, equal_nan=True)
    except AssertionError:
        return False
    return True


def verdicts(rank: int, work: list[tuple[Sample, tuple]]) -> list[str]:
    """Return, for each call that torch runs locally, whether the result on this rank is "right"."""
    mesh, found, make = ours.init_device_mesh("cpu", (WORLD,)), [], partial(their_place, parts=True)
    for sample, where in work:
        expected, draws = plain(sample)
        try:
            right = same(on_dtensors(sample, mesh, where, make)[0], expected)
        except RuntimeError:
            right = False
        found.append("right" if right else "random" if draws else "wrong")
    return found


def compare(names: list[str], calls: int, ways: int, effort: Effort) -> list[Pair]:
    """Return all pairs of the operators in `names`, with their outcomes."""
    pairs: list[Pair] = []
    work: list[tuple[Pair, Sample, tuple]] = []
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    mesh = ours.init_device_mesh("cpu", (WORLD,))
    theirs.DTensor.from_local(torch.zeros(2), mesh, [theirs.Shard(0)]).uniform_()  # starts its generator
    for name in effort.progress(names, "operators"):
        for sample in samples(name, calls):
            try:
                plain(sample)
            except Exception:
                continue
            for kind, where in pairs_of(sample, mesh, ways):
                pairs.append(measured(sample, mesh, kind, where))
                if pairs[-1].theirs == "local" and pairs[-1].ours != "local":
                    work.append((pairs[-1], sample, where))
    dist.destroy_process_group()
    ranks = run_threads(verdicts, WORLD, [(sample, where) for _, sample, where in work], timeout=600)
    for (pair, _, _), *found in zip(work, *ranks):
        pair.torch_is = "wrong" if "wrong" in found else found[0]
    return pairs


def family(operator: str) -> str:
    return next((f for f in FAMILIES if operator.startswith(f"{f}.")), FAMILIES[-1])


def run(effort: Effort) -> Iterator[Record]:
    """Yield records by family and by kind of placement, and one for each pair that is local with torch only."""
    calls, ways = effort.of(AMOUNTS)
    names = [n for n in operator_names() if not effort.only or any(word in n for word in effort.only)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs = compare(names[:: TINY if effort.level == "tiny" else 1], calls, ways, effort)
    groups: dict[str, list[Pair]] = defaultdict(list)
    for p in pairs:
        groups[family(p.operator)].append(p)
    groups |= {k: [p for p in pairs if p.kind == k] for k in KINDS} | {"all": pairs}
    for name, found in groups.items():
        yield from summed(Setting("operators", name, ranks=WORLD), found)
    for p in sorted((p for p in pairs if p.torch_is), key=lambda p: (p.torch_is, p.operator)):
        what = p.errors.get("ours") or f"{p.collectives['ours']} collectives"
        note = f"local on torch only, which is {p.torch_is}: {p.call} on {p.placements}; ours: {what}"
        yield Setting("operators", p.operator, ranks=WORLD).missing(f"{p.call} on {p.placements}", note, TORCH)


def summed(at: Setting, pairs: list[Pair]) -> Iterator[Record]:
    """Yield how many of the pairs are not local, and how many fail; the note counts pairs that are local with torch
    only, by whether torch's result is right."""
    is_ = Counter(p.torch_is for p in pairs if p.torch_is)
    note = f"{len(pairs)} pairs; local on torch only: " + (", ".join(f"{n} {k}" for k, n in is_.items()) or "none")
    for figure, states in (("not local", ("communicates", "fails")), ("fails", ("fails",))):
        a, b = (sum(getattr(p, side) in states for p in pairs) for side in ("ours", "theirs"))
        yield at.counted(figure, "pairs", a, TORCH, b, note=note)


__all__ = ["compare", "run"]
