"""What the passes share: reading collectives from an FX graph, and writing nodes into it.

Read a node with `collective`, a frozen description of one redistribution operator, and `value`, its fake tensor. Write
with `insert` or `emit`, which compute `meta["val"]` and copy the provenance of another node, and `replace`, which keeps
the memory layout that the rest of the graph was traced with.
"""

import functools
import operator
from collections.abc import Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from dtensor.comm.collectives import ops
from dtensor.mesh.provenance import NOTES, OPERATOR, TRACED, Travels
from dtensor.prices import operators
from dtensor.torch_private.core import FakeTensor, FakeTensorMode, OpOverload, c10d, schema, tree_leaves, wait_tensors
from dtensor.torch_private.symbolic_sizes import without_guards

from . import ordered, steps

aten: Any = torch.ops.aten

REDUCE_OPS = frozenset(("sum", "avg", "max", "min", "product"))
"""The reductions that a redistribution operator accepts."""

LINEAR = frozenset(("sum", "avg"))
"""The reductions f with f(a) + f(b) = f(a + b)."""

FIELDS: dict[Any, Any] = {
    "all_gather": ("x", "gather_dim", "size", "group"),
    "reduce_scatter": ("x", "reduce_op", "scatter_dim", "group"),
    "all_reduce": ("x", "reduce_op", "group"),
    "all_to_all": ("x", "gather_dim", "scatter_dim", "size", "group"),
    "shard": ("x", "scatter_dim", "group"),
    "collective_permute": ("x", "senders", "group"),
}
"""Operator name -> the fields of `Collective` that are its arguments, in order."""

TARGETS = {name: getattr(ops, name).default for name in FIELDS}
_NAMES = {target: name for name, target in TARGETS.items()}

WAIT = c10d.wait_tensor.default
WAIT_FOR_ALL = None if wait_tensors is None else wait_tensors.default
"""Waits for a list of tensors and returns the list; None if torch has no such operator. `raise` replaces it by one
`WAIT` for each item."""

STARTS: dict[Any, str] = {
    c10d.all_reduce.default: "all_reduce",
    c10d.all_gather_into_tensor.default: "all_gather",
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.all_to_all_single.default: "all_to_all",
    ops.all_gather_start.default: "all_gather",
    ops.all_to_all_start.default: "all_to_all",
    ops.all_reduce_start.default: "all_reduce",
    ops.collective_permute_start.default: "collective_permute",
    c10d.all_reduce_coalesced.default: "all_reduce",
    c10d.all_gather_into_tensor_coalesced.default: "all_gather",
    c10d.reduce_scatter_tensor_coalesced.default: "reduce_scatter",
}
"""Start operator, a functional collective or one of ours -> the collective it starts. The group is the last argument of
each."""

_COMMUNICATING = dict.fromkeys((*_NAMES, *STARTS))

ALL_TO_ALLS = (c10d.all_to_all_single.default, ops.all_to_all_start.default)
"""The starts that send each rank as many rows as their lists of splits state."""

_OF_ONE_VALUE = frozenset(
    (
        *("val", "tensor_meta", "eager_input_vals", "unbacked_bindings", "example_value"),
        *[note for note in NOTES if note.travels in (Travels.NEVER, Travels.TO_THE_NEXT)],
    )
)
"""What `meta` holds of a node's value alone, by torch and by this library. Everything else is provenance."""

_OF_ONE_CALL = tuple([note for note in NOTES if note.travels is Travels.WITH_THE_CALL])
_HANDED_ON = tuple([note for note in NOTES if note.travels is Travels.TO_THE_NEXT])

# Operators that share memory with their argument although their schema does not state it.
_HIDDEN_ALIASES = frozenset((aten._unsafe_view.default, WAIT, WAIT_FOR_ALL, operator.getitem))


@dataclass(frozen=True)
class Collective:
    """One call of a `torch.ops.dtensor` operator. Dims count from the front. Fields that the operator does not have are
    None."""

    op: str
    x: fx.Node
    group: str
    reduce_op: str | None = None
    gather_dim: int | None = None
    scatter_dim: int | None = None
    size: int | fx.Node | None = None
    senders: tuple[int, ...] | None = None


def is_collective(node: object, name: str | None = None) -> bool:
    """Whether `node` calls a redistribution operator, or the one called `name` if given."""
    found = _NAMES.get(node.target) if isinstance(node, fx.Node) else None
    return found is not None and name in (None, found)


def collective(node: object, name: str | None = None) -> Collective | None:
    """Describe a collective node; None if `node` does not call a redistribution operator (or the one called `name`)."""
    if not isinstance(node, fx.Node):
        return None
    target, args = ordered.called(node) if ordered.is_wrapped(node) else (node.target, node.args)
    op = _NAMES.get(target)
    if op is None or name not in (None, op):
        return None
    assert not node.kwargs, f"{node.format_node()}: a traced operator takes its arguments by position"
    fields: dict[str, Any] = dict(zip(FIELDS[op], args, strict=True))
    ndim = value(fields["x"]).dim()
    for key in ("gather_dim", "scatter_dim"):
        if fields.get(key, 0) < 0:
            fields[key] += ndim
    return Collective(op, **fields)


def calls(graph: fx.Graph, *names: str) -> list[fx.Node]:
    """Return the calls of the redistribution operators called `names`, or of all of them, in graph order."""
    return _calls(graph, [TARGETS[name] for name in names or TARGETS])


def communicating(graph: fx.Graph) -> list[fx.Node]:
    """Return the calls of redistribution operators and of operators that start a collective, in graph order, those
    among them that are made to run after others (`ordered`)."""
    later = [node for node in ordered.wrapped(graph) if ordered.called(node)[0] in _COMMUNICATING]
    return sorted([*_calls(graph, _COMMUNICATING), *later]) if later else _calls(graph, _COMMUNICATING)


def _calls(graph: fx.Graph, targets: Iterable[Any]) -> list[fx.Node]:
    return sorted([n for t in targets for n in graph.find_nodes(op="call_function", target=t, sort=False)])


def group(node: fx.Node) -> str | None:
    """Return the name of the process group of a collective or of a functional start; None for other nodes."""
    target, args = ordered.called(node)
    if target in STARTS:
        return args[-1] if isinstance(args[-1], str) else None
    c = collective(node)
    return c.group if c is not None else None


def value(node: fx.Node) -> Any:
    """Return the traced value of a node: a FakeTensor, a (symbolic) number, a tuple of these, or None if unknown."""
    return node.meta.get("val")


def tensors(node: fx.Node) -> list[torch.Tensor]:
    """Return the tensors among the results of a node."""
    val = value(node)
    if isinstance(val, torch.Tensor):
        return [val]
    return [x for x in tree_leaves(val) if isinstance(x, torch.Tensor)] if isinstance(val, (tuple, list, dict)) else []


def same(a: Any, b: Any) -> bool:
    """Whether two sizes, or two sequences of sizes, are known to be equal; adds no guard."""
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return a is b or statically_known_true(a == b)


def same_kind(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fake tensors are known to have equal shapes and dtypes."""
    return a.dtype == b.dtype and same(tuple(a.shape), tuple(b.shape))


def same_strides(a: torch.Tensor, strides: tuple[Any, ...] | list[Any]) -> bool:
    """Whether `a` is known to have `strides`, ignoring dims of length one, or to have no elements."""
    alike = all(same(n, 1) or same(s, t) for n, s, t in zip(a.shape, a.stride(), strides, strict=True))
    return alike or any(same(n, 0) for n in a.shape)


def dense_strides(shape: Any, order: list[int] | None = None) -> list[Any]:
    """Return the strides of a dense tensor whose dims are laid out in memory in `order`, outermost first."""
    strides: list[Any] = [1] * len(shape)
    step = 1
    for dim in reversed(order if order is not None else range(len(shape))):
        strides[dim], step = step, step * shape[dim]
    return strides


def is_contiguous(x: torch.Tensor) -> bool:
    """Whether `x` is known to be contiguous; adds no guard."""
    return same_strides(x, dense_strides(x.shape))


def fake_mode(node: fx.Node) -> FakeTensorMode | None:
    """Return the mode of the first fake tensor among the inputs of `node`, else (as for a call on sizes only) in the
    graph."""
    for x in (*node.all_input_nodes, *node.graph.nodes):
        leaves = value(x) if isinstance(value(x), (tuple, list)) else (value(x),)
        for leaf in leaves:
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return None


@contextmanager
def inside(mode: FakeTensorMode | None) -> Iterator[None]:
    """Run operators on fakes of `mode` without adding guards on, or new symbols for, its symbolic sizes."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if mode is not None:
            stack.enter_context(mode)
            if mode.shape_env is not None:
                stack.enter_context(without_guards(mode.shape_env))
        yield


def propagate(node: fx.Node) -> Any:
    """Compute the value of a call from the values of its arguments."""
    if is_result(node):
        return evaluated(node)
    with inside(fake_mode(node)):
        return evaluated(node)


def is_result(node: fx.Node) -> bool:
    """Whether a node takes one of several results out of a call."""
    return node.target is operator.getitem and not isinstance(value(node.args[0]), torch.Tensor)  # pyright: ignore


def evaluated(node: fx.Node) -> Any:
    """Like `propagate`, for a caller that is `inside` the mode already."""
    args, kwargs = map_arg((node.args, node.kwargs), value)
    assert callable(node.target), f"{node.format_node()} is not a call"
    return node.target(*args, **kwargs)


def likeness(x: Any) -> Hashable:
    """Return a hashable key for what an argument contributes to the kind of a call's result: everything about a tensor
    except its data; a node counts as its value. Calls of one operator on arguments with equal keys give results with
    equal keys.

    Raises:
        TypeError: an argument cannot be hashed.
    """
    if type(x) in _PLAIN:
        return type(x), x
    x = value(x) if isinstance(x, fx.Node) else x
    if isinstance(x, torch.Tensor):
        return type(x), x.dtype, x.device, x.layout, likeness(tuple(x.shape)), _strides(x)
    if isinstance(x, (tuple, list)):
        return tuple([likeness(item) for item in x])
    if isinstance(x, dict):
        return tuple([(key, likeness(item)) for key, item in x.items()])
    if isinstance(x, slice):
        return slice, likeness((x.start, x.stop, x.step))
    if isinstance(x, _SYMBOLIC):
        return type(x), str(x)
    hash(x)
    return type(x), x


_PLAIN = frozenset((int, str, bool, float, type(None), torch.dtype, torch.device))


def _strides(x: torch.Tensor) -> Hashable:
    return (likeness(x.stride()), likeness(x.storage_offset())) if x.layout is torch.strided else None


def traced(nodes: list[fx.Node]) -> tuple[int, ...]:
    """Return the numbers of the program's own collectives that `nodes` implement, where a dump numbered them."""
    return tuple(dict.fromkeys([number for node in nodes for number in node.meta.get(TRACED, ())]))


def gradients(graph: fx.Graph) -> dict[fx.Node, int]:
    """Map nodes of a backward to the result they lead to: for each result, the chain of calls on a single value that
    ends in it -> the position of that result among those that are tensors. Ranks with other sizes may compute the
    results in another order and also return other sizes, but these positions follow from the program.

    The pieces of one value count as that value: a padded value is split and joined again, and not every rank pads.
    """
    if not any(node.name.startswith("tangents_") for node in graph.find_nodes(op="placeholder")):
        return {}
    output: Any = graph.output_node()
    found: dict[fx.Node, int] = {}
    results = [x for x in output.args[0] if isinstance(x, fx.Node) and isinstance(value(x), torch.Tensor)]
    for place, node in enumerate(results):
        while isinstance(node, fx.Node) and node not in found:
            found[node] = place
            made_of = {x.all_input_nodes[0] if x.target is operator.getitem else x for x in node.all_input_nodes}
            node = made_of.pop() if len(made_of) == 1 else None
    return found


def provenance(node: fx.Node) -> dict[str, Any]:
    """Return the part of `node.meta` that records where the node came from."""
    return {key: item for key, item in node.meta.items() if key not in _OF_ONE_VALUE}


def insert(
    before: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, like: fx.Node
) -> fx.Node:
    """Insert a call before `before`, compute its value, and copy the provenance of `like`.

    Args:
        before: the node to insert the call before.
        target: the operator, such as `torch.ops.aten.mul.Tensor`.
        args: its arguments, nodes among them.
        kwargs: its arguments by name.
        like: the node whose place in the program the new one has.

    Returns:
        The new node.
    """
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)
    node.meta = provenance(like)
    if like.target is not target:
        for note in _OF_ONE_CALL:
            node.meta.pop(note, None)
    node.meta["val"] = propagate(node)
    return node


def emit(before: fx.Node, c: Collective, *, like: fx.Node) -> fx.Node:
    """Insert the collective `c` before `before`."""
    return insert(before, TARGETS[c.op], tuple(getattr(c, f) for f in FIELDS[c.op]), like=like)


def replace(node: fx.Node, new: fx.Node) -> fx.Node:
    """Replace `node` by `new`, copied to the memory layout of `node` where that differs, and erase `node`.

    Returns:
        The node that replaced it.
    """
    wanted = value(node)
    if not same_strides(value(new), wanted.stride()):
        order = memory_order(wanted)
        assert order is not None, f"{node.format_node()}: not dense, so nothing may stand for it"
        permuted = order != sorted(order)
        if permuted:
            new = insert(node, aten.permute.default, (new, order), like=node)
        new = copy(node, new)
        if permuted:
            back = [order.index(dim) for dim in range(len(order))]
            new = insert(node, aten.permute.default, (new, back), like=node)
    for note in _HANDED_ON:
        if note in node.meta:
            new.meta.setdefault(note, node.meta[note])
    redirect(node, new)
    node.graph.erase_node(node)
    return new


def redirect(node: fx.Node, new: fx.Node) -> None:
    """Let all users of `node` read `new` instead. Passes change what a graph computes in this way only, one step at a
    time (`steps`)."""
    steps.take(node)
    node.replace_all_uses_with(new)


def copy(before: fx.Node, x: fx.Node) -> fx.Node:
    """Insert a contiguous copy of `x` before `before`."""
    layout = {"memory_format": torch.contiguous_format}
    return insert(before, aten.clone.default, (x,), layout, like=before)


def stand_in(node: fx.Node, x: fx.Node) -> None:
    """Replace `node`, a fresh result, by the existing `x`, which has the same value, and erase `node`.

    If `node` leaves the graph or is written to, a copy of `x` replaces it, so that no memory becomes shared that was
    not shared before.
    """
    replace(node, copy(node, x) if escapes(node) else x)


def memory_order(x: torch.Tensor) -> list[int] | None:
    """Return the dims of `x` in memory order, outermost first; None if `x` is not a dense permutation."""
    if is_contiguous(x):
        return list(range(x.dim()))
    hints = [(-_number(stride), dim) for dim, stride in enumerate(x.stride())]
    order = [dim for _, dim in sorted(hints)]
    return order if same_strides(x, dense_strides(x.shape, order)) else None


def _number(size: Any) -> int:
    return size.node.hint or 0 if isinstance(size, torch.SymInt) else size


def only_user(node: fx.Node) -> fx.Node | None:
    """Return the single user of `node`; None if it has none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def same_phase(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes of a joint graph both belong to its backward, or both do not."""
    return in_backward(a) == in_backward(b)


def in_backward(node: fx.Node) -> bool:
    """Whether a node of a joint graph belongs to its backward."""
    return str(node.meta.get("partitioner_tag")).endswith("backward")


def shared_shard(node: fx.Node) -> Collective | None:
    """Return the shard that all users of `node` compute; None if they differ or if there are no users."""
    shards = [collective(user, "shard") for user in node.users]
    return shards[0] if shards and all(s == shards[0] for s in shards) else None


def stand_for_all(nodes: list[fx.Node], new: fx.Node) -> None:
    """Replace all of `nodes`, which have equal results, by `new`, which is placed before the first of them."""
    first, *others = nodes
    for node in others:
        stand_in(node, copy(first, new) if is_written(first) else new)
    replace(first, new)


def aliases(node: fx.Node) -> bool:
    """Whether the result of `node` may share memory with an argument."""
    if node.target in _HIDDEN_ALIASES:
        return True
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function" and not isinstance(value(node), (int, float, bool, *_SYMBOLIC))
    return _gives_aliases(node.target)


@functools.cache
def _gives_aliases(target: OpOverload) -> bool:
    return any(r.alias_info is not None for r in schema(target).returns)


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def mutates(node: fx.Node) -> bool:
    """Whether `node` writes to an argument, according to its schema."""
    return isinstance(node.target, OpOverload) and schema(node.target).is_mutable


def family(node: fx.Node) -> list[fx.Node]:
    """Return `node` and every later node that may share its memory."""
    found, todo = {node: None}, [node]
    while todo:
        for user in todo.pop().users:
            if user not in found and user.op == "call_function" and aliases(user):
                found[user] = None
                todo.append(user)
    return list(found)


def is_written(node: fx.Node) -> bool:
    """Whether the memory of `node` is written to after it was computed, but for what a graph writes to its inputs at
    its very end: nothing reads that."""
    return any(mutates(user) and not _is_at_the_end(user) for member in family(node) for user in member.users)


def _is_at_the_end(node: fx.Node) -> bool:
    """Whether `node` is one of the copies into inputs that a graph ends with; it may return what was written."""
    while node.target is aten.copy_.default:
        into, source = node.all_input_nodes[0], node.all_input_nodes[-1]
        if into.op != "placeholder" or source.op == "placeholder" or mutates(source):
            return False
        node = node.next
    return node.op == "output"


def escapes(node: fx.Node) -> bool:
    """Whether the memory of `node` is written to or leaves the graph through the output."""
    return any(mutates(user) or user.op == "output" for member in family(node) for user in member.users)


def is_local_pure(node: fx.Node) -> bool:
    """Whether `node` is a call, but not a collective, that depends only on its arguments and has no side effects."""
    if node.op != "call_function" or node.target is WAIT or node.target in STARTS:
        return False
    return node.target not in _NAMES and is_pure(node)


def is_pointwise(node: fx.Node) -> bool:
    """Whether `node` computes each element from the elements at the same position, and has no side effects."""
    return operators.is_pointwise(node.target) and is_local_pure(node)


def numbers_agree(node: fx.Node) -> bool:
    """Whether the numbers among the arguments of a call are known to be the same on all ranks.

    They are if the operator was called on DTensors, like everything there except shards. Elsewhere a program may scale
    by its rank.
    """
    return OPERATOR in node.meta or not any(isinstance(x, (int, float, complex)) for x in _plain(node))


def _plain(node: fx.Node) -> list[Any]:
    return [x for x in tree_leaves((node.args, node.kwargs)) if not isinstance(x, fx.Node)]


_PURE_NAMESPACES = frozenset(("aten", "prims", "dtensor", "_c10d_functional"))
_IMPURE_TAGS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


def is_pure(node: fx.Node) -> bool:
    """Whether another call like `node` gives the same result: it draws no random numbers, writes nothing and has no
    other side effects. Collectives count as pure."""
    if node.op != "call_function":
        return False
    target = node.target
    if not isinstance(target, OpOverload):
        return target is operator.getitem or isinstance(value(node), _SYMBOLIC)
    return _is_pure(target) and not draws(node)


@functools.cache
def _is_pure(target: OpOverload) -> bool:
    info = schema(target)
    known = target.namespace in _PURE_NAMESPACES and bool(info.returns)
    return known and not info.is_mutable and not _IMPURE_TAGS.intersection(target.tags)


def draws(node: fx.Node) -> bool:
    """Whether `node` draws random numbers; attention without dropout does not."""
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    place = next((k for k, a in enumerate(schema(node.target).arguments) if a.name == "dropout_p"), None)
    if place is None:
        return True
    p: Any = node.kwargs.get("dropout_p", node.args[place] if place < len(node.args) else 0.0)
    return bool(p != 0)
