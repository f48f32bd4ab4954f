"""`dtensor.interop.accelerate`: who reads what, accumulation, clipping, schedules, and what is saved and loaded."""

import importlib.util
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtensor import DTensor, PlacementError, Shard, distribute_model, init_device_mesh
from dtensor.parallel import fully_shard
from dtensor.testing import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="needs accelerate: pip install 'dtensor-compile[trainers]'"
)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def launched(rank):
    """The environment that a launcher makes, and a module that has no state of an earlier test."""
    size = str(dist.get_world_size())
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    from dtensor.interop.accelerate import Accelerator

    return Accelerator


def on_four(rank, folder):
    Accelerator = launched(rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}}
    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))

    def made():
        model = fully_shard(distribute_model(mlp(), mesh["tp"], plan, outputs={}), mesh["dp"])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        loader = torch.utils.data.DataLoader(data, batch_size=4)
        return accelerator, model, *accelerator.prepare(model, optimizer, loader, scheduler)[1:]

    accelerator, model, optimizer, loader, scheduler = made()
    assert (accelerator.num_processes, accelerator.process_index) == (2, rank // 2)
    assert torch.cat([accelerator.gather_for_metrics(x) for x in loader]).equal(data)
    assert accelerator.reduce(torch.tensor(1.0)).item() == 2
    assert accelerator.gather(torch.tensor(rank // 2)).tolist() == [0, 1]
    if rank == 3:
        accelerator.set_trigger()
    assert accelerator.check_trigger()

    plain = mlp()
    reference = torch.optim.Adam(plain.parameters(), lr=0.1)
    plain(data).square().mean().backward()
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    reference.step()
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    torch.testing.assert_close(norm, wanted)
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.full_tensor(), q)
    assert scheduler.get_last_lr() == [0.025]  # a step for each part of the batch

    accelerator.save_state(folder)
    weights = accelerator.get_state_dict(model)
    assert (rank == 0) == bool(weights)
    again, other, optimizer_of_other, *_ = made()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    again.load_state(folder)
    for p, q in zip(model.parameters(), other.parameters()):
        assert q.full_tensor().equal(p.full_tensor())
        for name, x in optimizer.state[p].items():
            assert torch.equal(
                getattr(optimizer_of_other.state[q][name], "_local_tensor", x), getattr(x, "_local_tensor", x)
            )


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def on_two(rank):
    Accelerator = launched(rank)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    loader = torch.utils.data.DataLoader(torch.ones(4, 8), batch_size=2)
    with pytest.raises(RuntimeError, match="none was prepared; prepare it before a loader"):
        Accelerator(cpu=True).prepare(loader)
    with pytest.raises(PlacementError, match="returns DTensors"):
        Accelerator(cpu=True).prepare(distribute_model(mlp(), mesh, {}))
    accelerator = Accelerator(cpu=True)
    model = fully_shard(mlp(), mesh)
    _, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="Write an Accelerator for each"):
        accelerator.prepare(distribute_model(mlp(), mesh, {}, outputs={}))
    with pytest.raises(ValueError, match="the state of an optimizer on one device"):
        optimizer.load_state_dict({"state": {0: {}}, "param_groups": []})


def test_a_loop_with_everything_equals_one_device(tmp_path):
    run_ranks(on_four, 4, str(tmp_path))


def test_what_cannot_be_is_said():
    run_ranks(on_two, 2)
