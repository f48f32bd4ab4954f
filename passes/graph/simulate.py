"""Simulation: a graph run on N simulated ranks in one process, in lockstep.

Every node runs on all ranks before the next node does. A local operator runs rank by rank; a collective runs once for
each group of ranks, on the values that its members hold. A group's name, as it appears in the graph of rank 0, stands
for a partition of all ranks, since each rank looks up the name to find its own members.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.node import map_arg

from dtensor.errors import PassError
from dtensor.job.groups import canonical, playing

from . import ir, ordered

Partition = tuple[tuple[int, ...], ...]
Groups = Mapping[str, Partition]
Tensors = list[torch.Tensor]


def mesh_groups(mesh: DeviceMesh, names: Mapping[tuple[int, ...], str] | None = None) -> dict[str, Partition]:
    """Return the groups of `mesh`: the name of each, as this rank knows it -> the partition of the ranks.

    Args:
        mesh: the device mesh.
        names: axes -> name of the group over them (`dtensor.mesh.mesh.facts(mesh).groups`); by default the groups of
            single axes.
    """
    if names is None:
        names = {(axis,): canonical(mesh.get_group(axis).group_name) for axis in range(mesh.ndim)}
    found = {}
    for axes, name in names.items():
        ranks = mesh.mesh.movedim(axes, tuple(range(-len(axes), 0)))
        rows = ranks.flatten(-len(axes)).flatten(0, -2) if ranks.dim() > len(axes) else ranks.flatten()[None]
        found[name] = tuple([tuple(row) for row in rows.tolist()])
    return found


def simulate(gm: fx.GraphModule | fx.Graph, inputs: Sequence[Sequence[Any]], groups: Groups) -> list[Any]:
    """Run a graph on `len(inputs)` simulated ranks.

    Args:
        gm: the graph.
        inputs: the arguments of each rank. They are not written to.
        groups: name of each process group -> the partition of the ranks that it stands for.

    Returns:
        The value of the output node on each rank.

    Raises:
        PassError: a node fails, a group is not in `groups`, or the shapes of a collective do not fit.
    """
    graph = gm.graph if isinstance(gm, fx.GraphModule) else gm
    world = len(inputs)
    envs: list[dict[fx.Node, Any]] = [{} for _ in range(world)]
    given = [iter(args) for args in inputs]
    draws = 0
    for node in graph.nodes:
        if node.op == "output":
            return [map_arg(node.args[0], env.__getitem__) for env in envs]
        if node.op == "placeholder":
            results = [_own(next(args)) for args in given]
        else:
            draws += torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            results = _step(graph, node, envs, groups, draws)
        for env, result in zip(envs, results, strict=True):
            env[node] = result
    raise PassError("the graph has no output node")


def _own(arg: Any) -> Any:
    return arg.clone() if isinstance(arg, torch.Tensor) else arg


def _step(graph: fx.Graph, node: fx.Node, envs: list[dict[fx.Node, Any]], groups: Groups, draws: int) -> list[Any]:
    target, given = ordered.called(node)
    try:
        if node.op == "get_attr":
            return [_own(_attribute(graph, str(node.target))) for _ in envs]
        if str(target) in _SILENT:
            return [_SILENT[str(target)] for _ in envs]
        run = _COLLECTIVES.get(target)
        if run is not None:
            return _together(run, str(given[-1]), [map_arg(given, env.__getitem__) for env in envs], groups)
        args = [map_arg((node.args, node.kwargs), env.__getitem__) for env in envs]
        results = []
        for rank, pair in enumerate(args):
            with playing(partial(_index, groups, rank)):
                results.append(_alone(node, *pair, seed=draws * len(envs) + rank))
        return results
    except Exception as error:  # whatever an operator raises
        raise PassError(f"simulated {node.format_node()}: {type(error).__name__}: {error}") from error


_SEED_ARGUMENT = {"prims.inductor_random.default": 1, "prims.inductor_randint.default": 3}
"""Operators that are meant to draw by the seed they are given, but ignore it when run outside of Inductor's code -> the
position of that argument."""


def _alone(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> Any:
    """Run a local operator on one rank. The k-th random draw of a graph is the same before and after a pass."""
    assert callable(node.target), f"cannot run a node of kind {node.op}"
    given = _SEED_ARGUMENT.get(str(node.target))
    if given is not None:
        seed = int(args[given])
    elif torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return node.target(*args, **kwargs)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)):
        torch.manual_seed(seed)
        return node.target(*args, **kwargs)


def _attribute(graph: fx.Graph, path: str) -> Any:
    found: Any = graph.owning_module
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _together(run: Callable[..., list[Any]], group: str, args: list[tuple[Any, ...]], groups: Groups) -> list[Any]:
    results: list[Any] = [None] * len(args)
    for members in partition(groups, group):
        given = [args[rank] for rank in members]
        for rank, result in zip(members, run([g[0] for g in given], *given[0][1:-1]), strict=True):
            results[rank] = result
    return results


def _index(groups: Groups, rank: int, name: str) -> int:
    """The index of a rank within its group of that name."""
    return next(row.index(rank) for row in partition(groups, name) if rank in row)


def partition(groups: Groups, name: str) -> Partition:
    """Return the partition of the simulated ranks that the group `name` stands for."""
    if name not in groups:
        raise PassError(f"group {name!r} is not among the simulated ones: {', '.join(groups) or 'none'}")
    return groups[name]


_FOLD: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def _reduced(xs: Tensors, reduce_op: str) -> torch.Tensor:
    """Reduce in rank order, so that all_reduce and reduce_scatter give the same bits."""
    total = xs[0].clone(memory_format=torch.contiguous_format)
    for x in xs[1:]:
        if x.shape != total.shape:
            raise ValueError(f"ranks reduce tensors of different shapes: {tuple(total.shape)} and {tuple(x.shape)}")
        total = _FOLD[reduce_op](total, x)
    return total / len(xs) if reduce_op == "avg" else total


def _chunk(x: torch.Tensor, dim: int, n: int, rank: int) -> torch.Tensor:
    """Chunk `rank` of n, cut as torch.chunk does; empty past the end."""
    size = x.shape[dim]
    step = -(-size // n)
    start = min(rank * step, size)
    return x.narrow(dim, start, min(step, size - start)).clone(memory_format=torch.contiguous_format)


def _chunks(x: torch.Tensor, dim: int, n: int) -> Tensors:
    return [_chunk(x, dim, n, rank) for rank in range(n)]


def _gathered(xs: Tensors, dim: int, size: int) -> torch.Tensor:
    whole = torch.cat(xs, dim)
    if whole.shape[dim] != size:
        raise ValueError(f"gathers {whole.shape[dim]} elements along dim {dim}, not {size}")
    return whole


def _all_gather(xs: Tensors, dim: int, size: int) -> Tensors:
    whole = _gathered(xs, dim, size)
    return [whole.clone() for _ in xs]


def _all_reduce(xs: Tensors, reduce_op: str) -> Tensors:
    total = _reduced(xs, reduce_op)
    return [total.clone() for _ in xs]


def _reduce_scatter(xs: Tensors, reduce_op: str, dim: int) -> Tensors:
    return _chunks(_reduced(xs, reduce_op), dim, len(xs))


def _all_to_all(xs: Tensors, gather_dim: int, scatter_dim: int, size: int) -> Tensors:
    return _chunks(_gathered(xs, gather_dim, size), scatter_dim, len(xs))


def _shard(xs: Tensors, dim: int) -> Tensors:
    return [_chunk(x, dim, len(xs), rank) for rank, x in enumerate(xs)]


def _collective_permute(xs: Tensors, senders: Sequence[int]) -> Tensors:
    if len(senders) != len(xs) or not set(senders) <= {*range(len(xs))}:
        raise ValueError(f"{list(senders)} does not name one of {len(xs)} ranks for each")
    return [xs[sender].clone(memory_format=torch.contiguous_format) for sender in senders]


def _all_gather_start(xs: Tensors, n: int) -> Tensors:
    return _all_gather(xs, 0, sum([x.shape[0] for x in xs]))


def _reduce_scatter_start(xs: Tensors, reduce_op: str, n: int) -> Tensors:
    if xs[0].shape[0] % n:
        raise ValueError(f"scatters {xs[0].shape[0]} rows evenly over {n} ranks")
    return _reduce_scatter(xs, reduce_op, 0)


def _all_to_all_start(xs: Tensors, output_splits: list[int], input_splits: list[int]) -> Tensors:
    # Every rank gets rank 0's splits. That is right for even splits, which rank-agnostic graphs have.
    pieces = [x.split(list(input_splits)) for x in xs]
    return [torch.cat([row[rank] for row in pieces]) for rank in range(len(xs))]


def _each(run: Callable[..., Tensors]) -> Callable[..., list[Tensors]]:
    """The coalesced form of `run`: ranks hold lists of tensors, and `run` is applied to them item by item."""

    def coalesced(lists: list[Tensors], *rest: Any) -> list[Tensors]:
        columns = [run(list(xs), *rest) for xs in zip(*lists, strict=True)]
        return [list(row) for row in zip(*columns, strict=True)]

    return coalesced


_SILENT: dict[str, Any] = {
    "dtensor.agree.default": None,
    "dtensor.generator_state.default": torch.zeros(1, dtype=torch.int64),
    "dtensor.record_begin.default": None,
    "dtensor.record.default": None,
    "dtensor.record_end.default": None,
}
"""Operators that tell others something and compute nothing -> what they give on simulated ranks, which tell nobody."""

_COLLECTIVES: dict[Any, Callable[..., list[Any]]] = {
    ir.TARGETS["all_gather"]: _all_gather,
    ir.TARGETS["reduce_scatter"]: _reduce_scatter,
    ir.TARGETS["all_reduce"]: _all_reduce,
    ir.TARGETS["all_to_all"]: _all_to_all,
    ir.TARGETS["shard"]: _shard,
    ir.TARGETS["collective_permute"]: _collective_permute,
    ir.c10d.all_gather_into_tensor.default: _all_gather_start,
    ir.c10d.reduce_scatter_tensor.default: _reduce_scatter_start,
    ir.c10d.all_reduce.default: _all_reduce,
    ir.c10d.all_to_all_single.default: _all_to_all_start,
    ir.ops.all_gather_start.default: _all_gather_start,
    ir.ops.all_to_all_start.default: _all_to_all_start,
    ir.ops.all_reduce_start.default: _all_reduce,
    ir.ops.collective_permute_start.default: _collective_permute,
    ir.c10d.all_gather_into_tensor_coalesced.default: _each(_all_gather_start),
    ir.c10d.reduce_scatter_tensor_coalesced.default: _each(_reduce_scatter_start),
    ir.c10d.all_reduce_coalesced.default: _each(_all_reduce),
}
"""Operator -> its implementation, which takes the tensors of one group's ranks, in group order, and the arguments
between tensor and group. (`wait_tensor` runs rank by rank: there is nothing to wait for, and it returns its
argument.)"""


__all__ = ["Groups", "Partition", "mesh_groups", "partition", "simulate"]
