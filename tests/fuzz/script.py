"""A program as a short Python script that runs it on ranks and on one device, and prints what differs."""

import inspect

from .program import Block, Perceptron, Program, distributed, move, parsed, through_local, through_whole, values_of
from .running import Setting, by_style, in_shards

HEAD = '''\
"""{why}"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dtensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from dtensor.api import distribute_parameter
from dtensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, fully_shard, parallelize_module
from dtensor.testing import {run}
'''

TAIL = """

def run(f, xs, ms):
    outputs = f(*xs, *ms)
    leaves = [x for x in (*xs, *(p for m in ms for p in m.parameters())) if x.requires_grad]
    loss = sum(x.square().sum() for x in outputs if x.requires_grad)
{twice}    if isinstance(loss, torch.Tensor):
        loss.backward()
    found = [*outputs, *(x.grad for x in leaves), *(x for x in xs if not x.requires_grad)]
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in found]


def main(rank):
    mesh = init_device_mesh("cpu", {mesh})
    on_ranks = {compiled}
    for batch in {batches}:
        plain, modules = make(batch)
        want = run(program, plain, modules)
        given, modules = make(batch)
        xs = [distributed(x, mesh, p) for x, p in zip(given, {placements})]
        ms = [{modules}]
        got = run(on_ranks, xs, ms)
        for k, (a, b) in enumerate(zip(got, want)):
            if (a is None) != (b is None) or a is not None and not torch.allclose(a, b, 1e-6, 1e-6, equal_nan=True):
                print(f"rank {{rank}}, batch {{batch}}: result {{k}} is {{a}}, one device's {{b}}")


if __name__ == "__main__":
    {run}(main, {n}, timeout=300)
"""

TWICE = """\
    grads = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    loss = sum(g.square().sum() for g in grads if g is not None and g.requires_grad)
"""

APPLIED = {
    "replicate": "distribute_module(modules[{k}], mesh)",
    "shard": "in_shards(modules[{k}], mesh)",
    "fsdp": 'fully_shard(modules[{k}], mesh, activations="global")',
    "tp": "by_style(modules[{k}], mesh)",
}


def script(program: Program, setting: Setting, why: str = "") -> str:
    """The text of the script; `why` is its docstring."""
    run = "run_ranks" if setting.compiled else "run_threads"
    source = program.source
    used = [f for f in (move, through_whole, through_local) if f"{f.__name__}(" in source]
    used += [m for m in (Block, Perceptron) if any(m.__name__ in given.text for given in program.modules)]
    used += [f for f in (by_style, in_shards) if any(f.__name__ in APPLIED[m.plan] for m in program.modules)]
    helpers = "\n\n".join(inspect.getsource(f) for f in (*used, values_of, parsed, distributed))
    compiled = "program"
    if setting.compiled:
        compiled = (
            f'torch.compile(program, backend="dtensor", fullgraph=True, dynamic={setting.dynamic}, '
            f"options={dict(setting.options)})"
        )
    tail = TAIL.format(
        twice=TWICE if setting.twice else "",
        mesh=setting.mesh,
        batches=(None, *setting.batches),
        placements=[x.placements for x in program.inputs],
        modules=", ".join(APPLIED[m.plan].format(k=k) for k, m in enumerate(program.modules)),
        compiled=compiled,
        run=run,
        n=setting.ranks,
    )
    return "\n\n".join([HEAD.format(why=why, run=run), source, _make(program), helpers]) + tail


def _make(program: Program) -> str:
    """The function that makes inputs and modules on one device."""
    lines = ["def make(batch=None):", "    inputs = ["]
    for seed, x in enumerate(program.inputs):
        sizes = [f"batch or {n}" if d == x.batch else str(n) for d, n in enumerate(x.shape)]
        values = f"values_of(({''.join(f'{n}, ' for n in sizes)}), {x.dtype!r}, {x.high}, {seed})"
        lines.append(f"        {values}{'.requires_grad_()' if x.grad else ''},  # {x.name}")
    lines += ["    ]", f"    modules = [{', '.join(f'{m.text}.double()' for m in program.modules)}]"]
    if program.modules:
        lines += [
            "    for m in modules:",
            "        for seed, p in enumerate(m.parameters()):",
            '            p.data = values_of(tuple(p.shape), "float64", 0, 100 + seed) * 0.5',
        ]
    return "\n".join([*lines, "    return inputs, modules", ""])
