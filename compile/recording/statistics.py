"""Statistics on what was compiled inside a `with statistics()` block: graphs, breaks, passes and collectives."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import fx

from dtensor.passes import CollectiveInfo, PassRecord, collectives
from dtensor.torch_private.compiling import dynamo_counters, without_compile_caches


@dataclass(frozen=True)
class GraphRecord:
    """One compiled graph.

    Attributes:
        direction: "joint" before the partition; "forward", "backward" or "inference" after it.
        traced: the collectives in the graph before the passes.
        collectives: the collectives in the graph after the passes.
        passes: what each pass did.
    """

    direction: str
    traced: tuple[CollectiveInfo, ...]
    collectives: tuple[CollectiveInfo, ...]
    passes: tuple[PassRecord, ...]


@dataclass
class Statistics:
    """What was compiled while the block ran.

    Attributes:
        graphs: number of frames that Dynamo captured.
        graph_breaks: number of graph breaks.
        records: one `GraphRecord` for each graph that went through the passes, in order.
    """

    graphs: int = 0
    graph_breaks: int = 0
    records: list[GraphRecord] = field(default_factory=list)

    @property
    def forward(self) -> list[CollectiveInfo]:
        """Collectives of the last forward (or inference) graph, after the passes."""
        return self._last("forward", "inference")

    @property
    def backward(self) -> list[CollectiveInfo]:
        """Collectives of the last backward graph, after the passes."""
        return self._last("backward")

    def _last(self, *directions: str) -> list[CollectiveInfo]:
        found = [r for r in self.records if r.direction in directions]
        return list(found[-1].collectives) if found else []


_active: list[Statistics] = []


@contextmanager
def statistics() -> Iterator[Statistics]:
    """Record what is compiled inside the block. The counts of graphs and graph breaks are filled in when it ends.

    Compile caches are bypassed inside, since a graph from a cache does not go through the passes.
    """
    made, before = Statistics(), _counted()
    _active.append(made)
    try:
        with without_compile_caches():
            yield made
    finally:
        _active.remove(made)
        after = _counted()
        made.graphs, made.graph_breaks = after[0] - before[0], after[1] - before[1]


def _counted() -> tuple[int, int]:
    counters = dynamo_counters()
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def record(direction: str, traced: list[CollectiveInfo], graph: fx.Graph, passes: list[PassRecord]) -> None:
    """Add a graph that went through the passes to all open blocks."""
    if _active:
        made = GraphRecord(direction, tuple(traced), tuple(collectives(graph)), tuple(passes))
        for s in _active:
            s.records.append(made)


__all__ = ["GraphRecord", "Statistics", "record", "statistics"]
