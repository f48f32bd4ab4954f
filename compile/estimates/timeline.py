"""When a graph computes and when it communicates: simulates its schedule on one rank, with estimated times.

Nodes run in graph order, in the two streams of `dtensor.prices.streams`. A wait blocks computation until its collective
has ended, and the time blocked is the exposed part of the collective. A collective that is not split into start and
wait is exposed entirely. Where sending takes a part of the processor from computation, as over gloo, that part of a
collective is exposed whatever is computed meanwhile (`Machine.taken`).

Times come from `dtensor.prices.links`, with the links of the known meshes, and from `estimate` for local operators.
Memory is what this rank holds: inputs of a step stay until its end, and any other tensor is freed after its last use.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from dtensor.comm.host_memory import to_host
from dtensor.passes.graph import estimate, groups, ir
from dtensor.passes.graph.ordered import called
from dtensor.passes.graph.text import target_name
from dtensor.prices.streams import Flight, Streams

from .traffic import Sent, is_wait, sent


@dataclass(frozen=True)
class Span:
    """One piece of work. Times are in seconds from the start of the graph.

    Attributes:
        name: the operator or collective.
        communicates: whether it is a collective.
        start: when it starts.
        end: when it ends.
        exposed: seconds for which computation waits for it.
        number: index of the collective among those of the graph; -1 for computation.
    """

    name: str
    communicates: bool
    start: float
    end: float
    exposed: float = 0.0
    number: int = -1


@dataclass
class Timeline:
    """What runs when in a graph.

    Attributes:
        spans: computation and communication, by start time.
        memory: pairs of time in seconds and bytes held, one for each node.
        order: the order of starts and waits: the number of a collective where it starts, and `~number` where it is
            waited for.
        gaps: seconds of computation before each entry of `order`, from the one before on.
        taken: for each collective the part of its time that sending takes from computation.
        seconds: when the graph ends.
        computing: seconds of computation where nothing is sent.
    """

    spans: list[Span] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    seconds: float = 0.0
    computing: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds in which the rank only waits for others."""
        return sum([s.exposed for s in self.spans])

    @property
    def communicating(self) -> float:
        """Seconds of communication."""
        return sum([s.end - s.start for s in self.spans if s.communicates])

    @property
    def peak(self) -> int:
        """The most bytes held at once."""
        return max([held for _, held in self.memory], default=0)


def timeline(graph: fx.Graph) -> Timeline:
    """Simulate the schedule of `graph`, with the links of the meshes given to `dtensor.passes.graph.groups.known`."""
    return _Run(graph).done()


def seconds_of(s: Sent) -> float:
    """Estimate the time of a collective in seconds."""
    op = "all_gather" if s.op == "broadcast" else s.op
    return groups.seconds(op, s.size, s.group) if s.ranks else 0.0


class _Run:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.machine = graph, estimate.machine_of(graph)
        self.streams, self.computed = Streams(), 0.0
        self.started: dict[fx.Node, int] = {}
        self.flights: list[tuple[str, Flight]] = []
        self.made = Timeline()
        self.memory, self.took = _Memory(graph), estimate.seconds(graph, self.machine)

    def done(self) -> Timeline:
        for node in self.graph.nodes:
            self.step(node)
            self.made.memory.append((self.streams.now, self.memory.after(node)))
        for k, (name, f) in enumerate(self.flights):
            self.made.spans.append(Span(name, True, f.start, f.end, f.exposed, k))
        self.made.spans.sort(key=lambda s: (s.start, s.end))
        self.made.seconds = self.streams.end
        return self.made

    def step(self, node: fx.Node) -> None:
        if node.op != "call_function":
            return
        found = sent(node)
        if found is not None and len(found.ranks) != 1:
            self.communicate(node, found)
        elif is_wait(called(node)[0]):
            self.wait(node)
        elif took := self.took.get(node, 0.0):
            begin = self.streams.now
            self.streams.compute(took)
            self.made.spans.append(Span(target_name(called(node)[0]), False, begin, self.streams.now))
            self.made.computing += took
            self.computed += took

    def communicate(self, node: fx.Node, found: Sent) -> None:
        taken = self.machine.taken(groups.link(found.group), _only_leaves(node))
        k = self.started[node] = len(self.flights)
        self.flights.append((found.op, self.streams.start(seconds_of(found), taken)))
        self.made.taken.append(taken)
        self.mark(k)
        if not found.starts:
            self.streams.wait(self.flights[k][1])

    def wait(self, node: fx.Node) -> None:
        todo = list(called(node)[1])
        while todo:
            x = todo.pop()
            if isinstance(x, fx.Node):
                if x in self.started:
                    self.mark(~self.started[x])
                    self.streams.wait(self.flights[self.started[x]][1])
                    return
                todo += x.all_input_nodes if ir.aliases(x) else []

    def mark(self, entry: int) -> None:
        self.made.order.append(entry)
        self.made.gaps.append(self.computed)
        self.computed = 0.0


class _Memory:
    """Bytes held after each node, in the order of the graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.root: dict[fx.Node, fx.Node] = {}
        self.dies: dict[fx.Node, list[fx.Node]] = {}
        self.held = 0
        last: dict[fx.Node, fx.Node] = {}
        kept = set[fx.Node]()
        is_backward = any(n.name.startswith("tangents") for n in graph.find_nodes(op="placeholder"))
        for node in graph.nodes:
            inputs = node.all_input_nodes
            shares = node.op == "call_function" and ir.aliases(node) and inputs
            self.root[node] = self.root[inputs[0]] if shares else node
            for x in (*inputs, node):
                last[self.root[x]] = node
            if node.op == "output" or _stays(node, is_backward):
                kept.update([self.root[x] for x in (*inputs, node)])
        for root, node in last.items():
            if root not in kept:
                self.dies.setdefault(node, []).append(root)

    def after(self, node: fx.Node) -> int:
        """Bytes held once `node` has run, before the tensors it was the last to use are freed."""
        self.held += _bytes(node) if self.root[node] is node else 0
        peak = self.held
        self.held -= sum([_bytes(x) for x in self.dies.get(node, ())])
        return peak


def _stays(node: fx.Node, is_backward: bool) -> bool:
    """Whether an input belongs to the caller; a backward owns its tangents and saved tensors."""
    if node.op == "placeholder" and is_backward:
        return node.name.startswith("primals")
    return node.op in ("placeholder", "get_attr")


def _only_leaves(start: fx.Node) -> bool:
    """Whether nothing computes with what a collective brings, as with gradients: it is copied, or sent on, and leaves
    the graph."""
    todo, seen = [start], {start}
    while todo:
        for user in todo.pop().users:
            if user not in seen and user.op != "output":
                if not (estimate.is_free(user) or user.target in COPIES or sent(user) is not None):
                    return False
                seen.add(user)
                todo.append(user)
    return True


COPIES = (ir.aten.clone.default, ir.aten.cat.default, ir.aten._to_copy.default)


def _bytes(node: fx.Node) -> int:
    """Bytes that a node allocates; the output node, and what is on the host, allocate nothing."""
    if node.op == "output" or called(node)[0] is to_host:
        return 0
    return sum(map(estimate.bytes_of, ir.tensors(node)))


def replayed(
    order: Sequence[int], gaps: Sequence[float], taken: Sequence[float], computing: float, took: Sequence[float]
) -> tuple[float, list[float]]:
    """Simulate a schedule again, with other times of its collectives.

    Args:
        order: see `Timeline`.
        gaps: see `Timeline`.
        taken: see `Timeline`.
        computing: seconds of computation in all.
        took: seconds of each collective.

    Returns:
        When the graph ends, and the exposed seconds of each collective.
    """
    streams, waited, flights = Streams(), set(order), dict[int, Flight]()
    for entry, gap in zip(order, gaps, strict=True):
        streams.compute(gap)
        if entry >= 0:
            flights[entry] = streams.start(took[entry], taken[entry])
        if entry < 0 or ~entry not in waited:
            streams.wait(flights[entry if entry >= 0 else ~entry])
    streams.compute(computing - sum(gaps))
    return streams.end, [flights[k].exposed for k in range(len(took))]


__all__ = ["Span", "Timeline", "replayed", "seconds_of", "timeline"]
