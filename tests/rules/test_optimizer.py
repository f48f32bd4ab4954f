"""Fused optimizer steps on sharded parameters, against one device."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from dtensor import Replicate, Shard, distribute_tensor
from dtensor.testing import with_threads

OPTIMIZERS = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"lr": torch.tensor(0.1)}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"weight_decay": 0.1}),
    (torch.optim.Adagrad, {}),
]


@pytest.mark.parametrize("index", range(len(OPTIMIZERS)))
@with_threads(2)
def test_fused_steps_are_those_of_one_device(rank, index):
    kind, options = OPTIMIZERS[index]
    options = {"lr": 0.1, "fused": True, **options}
    mesh = init_device_mesh("cpu", (2,))
    values = [torch.sin(torch.arange(15.0)).reshape(5, 3), torch.arange(3.0), torch.ones(2)]
    placements = [[Shard(0)], [Replicate()], None]
    dense = [v.clone().requires_grad_() for v in values]
    placed = [
        (v.clone() if p is None else distribute_tensor(v, mesh, p)).requires_grad_() for v, p in zip(values, placements)
    ]
    steppers = [kind(parameters, **options) for parameters in (dense, placed)]
    for step in range(3):
        for d, p, where in zip(dense, placed, placements):
            d.grad = torch.cos(d.detach() * (step + 1))
            p.grad = d.grad.clone() if where is None else distribute_tensor(d.grad, mesh, where)
        for s in steppers:
            s.step()
    for d, p, where in zip(dense, placed, placements):
        found = p if where is None else p.full_tensor()
        torch.testing.assert_close(found, d)


@with_threads(2)
def test_a_gradient_laid_out_otherwise_is_brought_to_the_parameter(rank):
    mesh = init_device_mesh("cpu", (2,))
    p = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
    p.grad = distribute_tensor(torch.arange(4.0), mesh, [Replicate()])
    torch.optim.SGD([p], lr=0.5, fused=True).step()
    assert p.full_tensor().tolist() == [1.0, 0.5, 0.0, -0.5]


@with_threads(2)
def test_state_keeps_another_layout(rank):
    """It is written in the layout that the operator runs in, and moved back."""
    mesh = init_device_mesh("cpu", (2,))
    p = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
    p.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.5, fused=True)
    optimizer.step()
    optimizer.state[p]["momentum_buffer"] = distribute_tensor(torch.full((4,), 2.0), mesh, [Replicate()])
    optimizer.step()
    momentum = optimizer.state[p]["momentum_buffer"]
    assert momentum.placements == (Replicate(),)
    assert momentum.full_tensor().tolist() == [2.0] * 4
    assert p.full_tensor().tolist() == [-0.5] * 4
