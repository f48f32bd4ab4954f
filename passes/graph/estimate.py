"""How long a graph's local operators take: a roofline (`dtensor.prices.machine`) of the kernels that compilers make of
them (`dtensor.prices.kernels`).

Views are free, and of a part of a tensor only that part is read. The numbers are orders of magnitude, good enough to
show which communication has enough computation to overlap with.
"""

from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from dtensor.prices import operators
from dtensor.prices.calibrated import links_here, links_path
from dtensor.prices.kernels import Call, Memory, Share, shares
from dtensor.prices.machine import MACHINES, Machine
from dtensor.torch_private.core import tree_leaves
from dtensor.torch_private.symbolic_sizes import hint

from . import ir
from .ordered import called


def seconds(graph: fx.Graph, machine: Machine) -> dict[fx.Node, float]:
    """Estimate the seconds of each call of a graph that is not free. Those of a collective are not of its sending."""
    found: dict[fx.Node, float] = {}
    for node, share in moved(graph).items():
        out = next(iter(ir.tensors(node)), None)
        dtype = torch.float32 if out is None else out.dtype
        found[node] = machine.seconds(flops_of(node), share.moved, dtype, share.launches)
    return found


def flops(graph: fx.Graph) -> float:
    """Return the floating-point operations of a graph's products on this rank; symbolic sizes count with their example
    values."""
    return sum([flops_of(node) for node in graph.nodes if node.op == "call_function"])


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


def moved(graph: fx.Graph, *, apart: bool = False) -> dict[fx.Node, Share]:
    """Return what each call of a graph that is not free reads and writes, as its share of kernels.

    Args:
        graph: the graph.
        apart: whether no kernel is part of the forward and of the backward.
    """
    memory: dict[fx.Node, Memory] = {}
    sizes: dict[Memory, float] = {}
    calls: dict[fx.Node, Call] = {}
    kept: set[Memory] = set()
    for node in graph.nodes:
        if node.op == "output":
            kept.update([memory[x] for x in node.all_input_nodes])
            continue
        memory[node] = node
        if node.op != "call_function":
            sizes[node] = _bytes(node)
            kept.add(node)
            continue
        target, args = called(node)
        given: list[fx.Node] = []
        map_arg((args, node.kwargs), given.append)
        if node.target is getitem and given[0] in calls:
            memory[node] = given[0], args[1]
        elif given and ir.aliases(node) and ir.tensors(node):
            memory[node] = memory[given[0]]
        if not is_free(node):
            writes = [(key, float(bytes_of(x))) for key, x in _results(node, memory[node])]
            sizes |= {key: size for key, size in writes if key not in sizes}
            reads = [(memory[x], float(_bytes(x))) for x in given]
            calls[node] = Call.of(target, reads, writes, int(apart and ir.in_backward(node)))
    return dict(zip(calls, shares(list(calls.values()), kept, sizes)))


def _results(node: fx.Node, memory: Memory) -> list[tuple[Memory, torch.Tensor]]:
    """The tensors among the results of a call, and their memory."""
    val = ir.value(node)
    if isinstance(val, torch.Tensor):
        return [(memory, val)]
    return [((node, k), x) for k, item in enumerate(val) for x in tree_leaves(item) if isinstance(x, torch.Tensor)]


def bytes_of(x: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; symbolic sizes count with their example values."""
    return prod([hint(n) for n in x.shape]) * x.element_size()


def _bytes(node: fx.Node) -> int:
    return sum(map(bytes_of, ir.tensors(node)))


def flops_of(node: fx.Node) -> float:
    """Return the floating-point operations of a node."""
    target, args = called(node)
    given, named = map_arg((args, node.kwargs), lambda x: ir.value(x))
    return operators.flops(target, _plain(given), _plain(named), _plain(ir.value(node)))


def _plain(val: Any) -> Any:
    """A value as the formulas take it, tensors as their shapes. Only plain numbers: computing with symbols would add
    guards."""
    if isinstance(val, torch.Tensor):
        return torch.Size([hint(n) for n in val.shape])
    if isinstance(val, dict):
        return {key: _plain(item) for key, item in val.items()}
    if isinstance(val, (tuple, list)) and not isinstance(val, torch.Size):
        return [_plain(item) for item in val]
    return hint(val) if isinstance(val, torch.SymInt) else val


__all__ = ["bytes_of", "flops", "flops_of", "is_free", "machine_of", "moved", "seconds"]
