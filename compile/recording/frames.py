"""What is compiled: Dynamo's frames, their graphs, and the history of each collective in them.

    Frame                 a function that Dynamo compiled, once for each set of guards
      Story               one of its graphs: joint, forward, backward or inference
        Change            what a pass did to its collectives
        Collective        what the graph sends when it runs

A collective that the program requests gets a number when it is first seen, in the joint graph or in the graph itself.
Passes that copy a node's provenance pass the number on, which shows which passes changed a collective, which one
removed it, and what that saved. The last `KEPT` frames are kept here, without their graphs; `dtensor.compile.report`
and manifests are made from them.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx

from dtensor.dispatch.whole_graph import Told
from dtensor.mesh.provenance import MOVE, PASSES, TRACED, Moved
from dtensor.passes import CollectiveInfo
from dtensor.passes.graph import groups, ir
from dtensor.passes.graph.count import describe
from dtensor.passes.graph.source import FRAME, Source, module, module_class, source, tell_modules
from dtensor.prices.links import Link
from dtensor.torch_private.phases import compile_context

from ..estimates.formula import Formula, formula
from ..estimates.timeline import Timeline, seconds_of, timeline
from ..estimates.traffic import Sent, traffic
from .node_remarks import asked, makers, readers, sends_parameter

KEPT = 256
"""The number of frames that are kept."""

UNNAMED = "graph"
"""Name of a frame whose function is unknown."""

DIRECTIONS = ("joint", "forward", "backward", "inference")


@dataclass(frozen=True)
class Asked:
    """A collective as the program requested it.

    Attributes:
        number: its number in the frame.
        op: see `dtensor.passes.CollectiveInfo`.
        group: see `dtensor.passes.CollectiveInfo`.
        bytes: see `dtensor.passes.CollectiveInfo`.
        how: "explicit", "implicit" or "unknown".
        moved: the redistribution step that it performs; None if unknown.
        where: the line of the user's code; None if there is none.
        module: path of the module; "" if unknown.
        kind: class of the module, such as "nn.Linear"; "" if unknown.
        backward: whether it was traced in the backward.
    """

    number: int
    op: str
    group: str
    bytes: int
    how: str
    moved: Moved | None
    where: Source | None
    module: str
    kind: str
    backward: bool

    @property
    def move(self) -> str:
        """The placements before and after, such as `P->S(0)`; "" if unknown."""
        return str(self.moved or "")


@dataclass(frozen=True)
class Collective:
    """A collective that a graph sends.

    Attributes:
        sent: the call.
        asked: numbers of the requested collectives that it implements.
        passes: the passes that created or changed it, in order.
        how: as in `Asked`; "explicit and implicit" if it implements both kinds.
        move: the placements before and after, as recorded on the node itself.
        where: the line of the user's code, as recorded on the node itself.
        module: path of the module, as recorded on the node itself.
        kind: class of the module, as recorded on the node itself.
        start: estimated seconds from the start of the graph to its start.
        end: estimated seconds from the start of the graph to its end.
        exposed: estimated seconds for which computation waits for it.
        formula: its bytes and seconds in sizes of axes and symbolic sizes; None if they do not follow from the plan.
        fixed: estimated seconds that it would take without any bytes.
        link: the constants of the link that it goes over.
        parameter: whether a parameter is sent.
        makers: names of the operators that computed what it sends; "" for inputs of the graph.
        readers: names of the first operators that compute with its result; "output" where the graph returns it.
    """

    sent: Sent
    asked: tuple[int, ...]
    passes: tuple[str, ...]
    how: str
    move: str
    where: Source | None
    module: str
    kind: str
    start: float
    end: float
    exposed: float
    formula: Formula | None
    fixed: float
    link: Link
    parameter: bool
    makers: tuple[str, ...]
    readers: tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """What one run of a pass did to the collectives of a graph.

    Attributes:
        name: name of the pass.
        direction: the graph.
        stage: how many changes of the graph there were, this one included.
        made: number of collectives that it created.
        gone: number of collectives that it removed.
        before: bytes on the wire of all collectives before the pass.
        after: bytes on the wire of all collectives after the pass.
        removed: numbers of the requested collectives that no collective implements any more.
    """

    name: str
    direction: str
    stage: int
    made: int
    gone: int
    before: int
    after: int
    removed: tuple[int, ...]


@dataclass
class Story:
    """The history of one graph.

    Attributes:
        direction: "joint", "forward", "backward" or "inference".
        stages: "input" and the names of the passes that changed it, in order.
        sent: the collectives that it sends, in order.
        timeline: when it computes and communicates; None until it is finished.
        nodes: number of its nodes.
        flops: floating-point operations of its products on this rank, after the passes; None if they were not counted.
            What the backward computes again is not in the joint graph.
    """

    direction: str
    stages: list[str] = field(default_factory=list)
    sent: list[Collective] = field(default_factory=list)
    timeline: Timeline | None = None
    nodes: int = 0
    flops: float | None = None


@dataclass
class Alternative:
    """What a frame would take with another option (`dtensor.compile.backends.alternatives`).

    Attributes:
        option: the option of the backend that is changed.
        seconds: direction -> estimated seconds of that graph.
        peak: direction -> the most bytes held at once.
        exposed: direction and number of a requested collective -> estimated seconds for which computation waits for it.
        failed: why it could not be priced; "" if it was.
    """

    option: str
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    peak: dict[str, int] = field(default_factory=dict[str, int])
    exposed: dict[tuple[str, int], float] = field(default_factory=dict[tuple[str, int], float])
    failed: str = ""


@dataclass
class Frame:
    """A function that Dynamo compiled.

    Attributes:
        name: name of the function; "graph" while it is unknown.
        file: file of the function.
        line: a line in the function.
        compile_id: Dynamo's id, such as "0/1" for the first recompilation of the first function.
        stories: direction -> history of that graph.
        asked: number -> collective as the program requested it.
        changes: what the passes did, in order.
        alternatives: what its graphs would take with other options, where it is dumped.
        decided: what is said of layouts decided for the whole graph; None where operators choose for themselves.
        breaks: graph breaks, in torch's words.
        recompiled: reasons for the recompilation, in torch's words.
        roots: folders of dumps to which it is written.
        folders: folder of a dump -> the frame's own folder in it.
    """

    name: str = UNNAMED
    file: str = ""
    line: int = 0
    compile_id: str = ""
    stories: dict[str, Story] = field(default_factory=dict)
    asked: dict[int, Asked] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    alternatives: list[Alternative] = field(default_factory=list["Alternative"])
    decided: Told | None = None
    breaks: list[str] = field(default_factory=list)
    recompiled: list[str] = field(default_factory=list)
    roots: list[Path] = field(default_factory=list)
    folders: dict[Path, Path] = field(default_factory=dict)

    def identify(self, graph: fx.Graph) -> None:
        """Find out from a graph which function it comes from."""
        traces = [node.meta["stack_trace"] for node in graph.nodes if node.meta.get("stack_trace")]
        m = FRAME.search(traces[0]) if traces and not self.file else None
        if m is not None:
            self.name, self.file, self.line = m["function"], m["file"], int(m["line"])

    def story(self, direction: str) -> Story:
        """Return the history of the graph of that direction."""
        return self.stories.setdefault(direction, Story(direction))

    def finish(self, direction: str, graph: fx.Graph) -> None:
        """Record what `graph` sends when it runs, and when. Links are those of the meshes known to the passes."""
        story = self.story(direction)
        story.timeline, story.nodes = timeline(graph), len(graph.nodes)
        spans = {s.number: s for s in story.timeline.spans if s.communicates}
        story.sent = [self._collective(node, s, spans[k]) for k, (node, s) in enumerate(traffic(graph))]

    def _collective(self, node: fx.Node, s: Sent, span: Any) -> Collective:
        numbers = node.meta.get(TRACED, ())
        origins = [self.asked[n] for n in numbers if n in self.asked]
        hows = {a.how for a in origins} or {asked(node)}
        how = hows.pop() if len(hows) == 1 else "explicit and implicit"
        move = str(node.meta[MOVE]) if MOVE in node.meta else ""
        found = formula(s, [a.moved for a in origins])
        passes = tuple(dict.fromkeys(node.meta.get(PASSES, ())))
        place = source(node), module(node), module_class(node)
        return Collective(
            s, numbers, passes, how, move, *place, span.start, span.end, span.exposed, found,
            seconds_of(replace(s, size=0)), groups.link(s.group), sends_parameter(node), makers(node), readers(node),
        )  # fmt: skip

    def number(self, node: fx.Node, info: CollectiveInfo) -> None:
        """Give a collective a number, unless it or one that it was made from has one."""
        if TRACED in node.meta:
            return
        n = len(self.asked)
        node.meta[TRACED] = (n,)
        backward = bool(node.meta.get("autograd_backward")) or _is_backward(node)
        how, moved = asked(node), node.meta.get(MOVE)
        place = source(node), module(node), module_class(node)
        self.asked[n] = Asked(n, info.op, info.group, info.bytes, how, moved, *place, backward)


class Follower:
    """Follows the collectives of one graph through the passes. `passes.run(observe=...)` calls it."""

    def __init__(self, frame: Frame, direction: str) -> None:
        self.frame: Frame = frame
        self.direction: str = direction
        self.before: dict[fx.Node, CollectiveInfo] = {}

    def __call__(self, stage: int, name: str, graph: fx.Graph) -> None:
        self.frame.identify(graph)
        if stage == 0:
            tell_modules(graph)
        now = _sent(graph)
        new = [node for node in now if node not in self.before]
        if stage:
            for node in new:
                node.meta[PASSES] = (*node.meta.get(PASSES, ()), name)
            self.frame.changes.append(self._change(stage, name, now, new))
        for node in new:
            self.frame.number(node, now[node])
        stages = self.frame.story(self.direction).stages
        stages[stage:] = [name]
        self.before = now

    def resume(self, graph: fx.Graph) -> None:
        """Continue with a graph that was followed before."""
        self.before = _sent(graph)

    def _change(self, stage: int, name: str, now: dict[fx.Node, CollectiveInfo], new: list[fx.Node]) -> Change:
        gone = [node for node in self.before if node not in now]
        left = {n for node in now for n in node.meta.get(TRACED, ())}
        removed = [n for node in gone for n in node.meta.get(TRACED, ()) if n not in left]
        before, after = (sum([i.bytes for i in infos.values()]) for infos in (self.before, now))
        return Change(name, self.direction, stage, len(new), len(gone), before, after, tuple(dict.fromkeys(removed)))


def _sent(graph: fx.Graph) -> dict[fx.Node, CollectiveInfo]:
    return {
        node: info for node in ir.communicating(graph) if (info := describe(node)) is not None and info.group_size > 1
    }


def _is_backward(node: fx.Node) -> bool:
    return str(node.meta.get("partitioner_tag")).endswith("backward")


_frames: WeakKeyDictionary[object, Frame] = WeakKeyDictionary()
_recent: deque[Frame] = deque(maxlen=KEPT)


def current_frame() -> Frame:
    """Return the frame that is being compiled in this thread; a new one if Dynamo is not compiling."""
    context = compile_context()
    found = _frames.get(context) if context is not None else None
    if found is None:
        found = Frame(compile_id=str(getattr(context, "compile_id", None) or ""))
        _recent.append(found)
        if context is not None:
            _frames[context] = found
    return found


def remember(frame: Frame) -> None:
    """Keep a frame that was compiled elsewhere."""
    _recent.append(frame)


def recent_frames() -> list[Frame]:
    """Return the frames that were compiled last, oldest first."""
    return list(_recent)


__all__ = [
    "Alternative",
    "Asked",
    "Change",
    "Collective",
    "Follower",
    "Frame",
    "Story",
    "current_frame",
    "recent_frames",
]
__all__ += ["remember"]
