"""Whether the ranks of a job compile matching graphs: compares what each rank communicates in its graphs.

The pass `agree` makes the ranks compare at run time, where a difference is an error. Here one process holds the
graphs of all ranks, compiled one after the other as each rank in turn (`dtensor.testing.fake_ranks`), and nothing runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import combinations

from torch import fx

from dtensor.job.collective_order import alike, difference
from dtensor.job.groups import group_ranks
from dtensor.passes.borders.agree import entry
from dtensor.passes.graph import ir
from dtensor.passes.graph.count import between_ranks

Collectives = list[tuple[tuple[int, ...], str]]
"""What a graph communicates, in order: the ranks of each collective, and the text by which ranks compare it."""

_heard: ContextVar[list[Collectives] | None] = ContextVar("dtensor_heard", default=None)


@contextmanager
def overheard() -> Iterator[list[Collectives]]:
    """Collect what each graph that is compiled inside the context communicates: one item per graph, forwards first."""
    token = _heard.set(heard := [])
    try:
        yield heard
    finally:
        _heard.reset(token)


def hear(graph: fx.Graph) -> None:
    """Tell the context of `overheard`, if there is one, of a graph whose collectives no pass reorders any more."""
    heard = _heard.get()
    if heard is not None:
        places = ir.gradients(graph)
        heard.append([(group_ranks(group), entry(node, places)) for node, group in between_ranks(graph)])


def disagreement(told: Mapping[int, Sequence[Collectives]]) -> str | None:
    """Describe what is wrong with the communication of the ranks' graphs; None if nothing is.

    Two ranks must run the same collectives in the same order on the groups that they share. The order in which groups
    that share ranks are used must be one that all of their ranks can keep; otherwise the ranks wait for each other in a
    cycle.

    Args:
        told: rank -> what its graphs communicate, in the order in which they were compiled, as
            `overheard` gives it.
    """
    counts = {rank: len(graphs) for rank, graphs in told.items()}
    if len(set(counts.values())) > 1:
        return f"the ranks compile different numbers of graphs: {counts}"
    for index in range(min(counts.values(), default=0)):
        graphs = {rank: graphs[index] for rank, graphs in told.items()}
        found = _differing(graphs) or _circular(graphs)
        if found is not None:
            return f"graph {index}: {found}"
    return None


def _differing(graphs: Mapping[int, Collectives]) -> str | None:
    for a, b in combinations(sorted(graphs), 2):
        mine, theirs = ([(what, "") for ranks, what in graphs[r] if a in ranks and b in ranks] for r in (a, b))
        if not alike(mine, theirs):
            return difference({a: mine, b: theirs})
    return None


def _circular(graphs: Mapping[int, Collectives]) -> str | None:
    """Run all ranks in lockstep. Where none can continue, describe what each of them waits for."""
    at = dict.fromkeys(graphs, 0)
    moved = True
    while moved:
        moved = False
        for rank, place in at.items():
            if place < len(graphs[rank]):
                ranks = graphs[rank][place][0]
                here = [r for r in ranks if r in at]
                if all(at[r] < len(graphs[r]) and graphs[r][at[r]][0] == ranks for r in here):
                    at.update({r: at[r] + 1 for r in here})
                    moved = True
    waiting = {rank: graphs[rank][place] for rank, place in at.items() if place < len(graphs[rank])}
    if not waiting:
        return None
    lines = [f"  rank {rank}: {what} with ranks {list(ranks)}" for rank, (ranks, what) in sorted(waiting.items())]
    return "\n".join(["the ranks wait for each other in a cycle:", *lines])


__all__ = ["Collectives", "disagreement", "hear", "overheard"]
