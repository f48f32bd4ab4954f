"""Whether a graph is valid, checked after every pass that changed it. The rules are the functions in `CHECKS`.

`verify` takes a graph and the name of the pass that produced it. It raises a PassError that names the pass, the node
and the problem.
"""

import operator
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from dtensor.errors import PassError
from dtensor.job.groups import group_ranks
from dtensor.torch_private.core import FakeTensorMode, OpOverload

from . import ir, ordered
from .text import kind

Problem = tuple[fx.Node | None, str]


class State(NamedTuple):
    """What a node was when its value was last found to be right."""

    target: Any
    args: Any
    kwargs: Any
    value: Any


def _state(node: fx.Node) -> State:
    return State(node.target, node.args, node.kwargs, ir.value(node))


@dataclass
class Seen:
    """What need not be recomputed when the graph is verified again after another pass.

    Attributes:
        nodes: nodes whose values are right, in the state in which they were found. A node is unchanged if everything in
            its state is still the same object; whether its arguments have changed is checked separately, for each of
            them.
        calls: calls found to be right: the operator, the kinds of its arguments and of its result, without the data.
            Layers of a model repeat them.
    """

    nodes: dict[fx.Node, State] = field(default_factory=dict[fx.Node, State])
    calls: set[Hashable] = field(default_factory=set[Hashable])

    @staticmethod
    def of(graph: fx.Graph, *, traced: bool = False) -> "Seen":
        """Return what need not be verified in `graph`: the calls seen in all graphs traced together with it; and all
        its nodes if they were just `traced`, since their values were then computed from their arguments."""
        nodes = {node: _state(node) for node in graph.nodes} if traced else {}
        first = next(iter(graph.nodes), None)
        mode = first and ir.fake_mode(first)
        return Seen(nodes, _calls.setdefault(mode, set()) if mode is not None else set())

    def changed(self, graph: fx.Graph) -> list[fx.Node]:
        """Return the nodes of `graph` that changed, and those with an argument whose value changed."""
        known = self.nodes
        others = [n for n in graph.nodes if n not in known or any(map(operator.is_not, known[n], _state(n)))]
        revalued = [n for n in others if n in known and known[n].value is not ir.value(n)]
        readers = [user for n in revalued for user in n.users]
        return list(dict.fromkeys([*others, *readers]))


_calls: WeakKeyDictionary[FakeTensorMode, set[Hashable]] = WeakKeyDictionary()
"""Calls found to be right, by the mode of their fake tensors: forward and backward repeat those of the joint graph."""

_UNKNOWN_OUTPUT = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
_C10D_REDUCE_OPS = ir.REDUCE_OPS | {"band", "bor", "bxor"}
_C10D_REDUCTIONS = ("all_reduce", "reduce_scatter")


def verify(graph: fx.Graph | fx.GraphModule, pass_name: str, seen: Seen | None = None) -> None:
    """Verify `graph`, which the pass `pass_name` produced.

    Args:
        graph: the graph.
        pass_name: the pass that is named in the error.
        seen: what earlier calls found; the caller keeps it from one call to the next.

    Raises:
        PassError: the graph is invalid; it reports the first problem found.
    """
    graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
    seen = Seen() if seen is None else seen
    for check in CHECKS:
        for node, what in check(graph, seen):
            where = "" if node is None else f"{node.format_node() or node.name}: "
            raise PassError(f"after pass {pass_name!r} the graph is not valid: {where}{what}")


def _order(graph: fx.Graph, seen: Seen) -> Iterator[Problem]:
    known: set[fx.Node] = set()
    for node in graph.nodes:
        for x in node.all_input_nodes:
            if x not in known:
                yield node, f"uses %{x.name}, which is not defined above it"
        known.add(node)


def _lint(graph: fx.Graph, seen: Seen) -> Iterator[Problem]:
    try:
        graph.lint()
    except (RuntimeError, ValueError, AssertionError, AttributeError, TypeError) as error:
        yield None, str(error)


def _values_known(graph: fx.Graph, seen: Seen) -> Iterator[Problem]:
    for node in graph.nodes:
        if "val" not in node.meta and node.op == "call_function" and _gives_something(node):
            yield node, "has no meta['val']; write nodes with ir.insert, which computes it"
    for node in ir.calls(graph):
        x = node.args[0]
        if not (isinstance(x, fx.Node) and isinstance(ir.value(x), torch.Tensor)):
            yield node, "communicates a value not known to be a tensor: its argument has no meta['val']"


def _gives_something(node: fx.Node) -> bool:
    return not isinstance(node.target, OpOverload) or bool(ir.schema(node.target).returns)


def _values_right(graph: fx.Graph, seen: Seen) -> Iterator[Problem]:
    for node in seen.changed(graph):
        if _can_propagate(node) and ((call := _call(node)) is None or call not in seen.calls):
            try:
                found = ir.propagate(node)
            except Exception as error:  # whatever an operator raises on wrong arguments
                yield node, f"does not run on the values of its arguments: {type(error).__name__}: {error}"
                continue
            if not _agree(found, ir.value(node)):
                yield node, f"meta['val'] is {kind(ir.value(node))}, but its arguments give {kind(found)}"
                continue
            if call is not None:
                seen.calls.add(call)
        seen.nodes[node] = _state(node)


def _call(node: fx.Node) -> Hashable:
    """The call and the kind of its result, as a key; None if it cannot be hashed."""
    try:
        return node.target, ir.likeness(node.args), ir.likeness(node.kwargs), ir.likeness(node)
    except TypeError:
        return None


def _can_propagate(node: fx.Node) -> bool:
    if node.op != "call_function" or ir.mutates(node):
        return False
    if not isinstance(node.target, OpOverload):
        return ir.is_pure(node)
    if _UNKNOWN_OUTPUT.intersection(node.target.tags):
        return False
    return all(ir.value(x) is not None for x in node.all_input_nodes)


def _agree(a: Any, b: Any) -> bool:
    """Whether two values have the same structure, shapes and dtypes, as far as they are known."""
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_agree(x, y) for x, y in zip(a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.dim() == b.dim() and all(_sizes_agree(x, y) for x, y in zip(a.shape, b.shape))
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    return a is None or b is None or _sizes_agree(a, b)


def _sizes_agree(a: Any, b: Any) -> bool:
    if isinstance(a, (int, float, bool, str)) and isinstance(b, (int, float, bool, str)):
        return a == b
    return str(a) == str(b) or ir.same(a, b) or _unbacked(a) or _unbacked(b)


def _unbacked(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


def _groups_exist(graph: fx.Graph, seen: Seen) -> Iterator[Problem]:
    known: set[str] = set()
    for node in ir.communicating(graph):
        group = ir.group(node)
        if group is None or group in known:
            continue
        try:
            group_ranks(group)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            yield node, f"there is no process group {group!r}: {error}"
        known.add(group)


def _reductions_known(graph: fx.Graph, seen: Seen) -> Iterator[Problem]:
    for node in ir.communicating(graph):
        c = ir.collective(node)
        if c is not None and c.reduce_op is not None and c.reduce_op not in ir.REDUCE_OPS:
            yield node, f"reduces by {c.reduce_op!r}, which is not one of {', '.join(sorted(ir.REDUCE_OPS))}"
        target, args = ordered.called(node)
        if ir.STARTS.get(target) in _C10D_REDUCTIONS and args[1] not in _C10D_REDUCE_OPS:
            yield node, f"reduces by {args[1]!r}, which is not one of {', '.join(sorted(_C10D_REDUCE_OPS))}"


def _waits(graph: fx.Graph, seen: Seen) -> Iterator[Problem]:
    place = {node: k for k, node in enumerate(graph.nodes)}
    for node in place:
        if ordered.called(node)[0] not in ir.STARTS:
            continue
        # A coalesced start returns a list, and each of its items is waited for.
        results = list(node.users) if isinstance(ir.value(node), (tuple, list)) else [node]
        for result in results:
            yield from _waits_of(result, place)


def _waits_of(start: fx.Node, place: dict[fx.Node, int]) -> Iterator[Problem]:
    users = [user for user in start.users if not ordered.is_wrapped(user) or start in user.args[2:]]
    waits = [user for user in users if ordered.called(user)[0] in (ir.WAIT, ir.WAIT_FOR_ALL)]
    if len(waits) != 1:
        yield start, f"is waited for {len(waits)} times; each start must have exactly one wait"
    for user in users:
        if user.op == "output":
            yield start, "is returned before it is waited for"
        elif waits and place[user] < place[waits[0]]:
            yield user, f"uses %{start.name} before %{waits[0].name} waits for it"


Check = Callable[[fx.Graph, Seen], Iterator[Problem]]

CHECKS: tuple[Check, ...] = (
    _order,
    _lint,
    _values_known,
    _groups_exist,
    _reductions_known,
    _values_right,
    _waits,
)
"""The conditions that every valid graph fulfils. Each check yields the offending nodes and what is wrong with them."""

__all__ = ["CHECKS", "verify"]
