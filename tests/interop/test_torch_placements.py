"""Placements of torch.distributed.tensor do what ours do, in every public function that takes placements."""

import copy

import pytest
import torch
import torch.distributed.tensor as theirs
from torch import nn

import dtensor as ours
from dtensor import DTensor, distribute_module, distribute_tensor, init_device_mesh, local_map
from dtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    fully_shard,
    parallelize_module,
)
from dtensor.testing import with_threads

X = torch.arange(12.0).view(4, 3)
LINEAR = nn.Linear(4, 4)


def full(x):
    """What there is to compare: placements and values of a DTensor, a plain tensor, or what is a list already."""
    if isinstance(x, DTensor):
        return x.placements, x.device_mesh.ndim, x.full_tensor().detach()
    return [x.detach()] if isinstance(x, torch.Tensor) else x


def gradient(x, run):
    x = x.detach().requires_grad_()
    y = run(x)
    (y.to_local() if isinstance(y, DTensor) else y).sum().backward()
    return full(x.grad)


def style(made, x):
    model = parallelize_module(copy.deepcopy(LINEAR), x.device_mesh, made)
    return model(x)


def sharded(mesh, p):
    model = fully_shard(nn.Linear(4, 4), mesh, shard_placement_fn=lambda w: p.Shard(w.dim() - 1))
    return [w.placements for w in model.parameters()]


def distributed(mesh, p):
    def partition(name, module, mesh):
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [p.Shard(1)]))

    return distribute_module(copy.deepcopy(LINEAR), mesh, partition).weight


def column(mesh):
    return distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [ours.Shard(1)])


def rows(mesh):
    return distribute_tensor(X, mesh, [ours.Shard(0)])


USES = {
    "distribute_tensor": lambda m, p: distribute_tensor(X, m, [p.Shard(-1)]),
    "distribute_module": distributed,
    "from_local": lambda m, p: DTensor.from_local(X, m, [p.Partial("avg")]),
    "from_local run_check": lambda m, p: DTensor.from_local(X, m, [p.Replicate()], run_check=True),
    "from_local grad_placements": lambda m, p: gradient(
        X, lambda x: DTensor.from_local(x, m, [p.Partial()], grad_placements=[p.Replicate()])
    ),
    "to_local grad_placements": lambda m, p: gradient(rows(m), lambda x: x.to_local(grad_placements=[p.Shard(0)])),
    "full_tensor grad_placements": lambda m, p: gradient(
        rows(m), lambda x: x.full_tensor(grad_placements=[p.Partial()])
    ),
    "redistribute": lambda m, p: rows(m).redistribute(placements=[p.Replicate()]),
    "redistribute to another mesh": lambda m, p: rows(m).redistribute(
        init_device_mesh("cpu", (1, 2)), [p.Replicate(), p.Shard(1)]
    ),
    "redistribute grad_placements": lambda m, p: gradient(
        rows(m), lambda x: x.redistribute(placements=[p.Replicate()], grad_placements=[p.Replicate()])
    ),
    "zeros": lambda m, p: ours.zeros(4, 3, device_mesh=m, placements=[p.Shard(0)]),
    "ones": lambda m, p: ours.ones(4, 3, device_mesh=m, placements=[p.Shard(1)]),
    "full": lambda m, p: ours.full((4, 3), 7.0, device_mesh=m, placements=[p.Replicate()]),
    "empty": lambda m, p: ours.empty(4, 3, device_mesh=m, placements=[p.Shard(0)]).placements,
    "rand": lambda m, p: ours.rand(4, 3, device_mesh=m, placements=[p.Shard(0)]).placements,
    "randn": lambda m, p: ours.randn(4, 3, device_mesh=m, placements=[p.Shard(0)]).placements,
    "local_map": lambda m, p: local_map(
        lambda x, y: x + y, [p.Shard(0)], ([p.Shard(0)], [p.Shard(0)]), ([p.Shard(0)], [p.Shard(0)])
    )(rows(m), rows(m)),
    "local_map redistributing": lambda m, p: local_map(
        lambda x: (x.sum(0), x), ([p.Partial()], [p.Replicate()]), ([p.Replicate()],), redistribute_inputs=True
    )(rows(m))[0],
    "ColwiseParallel": lambda m, p: style(
        ColwiseParallel(input_layouts=p.Shard(0), output_layouts=p.Shard(0), use_local_output=False), column(m)
    ),
    "RowwiseParallel": lambda m, p: style(
        RowwiseParallel(input_layouts=p.Replicate(), output_layouts=p.Shard(0), use_local_output=False), column(m)
    ),
    "PrepareModuleInput": lambda m, p: style(
        PrepareModuleInput(input_layouts=p.Shard(0), desired_input_layouts=p.Replicate(), use_local_output=True),
        column(m),
    ),
    "PrepareModuleInput of keywords": lambda m, p: parallelize_module(
        Keywords(),
        m,
        PrepareModuleInput(
            input_kwarg_layouts={"x": p.Shard(0)},
            desired_input_kwarg_layouts={"x": p.Replicate()},
            use_local_output=True,
        ),
    )(x=X),
    "PrepareModuleOutput": lambda m, p: parallelize_module(
        Keywords(), m, PrepareModuleOutput(output_layouts=p.Shard(0), desired_output_layouts=(p.Replicate(),))
    )(X),
    "PrepareModuleInputOutput": lambda m, p: parallelize_module(
        Keywords(),
        m,
        PrepareModuleInputOutput(
            input_layouts=(p.Shard(0),),
            desired_input_layouts=(p.Replicate(),),
            use_local_input=True,
            output_layouts=p.Replicate(),
            desired_output_layouts=p.Shard(0),
            use_local_output=False,
        ),
    )(X),
    "fully_shard": sharded,
}
"""Public function -> what it computes on a mesh of two ranks, with `Shard`, `Replicate` and `Partial` of a module."""


class Keywords(nn.Module):
    def forward(self, x):
        return x * 2


@with_threads(2)
def test_they_do_what_ours_do(rank):
    mesh = init_device_mesh("cpu", (2,))
    for name, use in USES.items():
        for found, wanted in zip(full(use(mesh, theirs)), full(use(mesh, ours)), strict=True):
            same = torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else found == wanted
            assert same, f"{name}: {found} is not {wanted}"


def test_in_a_compiled_graph(fake_mesh):
    mesh = fake_mesh(2)

    def run(x, p=theirs):
        y = DTensor.from_local(x, mesh, [p.Shard(0)])
        return (y * y.redistribute(placements=[p.Replicate()])).redistribute(placements=(p.Shard(1),)).to_local()

    assert torch.compile(run, backend="aot_eager", fullgraph=True)(X).shape == (8, 2)


def test_what_is_no_placement_of_ours(fake_mesh):
    strided = theirs.placement_types._StridedShard(0, split_factor=2)
    with pytest.raises(ours.PlacementError, match=r"write Shard with a cut for each axis that shards the dimension"):
        distribute_tensor(X, fake_mesh(2), [strided])
