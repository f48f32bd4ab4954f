"""Private APIs of AOTAutograd's partitioner, which splits a joint graph into forward and backward. See `core`, which
checks the version of torch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from .on_demand import sympy
from .symbolic_sizes import is_tangent  # first: it checks the version of torch


def min_cut_partition(gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
    """Torch's partitioner: split a joint graph into forward and backward, with the least memory saved in between."""
    from functorch.compile import min_cut_rematerialization_partition

    forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
    _states_among_tensors(forward, backward)
    return forward, backward


def tag_backward(graph: torch.fx.Graph) -> bool:
    """Tag the nodes of a whole training step that come of its backward, as a joint graph has them tagged.

    Where Dynamo traced the backward, its nodes are known by a mark. What reads them belongs to the backward as well,
    and so does all that comes after the last of them: the steps of the optimizers. They lose their sequence numbers,
    which are those of the last operator of the forward.

    Returns:
        Whether there are any.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    marked = [k for k, node in enumerate(nodes) if node.meta.get("autograd_backward")]
    tagged: set[torch.fx.Node] = set()
    for k, node in enumerate(nodes):
        late = bool(marked) and k > marked[-1]
        if late or node.meta.get("autograd_backward") or not tagged.isdisjoint(node.all_input_nodes):
            tagged.add(node)
            node.meta["partitioner_tag"] = "is_backward"
            node.meta.pop("seq_nr", None)
    return bool(tagged)


def saved_for_backward(
    graph: torch.fx.Graph, later: set[torch.fx.Node], free: set[torch.fx.Node]
) -> set[torch.fx.Node]:
    """Torch's choice of what to hold of a forward for its backward; all else is to be computed again.

    Args:
        graph: forward and backward in one graph, with marks of activation checkpointing in `meta["recompute"]`.
        later: the nodes of the backward.
        free: inputs that are held in any case.
    """
    from torch._functorch import partitioners
    from torch.utils._ordered_set import OrderedSet

    inputs = list(graph.find_nodes(op="placeholder"))
    early = [n for n in graph.nodes if n not in later and n.op not in ("placeholder", "output")]
    first: OrderedSet[torch.fx.Node] = OrderedSet([*inputs, *early])
    second: OrderedSet[torch.fx.Node] = OrderedSet([n for n in graph.nodes if n in later])
    found = partitioners.NodeInfo(
        inputs=inputs,
        _required_fw_nodes=first,
        required_bw_nodes=second,
        tangents_closure=second.copy(),
        unclaimed_nodes=OrderedSet(),
        fw_order={node: k for k, node in enumerate(first)},
        static_lifetime_input_nodes=OrderedSet([n for n in inputs if n in free]),
    )
    for node in reversed(graph.nodes):
        nearest = min([user.dist_from_bw + 1 for user in node.users], default=int(1e9))
        node.dist_from_bw = 0 if node in later else int(1e9) if node.op == "output" else min(nearest, int(1e9))
    return set(partitioners.choose_saved_values_set(graph, found, memory_budget=1))


def hold_between_regions(graph: torch.fx.Graph) -> None:
    """Mark as to be saved what one region of activation checkpointing hands on to the next; otherwise to compute the
    last region again would mean to compute all of them again."""
    from torch._functorch import partitioners

    partitioners.cleanup_recompute_tags(SimpleNamespace(graph=graph), is_default_partition=False)  # pyright: ignore[reportArgumentType]


@contextlib.contextmanager
def all_symbols_saved() -> Iterator[None]:
    """Context in which torch's partitioner passes on to the backward all symbols in the sizes of its inputs.

    Torch passes on those that are inputs of the joint graph. The sizes of local tensors are not, so a backward that got
    a flattened tensor did not know the factors of its length.
    """
    from torch._functorch import partitioners

    before = partitioners.is_symbol_binding_fx_node, partitioners.find_symbol_binding_fx_nodes
    partitioners.is_symbol_binding_fx_node = _symbol
    partitioners.find_symbol_binding_fx_nodes = _nodes_of_symbols
    try:
        yield
    finally:
        partitioners.is_symbol_binding_fx_node, partitioners.find_symbol_binding_fx_nodes = before


def _symbol(node: torch.fx.Node) -> sympy.Symbol | None:
    """The symbol whose value a node has, if it is one."""
    size = node.meta.get("val")
    expression = size.node.expr if isinstance(size, torch.SymInt) else None
    return expression if isinstance(expression, sympy.Symbol) else None


def _nodes_of_symbols(graph: torch.fx.Graph) -> dict[sympy.Symbol, torch.fx.Node]:
    """For each symbol a node of a joint graph that the forward can compute and that has its value.

    It is an input, reads the size of one, or is computed from others.
    """
    late: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    early = [node for node in graph.nodes if node not in late]
    inputs = [node for node in early if node.op == "placeholder"]
    found = {symbol: node for node in reversed(inputs) if (symbol := _symbol(node)) is not None}
    for node in inputs:
        x = node.meta.get("val")
        for dim, size in enumerate(x.shape if isinstance(x, torch.Tensor) else ()):
            symbol = size.node.expr if isinstance(size, torch.SymInt) else None
            if isinstance(symbol, sympy.Symbol) and symbol not in found:
                with graph.inserting_after(inputs[-1]):
                    found[symbol] = graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                found[symbol].meta["val"] = size
    for node in early:
        if (symbol := _symbol(node)) is not None:
            found.setdefault(symbol, node)
    return found


@functools.cache
def weigh_by(nbytes: Callable[[torch.fx.Node], int]) -> None:
    """Make torch's min-cut partitioner, whichever backend calls it, weigh nodes by `nbytes`.

    Torch itself uses the sizes of values on this rank, so ranks with different sizes would save different values.
    """
    from torch._functorch import partitioners

    choose, own = partitioners.choose_saved_values_set, partitioners._size_of

    @functools.wraps(choose)
    def chosen(graph: torch.fx.Graph, *args: Any, **kwargs: Any) -> Any:
        # Compute these while the inputs of each node are still there: some nodes become inputs of the backward.
        sizes = {node: nbytes(node) for node in graph.nodes}

        def size(node: torch.fx.Node) -> int:
            if not _has_tensors(node):
                return own(node)
            return sizes[node] if node in sizes else nbytes(node)

        partitioners._size_of = size
        try:
            return choose(graph, *args, **kwargs)
        finally:
            partitioners._size_of = own

    partitioners.choose_saved_values_set = chosen


def _has_tensors(node: torch.fx.Node) -> bool:
    found = node.meta.get("val")
    return any(isinstance(x, torch.Tensor) for x in (found if isinstance(found, (list, tuple)) else [found]))


def _states_among_tensors(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule) -> None:
    """Put the saved states of random generators before saved meshes, and set the example values of their operators.

    If checkpointing draws random numbers again, torch saves these states last. But it assumes that saved values are
    tensors first, followed by other objects such as a DTensor's mesh.
    """
    from torch._functorch._aot_autograd.graph_compile import is_opaque_node
    from torch._prims import rng_prims as rng

    draws = forward.graph.find_nodes(op="call_function", target=rng.run_and_save_rng_state)
    states = {user: draw for draw in draws for user in draw.users if user.args[1] == 0}
    output: Any = forward.graph.output_node()
    saved = list(output.args[0])
    places = [k for k, node in enumerate(saved) if node in states]
    if not places:
        return
    for draw in draws:
        parts = {user.args[1]: user.meta["val"] for user in draw.users}
        draw.meta["val"] = parts[0], parts.get(1)
    taken: dict[Any, torch.fx.Node] = {}
    for node in backward.graph.find_nodes(op="call_function", target=rng.run_with_rng_state):
        taken[node.args[0]] = node
    given = [node for node in backward.graph.find_nodes(op="placeholder") if node in taken]
    for k, state in zip(places, given, strict=True):
        taken[state].meta["val"] = states[saved[k]].meta["val"][1]
    first = places[0]
    while first and is_opaque_node(saved[first - 1]):
        first -= 1
    others, after = saved[first : places[0]], saved[places[-1] + 1 :]
    output.args = ((*saved[:first], *[saved[k] for k in places], *others, *after),)
    before = given[0]
    for _ in others:
        before = before.prev
    for state in given:
        before.prepend(state)
    forward.recompile()
    backward.recompile()


__all__ = [
    "all_symbols_saved",
    "hold_between_regions",
    "min_cut_partition",
    "saved_for_backward",
    "tag_backward",
    "weigh_by",
]
