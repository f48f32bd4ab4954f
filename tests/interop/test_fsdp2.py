"""Models that torch's FSDP2 has sharded, alone and beside tensor parallel styles, become ours on the same memory."""

import copy

import pytest
import torch
import torch.distributed.tensor as theirs
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import parallel as their_parallel
from torch.distributed.tensor.parallel.input_reshard import input_reshard

from dtensor import DTensor, MeshError, init_device_mesh
from dtensor.interop import convert_module
from dtensor.layout.layout import Layout
from dtensor.parallel import FullyShardedModule
from dtensor.testing import MLPModule, with_ranks, with_threads


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = MLPModule("cpu")
        self.norm = nn.LayerNorm(10)

    def forward(self, x):
        return self.norm(x + self.mlp(x))


def batch(step):
    return torch.sin(torch.arange(80.0) * (step + 1)).view(8, 10)


def trained(parameters, run, part, steps=range(3)):
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    losses = []
    for step in steps:
        x = part(batch(step))
        loss = F.mse_loss(run(x), x.flip(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def wanted(steps=range(3), count=2):
    """Losses of one device on each part of the batch."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = [[] for _ in range(count)]
    for step in steps:
        for i, x in enumerate(batch(step).chunk(count)):
            loss = F.mse_loss(model(x), x.flip(-1))
            (loss / count).backward()
            losses[i].append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def parallelized(mesh, model, **options):
    plan = {"net1": their_parallel.ColwiseParallel(), "net2": their_parallel.RowwiseParallel()}
    their_parallel.parallelize_module(model.mlp, mesh["tp"], plan)
    fully_shard(model.mlp, mesh=mesh["dp"], **options)
    return fully_shard(model, mesh=mesh["dp"], **options)


@pytest.mark.nightly
@with_ranks(4)
def test_trains_beside_tensor_parallelism_eager_and_compiled(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    at = mesh.get_local_rank("dp")
    expected = wanted()[at]

    def part(x):
        return x.chunk(2)[at]

    model = parallelized(mesh, Model())
    first = F.mse_loss(model(part(batch(0))), part(batch(0)).flip(-1))  # torch's own forward, before and after whose
    first.backward()  # backward FSDP2 registers hooks and keeps the root unsharded
    assert float(first) == pytest.approx(expected[0], rel=1e-5)
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    pointers = [p.to_local().data_ptr() for p in model.parameters()]
    assert convert_module(model) is model
    assert [p.to_local().data_ptr() for p in model.parameters()] == pointers
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        torch.testing.assert_close(p.grad.full_tensor(), grads[name])
    model.zero_grad()
    assert trained(model.parameters(), model, part) == pytest.approx(expected, rel=1e-5)
    model = convert_module(parallelized(mesh, Model()))
    compiled = torch.compile(model, backend="dtensor", fullgraph=True, options={"inner": "aot_eager"})
    assert trained(model.parameters(), compiled, part) == pytest.approx(expected, rel=1e-5)


@with_threads(4)
def test_what_the_model_becomes(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = parallelized(mesh, Model(), mp_policy=policy, reshard_after_forward=False)
    names = [name for name, _ in model.named_parameters()]
    values = {name: p.full_tensor() for name, p in model.named_parameters()}
    convert_module(model)
    assert isinstance(model, FullyShardedModule)
    assert isinstance(model, Model)
    assert not any(isinstance(m, FSDPModule) for m in model.modules())
    assert not [h for m in model.modules() for h in m._forward_hooks.values() if "fsdp" in h.__module__]
    assert not any(hasattr(m, "_is_fsdp_managed_module") for m in model.modules())
    assert [name for name, _ in model.named_parameters()] == names
    for name, p in model.named_parameters():
        assert torch.equal(p.full_tensor(), values[name])
    assert model.mlp.net1.weight._spec.layout is Layout.parse("S(0)#1S(0)#0", 2)
    assert model.mlp.net2.weight._spec.layout is Layout.parse("S(0)S(1)", 2)
    assert model.norm.weight.device_mesh == mesh["dp"]
    unit, inner = model._fully_sharded.unit, model.mlp._fully_sharded.unit
    assert unit is not inner
    assert unit.keep
    assert (unit.policy.param_dtype, unit.policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert model(batch(0)).dtype is torch.bfloat16


@with_threads(4)
def test_hybrid_other_dimensions_and_shared_parameters(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "dp"))
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(6, 5))
    model[1].weight = model[0].weight
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    for k, p in enumerate(model.parameters()):
        nn.init.normal_(p, generator=torch.Generator().manual_seed(k))
    alone = copy.deepcopy(model)
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: theirs.Shard(p.dim() - 1) if p.shape[-1] == 6 else None)
    convert_module(model)
    assert model[0].weight is model[1].weight
    assert model[0].weight._spec.layout.text == "RS(1)"
    assert model[2].bias._spec.layout.text == "RS(0)"
    torch.testing.assert_close(model(x), alone(x))
    model(x).square().mean().backward()
    alone(x).square().mean().backward()
    mean = DTensor.from_local(alone[0].weight.grad, mesh, [theirs.Partial("avg")] * 2)
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), mean.full_tensor())


@with_threads(2)
def test_one_unit_of_several_modules_and_one_without_parameters(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU())
    for k, p in enumerate(model.parameters()):
        nn.init.normal_(p, generator=torch.Generator().manual_seed(k))
    values = [p.detach().clone() for p in model.parameters()]
    fully_shard([model[0], model[1]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    convert_module(model)
    assert model[0]._fully_sharded.unit is model[1]._fully_sharded.unit
    assert isinstance(model, FullyShardedModule)
    x = torch.ones(2, 4)
    torch.testing.assert_close(model(x), F.linear(F.linear(x, *values[:2]), *values[2:]).relu())


@with_threads(2)
def test_what_cannot_be_converted(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    inside = nn.Linear(4, 4)
    model = fully_shard(nn.Sequential(inside, nn.ReLU()), mesh=mesh)
    with pytest.raises(ValueError, match=r"of this Linear were sharded by a fully_shard on the FSDPSequential"):
        convert_module(inside)
    assert isinstance(inside.weight, theirs.DTensor)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"FSDP2 holds gradients that it has not reduced"):
        convert_module(model)
    assert isinstance(model, FSDPModule)
    model = fully_shard(nn.Linear(4, 4), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(NotImplementedError, match=r"FSDP2 with CPUOffloadPolicy has no equivalent"):
        convert_module(model)
    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    apart = their_parallel.parallelize_module(nn.Linear(4, 4), other["tp"], their_parallel.ColwiseParallel())
    whole = init_device_mesh("cpu", (1, 2), mesh_dim_names=("rows", "columns"))
    with pytest.raises((MeshError, RuntimeError)):
        convert_module(fully_shard(apart, mesh=whole["rows"]))
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    for part in tied:
        fully_shard(part, mesh=mesh)
    with pytest.raises(ValueError, match=r"weight of the Linear was tied to weight of the Linear, but separate calls"):
        convert_module(tied)
    resharded = input_reshard(nn.Linear(4, 4), mesh, 0)
    with pytest.raises(NotImplementedError, match=r"has torch's input_reshard, which supports only torch's DTensors"):
        convert_module(resharded)


OVERRIDE = "param_dtype_override_fn"


@pytest.mark.skipif(OVERRIDE not in MixedPrecisionPolicy.__dataclass_fields__, reason="torch has it since 2.15")
@with_threads(2)
def test_parameters_of_other_dtypes_cannot_be_converted(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(torch.bfloat16, **{OVERRIDE: lambda p: torch.float32 if p.dim() == 1 else None})
    model = fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=policy)
    with pytest.raises(NotImplementedError, match=OVERRIDE):
        convert_module(model)
    assert isinstance(model, FSDPModule)
