"""Over which mesh axes each rank has a loss of its own, so that gradients of what becomes a plain tensor are averaged.

`fully_shard` marks its parameters: each rank of the data axes computes a loss from its own part of the batch, and the
gradient of a parameter is the mean. Where a parameter, or a DTensor computed from parameters, becomes a plain tensor
(`p.full_tensor()`, `p.t().to_local()`), the gradient that arrives there is therefore this rank's share of a mean.
`own_loss_axes` finds the marks in the autograd graph. It ends where DTensors came from plain tensors or became some,
because what happens to a gradient there is already decided.
"""

from typing import Any
from weakref import WeakSet

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

_meshes: WeakSet[Any] = WeakSet()
"""The meshes of marked tensors."""

_in_traces: Any = WeakTensorKeyDictionary()
"""The marked tensors that stand for parameters in a trace. Parameters are not in it, as torch swaps none that is
referred to weakly."""

_AXES = "dtensor::own_loss_axes"


def mark(x: Any, axes: tuple[int, ...], in_trace: bool = False) -> None:
    """Mark a parameter, or what stands for it in a trace: over `axes` of its mesh, each rank has a loss of its own."""
    x._own_losses = x._spec.layout, axes
    _meshes.add(x.device_mesh)
    if in_trace:
        _in_traces[x] = None


def own_loss_axes(x: Any) -> tuple[int, ...]:
    """The axes of the mesh of `x` over which the parameters that it was computed from are marked, sorted."""
    if x.device_mesh not in _meshes:
        return ()
    node = x.grad_fn
    return _marked_axes(x, x.device_mesh) if node is None else tuple(sorted(_axes_of(node, x.device_mesh)))


def _marked_axes(x: Any, mesh: DeviceMesh) -> tuple[int, ...]:
    marked = getattr(x, "_own_losses", None)
    return marked[1] if marked and x.device_mesh == mesh else ()


def _axes_of(root: Any, mesh: DeviceMesh) -> frozenset[int]:
    """The marked axes of all parameters that `root`, a node of the autograd graph, leads to. Visits each node once."""
    key = _AXES, mesh
    open_nodes = [root]
    while open_nodes:
        node = open_nodes[-1]
        before = _inputs(node)
        missing = [other for other in before if key not in other.metadata]
        if missing:
            open_nodes += missing
            continue
        open_nodes.pop()
        axes = frozenset[int]().union(*[other.metadata[key] for other in before])
        node.metadata[key] = axes if before else frozenset(_axes_of_leaf(node, mesh))
    return root.metadata[key]


def _axes_of_leaf(node: Any, mesh: DeviceMesh) -> tuple[int, ...]:
    if _is_border(node):
        return ()
    if hasattr(node, "variable"):
        return _marked_axes(node.variable, mesh)
    # While AOTAutograd traces, parameters are no leaves: a node without inputs stands in for what made them.
    return next((_marked_axes(x, mesh) for x in list(_in_traces) if x.grad_fn is node), ())


def _inputs(node: Any) -> list[Any]:
    """The nodes of the DTensors from which those of `node` were computed."""
    return [] if _is_border(node) else [other for other, _ in node.next_functions if other is not None]


def _is_border(node: Any) -> bool:
    return getattr(getattr(node, "_forward_cls", None), "border", False)


__all__ = ["mark", "own_loss_axes"]
