"""Splitting the batch: its microbatches are computed one by one, so that one computes while another communicates."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from dtensor.errors import ArgumentError
from dtensor.layout.layout import Layout
from dtensor.mesh.provenance import PARAMETER, PART
from dtensor.mesh.tensor_spec import Spec
from dtensor.rules import FOR_EMPTY, Call, Candidate, Output, Rule, candidates, rule_of
from dtensor.rules.call import replaced
from dtensor.rules.families.pointwise import pointwise
from dtensor.torch_private.core import OpOverload

from ..graph import ir, sizes
from ..stages import Compilation, Pass

aten: Any = ir.aten

FEWEST = 2
"""The least number of collectives worth splitting: with a single one, nothing computes while it communicates."""

VIEWS = frozenset((aten.view.default, aten._unsafe_view.default))


class SplitBatch(Pass):
    """Splits a batch into microbatches, as if it were sharded over a mesh axis whose ranks are all this one.

    Before:

        %mm: f32[8,4] = aten.mm(%x, %w)
        %all_reduce: f32[8,4] = dtensor.all_reduce(%mm, 'sum', tp)
        %relu: f32[8,4] = aten.relu(%all_reduce)
        %mm_1: f32[8,4] = aten.mm(%relu, %w_1)
        %all_reduce_1: f32[8,4] = dtensor.all_reduce(%mm_1, 'sum', tp)

    After:

        %slice: f32[4,4] = aten.slice.Tensor(%x, 0, 0, 4)
        %slice_1: f32[4,4] = aten.slice.Tensor(%x, 0, 4, 8)
        %mm: f32[4,4] = aten.mm(%slice, %w)
        %mm_1: f32[4,4] = aten.mm(%slice_1, %w)
        %all_reduce: f32[4,4] = dtensor.all_reduce(%mm, 'sum', tp)
        %all_reduce_1: f32[4,4] = dtensor.all_reduce(%mm_1, 'sum', tp)
        %relu: f32[4,4] = aten.relu(%all_reduce)
        %relu_1: f32[4,4] = aten.relu(%all_reduce_1)
        %mm_2: f32[4,4] = aten.mm(%relu, %w_1)
        %mm_3: f32[4,4] = aten.mm(%relu_1, %w_1)
        %all_reduce_2: f32[4,4] = dtensor.all_reduce(%mm_2, 'sum', tp)
        %all_reduce_3: f32[4,4] = dtensor.all_reduce(%mm_3, 'sum', tp)
        %cat: f32[8,4] = aten.cat([%all_reduce_2, %all_reduce_3])

    `schedule` then lets the microbatches take turns: one computes while the other communicates. The graph sends as many
    bytes as before, in more collectives.

    The batch is the first dim of the first input that is not a parameter (`PARAMETER` marks these), and of the other
    inputs and tangents whose first dim has that length. From there on the operators' sharding rules decide:

    - An operator runs on microbatches if its rule allows it and its other operands need at most be sliced.
    - Where it sums over the batch, as for the gradient of a parameter, the microbatches' results are added up, provided
      that they are not larger than what the operator reads.
    - A collective along other dims runs on microbatches.
    - Everything else, random draws included, runs once, on the concatenated microbatches.

    Nothing is done if fewer than `FEWEST` collectives would run on microbatches, if microbatches or shards would not be
    even, or if sizes are symbolic.

    Gradients are added up in another order, hence `reassociates`. All ranks of a group must have batches that divide in
    the same way.

    After Domino (Wang et al., "Domino: Eliminating Communication in LLM Training via Generic Tensor Slicing and
    Overlapping", 2024), which does this by hand for one model.

    Args:
        parts: number of microbatches, at least 1.

    Raises:
        ValueError: `parts` is not such a number.
    """

    name = "split_batch"
    stage = "divide"
    exactness = "reassociates"
    when = "with the option `split_batch`"

    def __init__(self, parts: int = 2) -> None:
        if not isinstance(parts, int) or parts < 1:
            raise ArgumentError(f"parts is the number of microbatches, at least 1; got {parts!r}")
        self.parts = parts

    def taking(self, compilation: Compilation) -> Pass | None:
        split = compilation.split_batch > 1 and not compilation.within
        return SplitBatch(compilation.split_batch) if split else None

    def __call__(self, graph: fx.Graph) -> int:
        splits = _splits(graph, self.parts)
        sent = [node for node in splits if ir.is_collective(node) and not ir.is_collective(node, "shard")]
        if len(sent) < FEWEST:
            return 0
        _Rewrite(splits, self.parts).run()
        return len(sent)


Cut = int | str | None
"""What the microbatches of a tensor are: slices along this dim, terms of a "sum", or each the full tensor (None)."""


@dataclass(frozen=True)
class Split:
    """How a node runs on microbatches: the call, and what the microbatches of its input and output tensors are, in
    order."""

    args: Any
    kwargs: Any
    inputs: tuple[Cut, ...]
    outputs: tuple[Cut, ...]
    shape_arg: str | None = None


def _splits(graph: fx.Graph, parts: int) -> dict[fx.Node, Split]:
    """The nodes that run on microbatches, and how."""
    given = _batch(graph, parts)
    if not given or not _is_static(graph):
        return {}
    outputs: dict[fx.Node, tuple[Cut, ...]] = dict.fromkeys(given, (0,))
    found: dict[fx.Node, Split] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not any(_on_parts(x, outputs) for x in node.all_input_nodes):
            continue
        split = _split(node, outputs, parts)
        if split is not None:
            found[node] = split
            outputs[node] = split.outputs
    return found


def _on_parts(node: fx.Node, outputs: dict[fx.Node, tuple[Cut, ...]]) -> bool:
    """Whether users of `node` may read microbatches. A sum is read as the full sum; of several outputs one is selected
    first."""
    many = isinstance(ir.value(node), (tuple, list))
    return node in outputs and (many or isinstance(outputs[node][0], int))


def _batch(graph: fx.Graph, parts: int) -> list[fx.Node]:
    """The inputs that hold the batch; empty if it cannot be split evenly."""
    inputs = [n for n in graph.find_nodes(op="placeholder") if isinstance(ir.value(n), torch.Tensor)]
    given = [n for n in inputs if PARAMETER not in n.meta and ir.value(n).dim()]
    first = next((n for n in given if not _is_tangent(n)), None)
    if first is None or not sizes.is_even(first):
        return []
    length = ir.value(first).shape[0]
    if not isinstance(length, int) or length == 0 or length % parts:
        return []
    return [n for n in given if ir.value(n).shape[0] == length and sizes.is_even(n)]


def _is_tangent(node: fx.Node) -> bool:
    return node.name.startswith("tangents")


def _is_static(graph: fx.Graph) -> bool:
    vals = [ir.value(n) for n in graph.nodes]
    leaves = [leaf for v in vals for leaf in (v if isinstance(v, (tuple, list)) else (v,))]
    return all(isinstance(n, int) for x in leaves if isinstance(x, torch.Tensor) for n in x.shape) and not any(
        isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)) for x in leaves
    )


def _split(node: fx.Node, outputs: dict[fx.Node, tuple[Cut, ...]], parts: int) -> Split | None:
    """How `node` runs on microbatches, given the `outputs` of the nodes before it; None if it does not."""

    def cut(x: fx.Node) -> int | None:
        found = outputs.get(x, (None,))[0]
        return found if isinstance(found, int) else None

    if node.target is getitem:
        source, index = node.args
        made: tuple[Cut, ...] = outputs[source]  # pyright: ignore
        return Split(node.args, node.kwargs, (), (made[index] if index < len(made) else None,))  # pyright: ignore
    c = ir.collective(node)
    if c is not None:
        dim = cut(c.x)
        along = dim in (c.gather_dim, c.scatter_dim) or c.op == "collective_permute"
        return None if along else Split(node.args, node.kwargs, (dim,), (dim,))
    if not ir.is_local_pure(node) or not isinstance(node.target, OpOverload):
        return None
    make = rule_of(node.target) or (pointwise if ir.is_pointwise(node) else None)
    if make is None or not _can_be_put_together(node):
        return None
    operands: list[fx.Node] = []
    call = _call(node, operands)
    if not all(map(sizes.is_even, (node, *operands))):
        return None
    rule = make(call)
    read = sum([ir.value(x).numel() for x in operands])
    for candidate in candidates(rule):
        if _runs(rule, candidate, parts) and _fits(candidate, [cut(x) for x in operands], call, parts):
            summed = [o.shape for o, dim in zip(call.outputs, candidate.outputs) if o is not None and dim == "sum"]
            if sum([torch.Size(shape).numel() for shape in summed]) <= read:
                return Split(node.args, node.kwargs, candidate.inputs, candidate.outputs, rule.shape_arg)
    return None


def _can_be_put_together(node: fx.Node) -> bool:
    """Whether concatenated microbatches could be given the memory layout of `node`; views stay as they are."""
    made = ir.value(node)
    tensors = [x for x in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(x, torch.Tensor)]
    return _is_view_of_another(node) or all(ir.memory_order(x) is not None for x in tensors)


def _call(node: fx.Node, operands: list[fx.Node]) -> Call:
    """The call as sharding rules see it. Its tensors are appended to `operands`, in order of occurrence."""
    specs: list[Spec] = []

    def spec(x: fx.Node) -> Any:
        val = ir.value(x)
        if not isinstance(val, torch.Tensor):
            return val
        operands.append(x)
        nowhere: Any = None  # rules do not ask on which mesh
        specs.append(Spec.make(nowhere, Layout.make(1, ((),) * val.dim(), ()), val.shape, val.stride(), val.dtype))
        return specs[-1]

    args, kwargs = (_mapped(given, spec) for given in (node.args, node.kwargs))
    made = ir.value(node)
    many = isinstance(made, (tuple, list))
    return Call(node.target, args, kwargs, specs, tuple(map(_output, made if many else [made])), many)


def _mapped(given: Any, of: Callable[[fx.Node], Any]) -> Any:
    if isinstance(given, fx.Node):
        return of(given)
    if isinstance(given, tuple):
        return tuple([_mapped(item, of) for item in given])
    if isinstance(given, list):
        return [_mapped(item, of) for item in given]
    return {key: _mapped(item, of) for key, item in given.items()} if isinstance(given, dict) else given


def _output(made: Any) -> Output | None:
    return Output(tuple(made.shape), made.stride(), made.dtype) if isinstance(made, torch.Tensor) else None


def _runs(rule: Rule, c: Candidate, parts: int) -> bool:
    """Whether the operator itself, and not a replacement, runs on even parts of the candidate's factor."""
    if len(c.factors) != 1 or rule.written or rule.sizes[c.factors[0]] % parts or rule.sizes[c.factors[0]] == 0:
        return False
    always = rule.across is None and rule.local not in FOR_EMPTY
    if rule.local is not None and (always or c.factors[0] in (rule.across or ())):
        return False
    # Where `local` is for empty shards only, what is whole is the same for all parts, like a seed that is not used.
    same = rule.whole if rule.local in FOR_EMPTY else frozenset[int | tuple[int, str]]()
    made = [k for k, dims in enumerate(rule.outputs) if dims is not None and k not in same]
    return all(c.outputs[k] == "sum" or isinstance(c.outputs[k], int) for k in made)


def _fits(c: Candidate, have: list[int | None], call: Call, parts: int) -> bool:
    """Whether the operands, split as `have` states, are as the candidate wants them, or full and can be split
    evenly."""
    for dim, want, spec in zip(have, c.inputs, call.operands, strict=True):
        if isinstance(want, str) or (dim is not None and dim != want):
            return False
        if isinstance(want, int) and spec.shape[want] % parts:
            return False
    return True


class _Rewrite:
    """Inserts the microbatches of nodes before them, and replaces the nodes by the microbatches put together."""

    def __init__(self, splits: dict[fx.Node, Split], parts: int) -> None:
        self.splits, self.parts = splits, parts
        self.kept = _kept(splits)
        self.made: dict[fx.Node, list[fx.Node]] = {}
        self.whole: dict[fx.Node, fx.Node] = {}
        self.slices: dict[tuple[fx.Node, int, int], fx.Node] = {}

    def run(self) -> None:
        """Rewrite the graph."""
        for node, split in self.splits.items():
            self.made[node] = [self.part(node, split, k) for k in range(self.parts)]
            together = None if node in self.kept else self.together(node, split)
            if together is None:
                continue
            if isinstance(ir.value(node), torch.Tensor):
                self.whole[node] = ir.replace(node, together)
            else:
                self.whole[node] = together
                ir.redirect(node, together)
                node.graph.erase_node(node)
        for node in reversed(self.splits):
            if node not in self.kept and node not in self.whole:
                node.graph.erase_node(node)

    def together(self, node: fx.Node, split: Split) -> fx.Node | None:
        """The microbatches of `node` put together; None if nothing reads the full result."""
        made, dim = self.made[node], split.outputs[0]
        if isinstance(ir.value(node), (tuple, list)):
            return None  # its items are put together
        if dim == "sum":
            total = made[0]
            for x in made[1:]:
                total = ir.insert(node, aten.add.Tensor, (total, x), like=node)
            return total
        if not isinstance(dim, int):  # each has the full tensor, or a number or nothing in its place
            return made[0]
        if all(user in self.splits and user not in self.kept for user in node.users):
            return None
        return ir.insert(node, aten.cat.default, (made, dim), like=node)

    def part(self, node: fx.Node, split: Split, k: int) -> fx.Node:
        """Microbatch `k` of `node`."""
        args, kwargs = self.arguments(node, split, k)
        made = ir.insert(node, node.target, args, kwargs, like=node)
        made.meta[PART] = k
        return made

    def arguments(self, node: fx.Node, split: Split, k: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for microbatch `k` of `node`."""
        if node.target is getitem:
            return (self.made[split.args[0]][k], split.args[1]), {}
        dims = iter(split.inputs)

        def given(x: fx.Node) -> Any:
            dim = next(dims) if isinstance(ir.value(x), torch.Tensor) else None
            return self.cut(x, dim, k, node) if isinstance(dim, int) else self.whole.get(x, x)

        args, kwargs = (_mapped(a, given) for a in (split.args, split.kwargs))
        if split.shape_arg is not None:
            shape, dim = list(ir.value(node).shape), split.outputs[0]
            if isinstance(dim, int):
                shape[dim] //= self.parts
            args, kwargs = replaced(node.target, args, kwargs, [(split.shape_arg, shape)])
        if node.target in VIEWS and not _is_view(args[0], args[1]):
            args = (ir.copy(node, args[0]), *args[1:])
        return args, kwargs

    def cut(self, x: fx.Node, dim: int, k: int, before: fx.Node) -> fx.Node:
        """Microbatch `k` of `x`: the one that was computed, or else a slice of the full tensor."""
        if x in self.made and self.splits[x].outputs[0] == dim:
            return self.made[x][k]
        x = self.whole.get(x, x)
        found = self.slices.get((x, dim, k))
        if found is None:
            size = ir.value(x).shape[dim] // self.parts
            args = (x, dim, k * size, (k + 1) * size)
            found = self.slices[x, dim, k] = ir.insert(before, aten.slice.Tensor, args, like=x)
        return found


def _kept(splits: dict[fx.Node, Split]) -> set[fx.Node]:
    """Views of which something reads the full result. They stay, as views of a full tensor."""
    found: set[fx.Node] = set()
    for node in reversed(splits):
        maker = node.args[0] if node.target is getitem else node
        if any(user not in splits or user in found for user in node.users) and _is_view_of_another(maker):
            found.add(node)
    return found


def _is_view_of_another(node: Any) -> bool:
    return ir.is_local_pure(node) and ir.aliases(node)


def _is_view(x: fx.Node, shape: list[int]) -> bool:
    """Whether a tensor with the memory layout of `x` can be viewed in `shape`."""
    val = ir.value(x)
    try:
        torch.empty_strided(val.shape, val.stride(), device="meta").view(shape)
    except RuntimeError:
        return False
    return True


__all__ = ["SplitBatch"]
