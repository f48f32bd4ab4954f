"""A rough estimate of how long a graph's local operators take: a roofline.

    seconds = max(floating-point operations / peak, bytes moved / memory bandwidth) + launch

Only the products that `torch.utils.flop_counter` knows count as floating-point operations. Bytes are those of a
compiler that fuses elementwise operators: an edge between two of them moves nothing. Views are free, and of a part of a
tensor only that part is read. The numbers in
`dtensor.layout.machine` are orders of magnitude, good enough to show which communication has enough computation to
overlap with.
"""

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from dtensor.layout.machine import MACHINES, Machine
from dtensor.mesh.links import links_here, links_path
from dtensor.passes.graph import ir
from dtensor.passes.graph.ordered import called
from dtensor.torch_private.core import OpOverload
from dtensor.torch_private.symbolic_sizes import hint

from .traffic import bytes_of


def seconds(node: fx.Node, machine: Machine) -> float:
    """Estimate the time of a local operator in seconds."""
    if is_free(node):
        return 0.0
    moved, flops = _moved(node), _flops(node)
    if not moved and not flops:
        return 0.0
    out = next(iter(ir.tensors(node)), None)
    return machine.seconds(flops, moved, torch.float32 if out is None else out.dtype)


def flops(graph: fx.Graph) -> float:
    """Return the floating-point operations of a graph's products on this rank; symbolic sizes count with their example
    values."""
    return sum([_flops(node) for node in graph.nodes if node.op == "call_function"])


def is_free(node: fx.Node) -> bool:
    """Whether a node does nothing when it runs, or only views existing data."""
    if node.op != "call_function":
        return True
    return not ir.tensors(node) or (ir.aliases(node) and not ir.mutates(node))


BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Device type -> the backend under which `dtensor calibrate` saves what it measured."""


def machine_of(graph: fx.Graph) -> Machine:
    """Return the machine for the device type that most values of a graph are on: as it was measured here, or else the
    usual one."""
    kinds = [x.device.type for n in graph.nodes for x in ir.tensors(n)]
    device = "cuda" if kinds.count("cuda") > len(kinds) / 2 else "cpu"
    path = links_path()  # where a file that is named is missing, the mesh has warned
    found = links_here(BACKENDS[device], device).machine if path is not None and path.exists() else None
    return found or MACHINES[device]


def _moved(node: fx.Node) -> int:
    fused = is_pointwise(node)
    read: dict[fx.Node, int] = {}
    for x in dict.fromkeys(node.all_input_nodes):
        base = _base(x)
        if not (fused and is_pointwise(base)):
            read[base] = min(_bytes(base), read.get(base, 0) + _bytes(x))
    written = not fused or any(not is_pointwise(user) for user in node.users)
    return sum(read.values()) + (_bytes(node) if written else 0)


def is_pointwise(node: fx.Node) -> bool:
    """Whether compilers fuse a node with others of its kind."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def _base(node: fx.Node) -> fx.Node:
    """The tensor that a chain of views starts from."""
    while node.op == "call_function" and is_free(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _bytes(node: fx.Node) -> int:
    return sum(map(bytes_of, ir.tensors(node)))


def _flops(node: fx.Node) -> float:
    target, args = called(node)
    count: Any = flop_registry.get(getattr(target, "overloadpacket", None))
    if count is None:
        return 0.0
    given, named = map_arg((args, node.kwargs), lambda x: _plain(ir.value(x)))
    try:
        return float(count(*_plain(given), **named, out_val=_plain(ir.value(node))))
    except (TypeError, ValueError, AssertionError, RuntimeError):  # a formula that does not support this call
        return 0.0


def _plain(val: Any) -> Any:
    """A value as the formulas take it, tensors as their shapes. Only plain numbers: computing with symbols would add
    guards."""
    if isinstance(val, torch.Tensor):
        return torch.Size([hint(n) for n in val.shape])
    if isinstance(val, (tuple, list)) and not isinstance(val, torch.Size):
        return [_plain(item) for item in val]
    return hint(val) if isinstance(val, torch.SymInt) else val


__all__ = ["flops", "is_free", "machine_of", "seconds"]
