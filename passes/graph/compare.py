"""Whether two graphs compute the same values: both are run on simulated ranks with the same random inputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dtensor.errors import PassError
from dtensor.torch_private.core import disable_current_modes
from dtensor.torch_private.symbolic_sizes import hint

from . import ir
from .simulate import Groups, Partition, partition, simulate


def random_inputs(graph: fx.Graph, groups: Groups, world: int, seed: int) -> list[list[Any]]:
    """Draw arguments for each of `world` ranks, one row per rank, from the values that the placeholders were traced
    with.

    Floats are normally distributed, integers are 0 or 1 (so that they are valid indices anywhere), and symbolic sizes
    take their example values. Tensors are drawn on the CPU and moved to the device of the traced value. A value that
    reaches a `shard` is the same on all ranks of its group, as `shard` requires; all other values differ.
    """
    alike = replication(graph, groups)
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    rows: list[list[Any]] = [[] for _ in range(world)]
    for k, node in enumerate(holders):
        leader = _leaders([partition(groups, name) for name in sorted(alike.get(node, ()))], world)
        for rank, row in enumerate(rows):
            generator = torch.Generator().manual_seed((seed * 1009 + k) * 1009 + leader[rank])
            row.append(_random(ir.value(node), generator))
    return rows


def replication(graph: fx.Graph, groups: Groups) -> dict[fx.Node, frozenset[str]]:
    """Return, for each node, the groups over which its value must be the same on all ranks because it reaches a `shard`
    over them.

    The result of a collective is the same over its group and over every group contained in it, so nothing is required
    of its input for these.
    """
    needed: dict[fx.Node, frozenset[str]] = {}
    for node in reversed(graph.nodes):
        mine = needed.get(node, frozenset())
        c = ir.collective(node)
        if c is not None:
            mine = mine | {c.group} if c.op == "shard" else _not_within(mine, c.group, groups)
        elif node.target in ir.STARTS:
            mine = _not_within(mine, str(node.args[-1]), groups)
        for x in node.all_input_nodes:
            needed[x] = needed.get(x, frozenset()) | mine
    return needed


def _not_within(names: frozenset[str], wide: str, groups: Groups) -> frozenset[str]:
    rows = [set(row) for row in partition(groups, wide)]
    return frozenset([n for n in names if not all(any(row >= set(r) for row in rows) for r in partition(groups, n))])


def _leaders(partitions: list[Partition], world: int) -> list[int]:
    """For each rank, the smallest rank that it is joined with by any of `partitions`."""
    leader = list(range(world))
    for _ in partitions:
        for members in [m for rows in partitions for m in rows]:
            low = min([leader[rank] for rank in members])
            for rank in members:
                leader[rank] = low
    return leader


def _random(val: Any, generator: torch.Generator) -> Any:
    if not isinstance(val, torch.Tensor):
        return hint(val) if isinstance(val, (int, torch.SymInt)) and not isinstance(val, bool) else val
    shape, strides = [hint(n) for n in val.shape], [hint(n) for n in val.stride()]
    if val.dtype.is_floating_point or val.dtype.is_complex:
        flat = torch.randn(math.prod(shape), generator=generator, dtype=torch.float64).to(val.dtype)
    else:
        flat = torch.randint(0, 2, (math.prod(shape),), generator=generator).to(val.dtype)
    x = flat.reshape(shape).to(val.device)
    if math.prod(shape) == 0 or 0 in strides:
        return x
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def equivalent(
    before: fx.GraphModule | fx.Graph,
    after: fx.GraphModule | fx.Graph,
    groups: Groups,
    world: int,
    exact: bool = True,
    seed: int = 0,
) -> None:
    """Run both graphs on the same random inputs on simulated ranks and compare the outputs of every rank.

    Args:
        before: the graph whose outputs are right.
        after: the graph to compare with it.
        groups: the simulated process groups.
        world: number of ranks.
        exact: whether the outputs must be bitwise equal. Otherwise floats may differ by 64 times the dtype's machine
            epsilon, relative to the largest element of the output, or to 1 if that is less.
        seed: seed of the random inputs.

    Raises:
        PassError: the outputs differ, or a graph does not run.
    """
    graph = before.graph if isinstance(before, fx.GraphModule) else before
    inputs = random_inputs(graph, groups, world, seed)
    found = differences(simulate(before, inputs, groups), simulate(after, inputs, groups), exact)
    if found:
        d = found[0]
        raise PassError(
            f"computes other values: output {d.output} on rank {d.rank} of {world}, seed {seed}: {d.what}"
            if d.output is not None
            else d.what
        )


@dataclass(frozen=True)
class Difference:
    """An output that differs on one simulated rank.

    Attributes:
        output: index of the output, counted over the tensors and numbers of all results; None if one graph returns more
            of them than the other.
        rank: the simulated rank.
        what: how it differs, as text.
        amount: the largest difference of two elements, relative to the largest element of the output that is right, or
            to 1 if that is less; infinite if dtypes, shapes or numbers of outputs differ, or if one element is not
            finite.
    """

    output: int | None
    rank: int
    what: str
    amount: float


def differences(want: Sequence[Any], got: Sequence[Any], exact: bool) -> list[Difference]:
    """Compare what two graphs returned on each rank, as `simulate` gives it.

    Args:
        want: the results that are right, one item for each rank.
        got: the results to compare with them.
        exact: as for `equivalent`.

    Returns:
        The outputs that differ, by rank and then by output.
    """
    found: list[Difference] = []
    for rank, (a, b) in enumerate(zip(want, got, strict=True)):
        left, right = _leaves(a), _leaves(b)
        if len(left) != len(right):
            found.append(Difference(None, rank, f"returns {len(right)} outputs instead of {len(left)}", math.inf))
            continue
        for k, (x, y) in enumerate(zip(left, right)):
            what = _difference(x, y, exact)
            if what is not None:
                found.append(Difference(k, rank, what, _amount(x, y)))
    return found


def _leaves(out: Any) -> list[Any]:
    return [leaf for item in out for leaf in _leaves(item)] if isinstance(out, (tuple, list)) else [out]


def _difference(x: Any, y: Any, exact: bool) -> str | None:
    """Describe how the output `y` differs from the wanted `x`; None if it does not."""
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return None if type(x) is type(y) and x == y else f"{y!r} instead of {x!r}"
    if x.dtype != y.dtype or x.shape != y.shape:
        return f"{y.dtype} of shape {tuple(y.shape)} instead of {x.dtype} of shape {tuple(x.shape)}"
    if torch.equal(x, y) or x.numel() == 0:
        return None
    inexact = x.dtype.is_floating_point or x.dtype.is_complex
    if exact or not inexact:
        close = torch.isclose(x, y, rtol=0, atol=0, equal_nan=True)
        return None if bool(close.all()) else f"{int((~close).sum())} of {x.numel()} elements differ"
    p, q = _wide(x), _wide(y)
    limit = 64 * torch.finfo(x.dtype).eps * _scale(p)
    close = torch.isclose(q, p, rtol=0, atol=limit, equal_nan=True)
    return None if bool(close.all()) else f"off by {float((p - q).abs().max()):.3g}, where {limit:.3g} is allowed"


def _amount(x: Any, y: Any) -> float:
    """The `amount` of a `Difference`."""
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return math.inf
    if x.dtype != y.dtype or x.shape != y.shape:
        return math.inf
    p, q = _wide(x), _wide(y)
    apart = float(torch.where(torch.isclose(p, q, rtol=0, atol=0, equal_nan=True), 0, (p - q).abs()).max())
    return apart / _scale(p) if math.isfinite(apart) else math.inf


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.complex128 if x.dtype.is_complex else torch.float64)


def _scale(x: torch.Tensor) -> float:
    """The largest finite element, or 1 if that is less."""
    finite = x.isfinite()
    return max(1.0, float(x[finite].abs().max())) if bool(finite.any()) else 1.0


@dataclass(frozen=True)
class Simulation:
    """The simulated ranks on which `run` checks each pass.

    Attributes:
        world: number of ranks.
        groups: name of each process group -> the partition of the ranks that it stands for.
        seed: seed of the random inputs.
    """

    world: int
    groups: Groups
    seed: int = 0

    def check(self, before: fx.Graph, after: fx.Graph, exact: bool) -> None:
        """Call `equivalent` on these ranks; works while something is being traced."""
        with disable_current_modes(), torch.no_grad():
            equivalent(before, after, self.groups, self.world, exact, self.seed)


__all__ = ["Difference", "Simulation", "differences", "equivalent", "random_inputs", "replication"]
