"""Faulty passes: each has one line of source that says something else, and a program on which that matters."""

import importlib
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.comm.collectives import ops
from dtensor.passes import PIPELINE, Pass

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Mutant:
    """A faulty pass.

    Attributes:
        name: name of the pass.
        says: what is wrong with it.
        old, new: a part of the source of its module, and what is written instead.
        program: makes a function to trace; it is given the groups "tp", "dp" and "world".
        shapes: shapes of the function's operands.
        step: a part of the name of the node that the first wrong step replaces.
    """

    name: str
    says: str
    old: str
    new: str
    program: Callable[..., Callable[..., Any]]
    shapes: tuple[tuple[int, ...], ...]
    step: str

    def faulty(self) -> Pass:
        """The faulty pass."""
        return mutated(self.name, self.old, self.new)

    def pipeline(self) -> tuple[Pass, ...]:
        """All passes, the faulty one in its place."""
        return tuple([self.faulty() if p.name == self.name else p for p in PIPELINE])


def mutated(name: str, old: str, new: str) -> Pass:
    """The pass `name` from a copy of its module in which `old`, which occurs once, is `new`."""
    original = next(type(p) for p in PIPELINE if p.name == name)
    module = importlib.import_module(original.__module__)
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{module.__name__} says {old!r} {source.count(old)} times"
    copy = types.ModuleType(module.__name__)
    copy.__package__ = module.__package__
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), copy.__dict__)
    assert sys.modules[module.__name__] is module
    return getattr(copy, original.__name__)()


def reduce_sums(tp, dp, world):
    return lambda x, y: torch.relu(ops.all_reduce(x, "sum", tp) + ops.all_reduce(y, "sum", tp))


def residuals(tp, dp, world):
    return lambda x, y, z, w: ((x + ops.all_reduce(y, "sum", tp)) + z) + ops.all_reduce(w, "sum", tp)


def scaled_by_a_shard(tp, dp, world):
    return lambda x, y, z: ops.all_reduce(x, "sum", tp) * z + ops.all_reduce(y, "sum", tp)


def transposed(tp, dp, world):
    return lambda x, y: ops.all_reduce(x, "sum", tp).t() - ops.all_reduce(y, "sum", tp).t()


def reduce_and_narrow(tp, dp, world):
    return lambda x: ops.all_reduce(x, "sum", tp).to(torch.bfloat16)


def gather_and_cut(group, other, dim):
    def program(tp, dp, world):
        names = {"tp": tp, "dp": dp}
        return lambda x: ops.shard(ops.all_gather(x, 0, 8, names[group]), dim, names[other])

    return program


def reduce_and_cut(tp, dp, world):
    return lambda x: ops.shard(ops.all_reduce(x, "sum", tp), 0, tp)


def reduce_world_and_cut(tp, dp, world):
    return lambda x: ops.shard(ops.all_reduce(x, "sum", world), 0, tp)


def scatter_and_gather(tp, dp, world):
    return lambda x: ops.all_gather(ops.reduce_scatter(x, "sum", 0, tp), 0, 8, tp)


def gather_twice(tp, dp, world):
    return lambda x: ops.all_gather(ops.all_gather(x, 0, 8, dp), 0, 16, tp)


def reduce_again(tp, dp, world):
    return lambda x: ops.all_reduce(torch.relu(ops.all_reduce(x, "sum", tp)), "sum", tp)


def two_additions(tp, dp, world):
    return lambda x, y: ops.all_reduce(torch.add(x, y, alpha=2) * torch.add(x, y, alpha=3), "sum", tp)


def gather_and_combine(tp, dp, world):
    def f(x, y, z):
        return aten.addcmul(ops.all_gather(x, 0, 8, tp), ops.all_gather(y, 0, 8, tp), z)

    return f


def write_and_reduce(tp, dp, world):
    def f(x, y):
        h = torch.relu(x)
        h.view(-1).add_(1)
        return ops.all_reduce(h, "sum", tp)

    return f


def gathered_anyway(tp, dp, world):
    return lambda x: (ops.all_gather(x, 0, 8, tp), ops.all_gather(x.sum(0), 0, 8, tp))


def average(tp, dp, world):
    return lambda x: torch.relu(ops.all_reduce(x, "avg", tp))


def two_reductions(tp, dp, world):
    def f(x, y):
        a, b = ops.all_reduce(x, "sum", tp), ops.all_reduce(y, "sum", tp)
        return torch.relu(a), torch.sin(b)

    return f


def write_between(tp, dp, world):
    def f(x, w):
        z = x @ w
        x.add_(1)
        return z, ops.all_reduce(x @ w, "sum", tp) + 1, x * 2

    return f


SQUARE, WIDE = (4, 4), (4, 8)

MUTANTS = (
    Mutant(
        *("add_before_reduce", "adds one term to itself"),
        "total = ir.insert(node, node.target, (a.x, b.x), node.kwargs, like=node)",
        "total = ir.insert(node, node.target, (a.x, a.x), node.kwargs, like=node)",
        *(reduce_sums, (SQUARE, SQUARE), "add"),
    ),
    Mutant(
        *("add_before_reduce", "drops a term of a deeper sum"),
        "total = ir.insert(late, PLAIN, (a.x, b.x), like=parent)",
        "total = b.x",
        *(residuals, (SQUARE,) * 4, "add"),
    ),
    Mutant(
        *("reduce_after_scale", "scales by what differs between ranks"),
        "if x is not _scaled(node) and not (",
        "if False and not (",
        *(scaled_by_a_shard, (SQUARE,) * 3, "mul"),
    ),
    Mutant(
        *("reduce_after_view", "swaps the operands of a difference"),
        "total = ir.insert(node, node.target, (p, q), node.kwargs, like=node)",
        "total = ir.insert(node, node.target, (q, p), node.kwargs, like=node)",
        *(transposed, (WIDE, WIDE), "sub"),
    ),
    Mutant(
        *("narrow_collectives", "casts before a reduction"),
        'MOVES = ("all_gather", "all_to_all", "collective_permute")',
        'MOVES = ("all_gather", "all_to_all", "collective_permute", "all_reduce")',
        *(reduce_and_narrow, (WIDE,), "to_copy"),
    ),
    Mutant(
        *("cancel_gather_shard", "cancels a shard over another group"),
        "found is None or found.group != outer.group or _dim",
        "found is None or _dim",
        *(gather_and_cut("dp", "tp", 0), (SQUARE,), "shard"),
    ),
    Mutant(
        *("fuse_reduce_scatter", "scatters another dim"),
        "scatter_dim=shard.scatter_dim",
        "scatter_dim=1 - shard.scatter_dim",
        *(reduce_and_cut, (SQUARE,), "shard"),
    ),
    Mutant(
        *("fuse_all_reduce", "takes the average in place of the sum"),
        'replace(scatter, op="all_reduce", scatter_dim=None)',
        'replace(scatter, op="all_reduce", scatter_dim=None, reduce_op="avg")',
        *(scatter_and_gather, ((8, 4),), "all_gather"),
    ),
    Mutant(
        *("scatter_before_reduce", "reduces over the group that has scattered"),
        "replace(reduce, x=part, group=axes.second)",
        "replace(reduce, x=part, group=axes.first)",
        *(reduce_world_and_cut, (SQUARE,), "shard"),
    ),
    Mutant(
        *("shard_before_collective", "takes the shard of the gathered dim from other rows"),
        "or shard is None or shard.scatter_dim == c.gather_dim",
        "or shard is None",
        *(gather_and_cut("dp", "tp", 0), (SQUARE,), "shard"),
    ),
    Mutant(
        *("merge_axes", "swaps the axes of a gather"),
        "axes = groups.product(late.group, early.group)\n        return axes if axes is not None and _cuts_alike",
        "axes = groups.product(early.group, late.group)\n        return axes if axes is not None and _cuts_alike",
        *(gather_twice, (SQUARE,), "all_gather"),
    ),
    Mutant(
        *("localize_replicated", "forgets that all ranks add up"),
        "aten.mul.Tensor, (x, group_size(group))",
        "aten.mul.Tensor, (x, 1)",
        *(reduce_again, (SQUARE,), "all_reduce"),
    ),
    Mutant(
        *("common_subexpressions", "merges calls with different arguments"),
        "_key(node.args), _key(node.kwargs))",
        "_key(node.args))",
        *(two_additions, (SQUARE, SQUARE), "add"),
    ),
    Mutant(
        *("compute_before_gather", "combines with what differs between ranks"),
        "sizes.same(sizes.length(x, dim), 1)) and is_alike(x, group)",
        "sizes.same(sizes.length(x, dim), 1))",
        *(gather_and_combine, (SQUARE, SQUARE, (1, 4)), "addcmul"),
    ),
    Mutant(
        *("dead_code", "removes a write"),
        "or not node.is_impure()",
        'or node.op == "call_function"',
        *(write_and_reduce, (SQUARE, SQUARE), ""),
    ),
    Mutant(
        *("reuse_gather", "takes a gather of another dim"),
        "alike = (c.gather_dim, c.group) == (reduced.gather_dim, d.group)",
        "alike = c.group == d.group",
        *(gathered_anyway, (SQUARE,), "all_gather"),
    ),
    Mutant(
        *("lower", "lowers an average as a sum"),
        "for new in bodies.inline(node, KERNELS[c.op][0]):",
        'for new in bodies.inline(node, lambda x, *a: KERNELS[c.op][0](x, *["sum" if y == "avg" else y for y in a])):',
        *(average, (SQUARE,), "all_reduce"),
    ),
    Mutant(
        *("bucket", "swaps two parts"),
        "piece = ir.insert(here, getitem, (pieces, k), like=s.wait)",
        "piece = ir.insert(here, getitem, (pieces, len(bucket) - 1 - k), like=s.wait)",
        *(two_reductions, (SQUARE, SQUARE), "wait_tensor"),
    ),
    Mutant(
        *("schedule", "moves a read after a write"),
        "before, floats, order = dependencies(graph), floating(nodes), nodes",
        "before, floats, order = {n: n.all_input_nodes for n in nodes}, floating(nodes), nodes",
        *(write_between, (SQUARE, SQUARE), ""),
    ),
)
