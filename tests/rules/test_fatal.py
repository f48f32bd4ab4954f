"""Kernels that end the process where a rank has no part, over torch's operator database: rules name them all.

Every operator that an entry of the database calls, forward and backward, runs as its rule would have a rank run it that
has nothing of a factor, each entry in a process of its own.
"""

import os
import warnings
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dtensor import DTensor, Replicate
from dtensor.dispatch.decision import call_of
from dtensor.rules import rule_of
from dtensor.torch_private.core import operator_database

PARTS = 8
SAMPLES = 64
"""Of each entry's samples."""


class Calls(TorchDispatchMode):
    """The calls of operators inside."""

    def __init__(self):
        super().__init__()
        self.found: list[tuple[Any, tuple, dict]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def emptied(func, args, kwargs, mesh) -> Iterator[tuple[str, tuple, dict]]:
    """Factors, one or two, and the arguments of a rank that has nothing of them. What a rule says to be refused is not
    tried."""

    def placed(x):
        return DTensor.from_local(x.detach(), mesh, [Replicate()]) if isinstance(x, torch.Tensor) else x

    given = tree_map(placed, (args, kwargs))
    specs = [x._spec for x in tree_leaves(given) if isinstance(x, DTensor)]
    make = rule_of(func)
    if make is None or not specs:
        return
    rule = make(call_of(func, *given, specs))
    tried = [f for f in rule.sizes if f not in rule.refuses_empty]
    for missing in [*combinations(tried, 1), *combinations(tried, 2)]:
        shapes = iter(
            [
                [n if d.isdisjoint(missing) else 0 for d, n in zip(map(set, dims), s.shape)]
                for dims, s in zip(rule.inputs, specs)
            ]
        )

        def part(x, shapes=shapes):
            return torch.zeros(next(shapes), dtype=x.dtype) if isinstance(x, torch.Tensor) else x

        yield " and ".join(missing), *tree_map(part, (args, kwargs))


def asked(entry, mesh, say) -> None:
    """Try all calls of an entry, each of which is said before."""
    dtype = torch.float32 if torch.float32 in entry.dtypes else next(iter(entry.dtypes))
    samples = entry.sample_inputs("cpu", dtype, requires_grad=entry.supports_autograd)
    done = set()
    for sample in [s for s, _ in zip(samples, range(SAMPLES))]:
        with Calls() as calls:
            out = entry(sample.input, *sample.args, **sample.kwargs)
            made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
            if made:
                torch.autograd.backward(made, [torch.ones_like(x) for x in made])
        for func, args, kwargs in calls.found:
            if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
                continue
            for missing, some, named in emptied(func, args, kwargs, mesh):
                if (func, missing) not in done:
                    done.add((func, missing))
                    say(f"{func} without {missing}\n")
                    try:
                        func(*some, **named)
                    except Exception:  # a kernel that refuses says so: that is what it is asked for
                        continue


def ended(entry, mesh) -> str:
    """The call that ends the process, "" if none does."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            warnings.simplefilter("ignore")
            asked(entry, mesh, lambda text: os.write(write, text.encode()))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        lines = said.read().splitlines()
    _, status = os.waitpid(child, 0)
    return f"{entry.name}: {lines[-1] if lines else 'itself'}: signal {status}" if status else ""


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_no_other_kernel_ends_the_process(fake_mesh, part):
    torch.set_num_threads(1)
    mesh = fake_mesh(2)
    assert [found for entry in list(operator_database().values())[part::PARTS] if (found := ended(entry, mesh))] == []
