"""Statistics on what was compiled in a `with statistics()` block: graphs, breaks, passes, collectives and seconds."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from dtensor.passes import CollectiveInfo, PassRecord
from dtensor.torch_private.compiling import dynamo_counters, without_compile_caches
from dtensor.torch_private.phases import Compilation, watch_compilations


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
        seconds: phase -> seconds of the wall clock that this rank spent in it, of all frames together. The phases are
            "tracing" (Dynamo and AOTAutograd), "passes" (those of this library), "generating code" and "compiling
            kernels" (Inductor), "loading" (from a package or another rank), "waiting" (for another rank that compiles)
            and "saving" (for a package or other ranks). One that did not happen is absent.
    """

    graphs: int = 0
    graph_breaks: int = 0
    records: list[GraphRecord] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def forward(self) -> list[CollectiveInfo]:
        """Collectives of the last forward (or inference) graph, after the passes."""
        return self._last("forward", "inference")

    @property
    def backward(self) -> list[CollectiveInfo]:
        """Collectives of the last backward graph, after the passes."""
        return self._last("backward")

    def began(self, compilation: Compilation) -> None:
        """As `dtensor.torch_private.phases.Watcher`."""

    def repeated(self, compilation: Compilation) -> None:
        """As `dtensor.torch_private.phases.Watcher`."""

    def ended(self, compilation: Compilation) -> None:
        """As `dtensor.torch_private.phases.Watcher`: its seconds count."""
        for phase, seconds in compilation.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def _last(self, *directions: str) -> list[CollectiveInfo]:
        found = [r for r in self.records if r.direction in directions]
        return list(found[-1].collectives) if found else []


_active: list[Statistics] = []


@contextmanager
def statistics(*, fresh: bool = True) -> Iterator[Statistics]:
    """Record what is compiled inside the block. The counts of graphs and graph breaks are filled in when it ends.

    A graph from a cache, a package or another rank does not go through the passes. So compile caches are bypassed
    inside, and this rank compiles by itself.

    Args:
        fresh: False leaves caches, packages and sharing as they are. What comes from there is not in `records`, and how
            long that took is in `seconds`.
    """
    made, before = Statistics(), _counted()
    _active.append(made)
    stop = watch_compilations(made)
    try:
        with without_compile_caches() if fresh else nullcontext():
            yield made
    finally:
        stop()
        _active.remove(made)
        after = _counted()
        made.graphs, made.graph_breaks = after[0] - before[0], after[1] - before[1]


def _counted() -> tuple[int, int]:
    counters = dynamo_counters()
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def record(
    direction: str,
    traced: list[CollectiveInfo],
    sent: list[CollectiveInfo],
    passes: list[PassRecord],
    *,
    resumed: bool = False,
) -> None:
    """Add a graph that went through passes to all open blocks. `resumed`: other passes ran on it before, and what they
    did is recorded already."""
    for s in _active:
        made = GraphRecord(direction, tuple(traced), tuple(sent), tuple(passes))
        if resumed and s.records and s.records[-1].direction == direction:
            before = s.records.pop()
            made = replace(made, traced=before.traced, passes=(*before.passes, *passes))
        s.records.append(made)


__all__ = ["GraphRecord", "Statistics", "record", "statistics"]
