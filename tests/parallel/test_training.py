"""What training loops use beside optimizers, on sharded models: scaling, autocast, averages, ties."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dtensor import DTensor, Partial, PlacementError, Shard, distribute_module, distribute_tensor, init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, clip_grad_norm_, fully_shard, parallelize_module
from dtensor.testing import MLPModule, with_ranks, with_threads
from dtensor.testing.models import Tied

X = torch.sin(torch.arange(80.0)).view(8, 10)


torch.manual_seed(0)
MLP = MLPModule("cpu")  # made once: threads that drew at the same time would share one generator


def pair(mesh):
    dense = copy.deepcopy(MLP)
    plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    return dense, parallelize_module(copy.deepcopy(dense), mesh, plan)


def same(dense, sharded, **tolerance):
    for (name, d), s in zip(dense.named_parameters(), sharded.parameters()):
        torch.testing.assert_close(s.full_tensor(), d, msg=lambda text, n=name: f"{n}: {text}", **tolerance)


@with_threads(2)
def test_grad_scaler_and_clipping(rank):
    """In one step some gradients of one rank are infinite: no rank takes it."""
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for model in pair(mesh):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(model(X).square().mean()).backward()
            if step == 1:
                grad = model.net1.weight.grad
                part: Any = grad.to_local() if isinstance(grad, DTensor) else grad
                if rank == 0 or part is grad:
                    part[0] = torch.inf
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        found.append((model, scales))
    (dense, right), (sharded, scales) = found
    assert scales == right == [8.0, 4.0, 4.0, 8.0]
    same(dense, sharded)


@with_threads(2)
def test_infinity_in_parts_of_a_sum_and_on_several_meshes(rank):
    one, other = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    big = torch.finfo(torch.float32).max
    grads = [
        distribute_tensor(torch.full((4,), 6.0), one, [Shard(0)]),
        distribute_tensor(torch.full((4,), 6.0), other, None),
        torch.full((4,), 6.0),
    ]
    operator = torch._amp_foreach_non_finite_check_and_unscale_
    found = torch.zeros(())
    operator(grads, found, torch.tensor(0.5))
    assert found.item() == 0
    assert [(g.full_tensor() if isinstance(g, DTensor) else g).tolist() for g in grads] == [[3.0] * 4] * 3
    if rank == 1:
        grads[0].to_local()[1] = torch.nan
    operator(grads, found, torch.tensor(0.5))
    assert found.item() == 1
    found.zero_()
    parts = DTensor.from_local(torch.full((2,), big), one, [torch.distributed.tensor.Partial()])
    operator([parts], found, torch.tensor(1.0))
    assert found.item() == 1


@with_threads(2)
def test_autocast(rank):
    dense, sharded = pair(init_device_mesh("cpu", (2,)))
    outs = []
    for model in (dense, sharded):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.net1(X)
            out = model.net2(model.relu(hidden))
            loss = F.mse_loss(out, torch.zeros_like(out))
        assert hidden.dtype == torch.bfloat16
        loss.backward()
        outs.append(out)
    torch.testing.assert_close(outs[1], outs[0], rtol=0.02, atol=0.02)
    for d, s in zip(dense.parameters(), sharded.parameters()):
        assert s.grad.dtype == torch.float32
        torch.testing.assert_close(s.grad.full_tensor(), d.grad, rtol=0.05, atol=0.01)


@with_threads(2)
def test_moving_averages(rank):
    averages = []
    for model in pair(init_device_mesh("cpu", (2,))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        mean = AveragedModel(model)
        for _ in range(3):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
            ema.update_parameters(model)
            mean.update_parameters(model)
        averages.append((ema, mean))
    for d, s in zip(*averages):
        same(d, s)
        torch.testing.assert_close(s(X), d(X))
        assert s.module.net1.weight.placements == (Shard(0),)


def two_dimensional():
    """The dense model, it fully sharded over one axis and tensor parallel over the other, and the data axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dense, sharded = pair(mesh["tp"])
    return dense, fully_shard(sharded, mesh["dp"]), mesh["dp"]


@with_threads(4)
def test_grad_scaler_on_two_axes(rank):
    """Gradients of one rank alone are infinite in one step: no rank takes it."""
    dense, sharded, dp = two_dimensional()
    found = []
    for model, x in ((dense, X), (sharded, X.chunk(2)[dp.get_local_rank()])):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            grad: Any = model.net1.weight.grad
            if step == 1 and (model is dense or rank == 3):
                (grad.to_local() if isinstance(grad, DTensor) else grad)[0] = torch.inf
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        found.append(scaler.get_scale())
    assert found == [4.0, 4.0]
    same(dense, sharded)


@with_threads(4)
def test_moving_averages_on_two_axes(rank):
    dense, sharded, dp = two_dimensional()
    averages = []
    for model, x in ((dense, X), (sharded, X.chunk(2)[dp.get_local_rank()])):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            ema.update_parameters(model)
        averages.append(ema)
    same(*averages)
    assert averages[1].module.net1.weight._spec.layout is sharded.net1.weight._spec.layout
    torch.testing.assert_close(averages[1](X), averages[0](X))


@with_threads(4)
def test_autocast_on_two_axes(rank):
    dense, sharded, dp = two_dimensional()
    for model, x in ((dense, X), (sharded, X.chunk(2)[dp.get_local_rank()])):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
            loss = F.mse_loss(out, torch.zeros_like(out))
        assert out.dtype == torch.bfloat16
        loss.backward()
    for d, s in zip(dense.parameters(), sharded.parameters()):
        assert s.grad.dtype == torch.float32
        torch.testing.assert_close(s.grad.full_tensor(), d.grad, rtol=0.05, atol=0.01)


@with_ranks(2)
def test_autocast_and_scaling_compiled(rank):
    """The step of a loop: the model compiled under autocast, its gradients scaled, clipped, and taken."""
    mesh, losses = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), []
    dense, tensor_parallel = pair(mesh)
    for model, x in ((dense, X), (tensor_parallel, X), (fully_shard(pair(mesh)[0], mesh), X.chunk(2)[rank])):
        torch.compiler.reset()
        compiled = torch.compile(model, backend="dtensor", fullgraph=True, options={"inner": "aot_eager"})
        run = dense if model is dense else compiled
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(run(x), torch.zeros_like(x))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            mean = DTensor.from_local(loss.detach().float(), mesh, [Partial("avg")])
            losses[-1].append(mean.full_tensor().item())
    assert losses[0][0] > losses[0][2]
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=0.02)


class Doubled(nn.Module):
    def forward(self, w):
        return 2 * w

    def right_inverse(self, w):
        return w / 2


@with_threads(2)
def test_parametrized_weights(rank):
    dense, sharded = pair(init_device_mesh("cpu", (2,)))
    for model in (dense, sharded):
        parametrize.register_parametrization(model.net1, "weight", Doubled())
        parametrizations.weight_norm(model.net2, "weight", dim=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
    same(dense, sharded, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sharded(X), dense(X), rtol=1e-4, atol=1e-5)


TIED = Tied(12, 6)


@with_threads(2)
def test_tied_weights_stay_tied(rank):
    mesh = init_device_mesh("cpu", (2,))
    dense = copy.deepcopy(TIED)
    tokens = torch.arange(10) % 12
    plans = {"table": RowwiseParallel(), "head": ColwiseParallel(use_local_output=False)}
    sharded = parallelize_module(copy.deepcopy(dense), mesh, plans)
    assert sharded.head.weight is sharded.table.weight
    assert len(list(sharded.parameters())) == 1
    dense(tokens).square().mean().backward()
    sharded(tokens).square().mean().backward()
    torch.testing.assert_close(sharded.head.weight.grad.full_tensor(), dense.head.weight.grad)
    replicated = distribute_module(copy.deepcopy(dense), mesh)
    assert replicated.head.weight is replicated.table.weight
    with pytest.raises(PlacementError, match=r"shared by several modules.*\[Shard\(dim=1\)\].*\[Shard\(dim=0\)\]"):
        parallelize_module(copy.deepcopy(dense), mesh, {"table": ColwiseParallel(), "head": ColwiseParallel()})


@with_threads(2)
def test_optimizer_state_by_name(rank):
    """As torch.distributed.checkpoint takes it: names of parameters in place of numbers."""
    dense, sharded = pair(init_device_mesh("cpu", (2,)))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (dense, sharded)]
    for model, optimizer in zip((dense, sharded), optimizers):
        model(X).square().mean().backward()
        optimizer.step()
    state: dict = get_optimizer_state_dict(sharded, optimizers[1])  # pyright: ignore[reportAssignmentType]
    assert isinstance(state["state"]["net1.weight"]["exp_avg"], DTensor)
    again = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    set_optimizer_state_dict(sharded, again, state)
    for model, optimizer in zip((dense, sharded), (optimizers[0], again)):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    same(dense, sharded)
