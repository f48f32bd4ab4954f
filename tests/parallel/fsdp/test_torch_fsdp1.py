"""FullyShardedDataParallel (FSDP1) over models that styles have sharded, on a mesh (dp, tp) of four processes."""

import contextlib
import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import parallel as their_parallel

from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.interop import to_torch
from dtensor.layout.layout import Layout
from dtensor.parallel import ColwiseParallel, DTensorExtensions, RowwiseParallel, enable_fsdp1, parallelize_module
from dtensor.testing import MLPModule, with_ranks, with_threads

PLAN = {"mlp.net1": ColwiseParallel(), "mlp.net2": RowwiseParallel()}
SHARDED = {
    "norm.weight": "S(0)",
    "mlp.net1.weight": "S(0)#1S(0)#0",
    "mlp.net1.bias": "S(0)#1S(0)#0",
    "mlp.net2.weight": "S(0)S(1)",
    "mlp.net2.bias": "S(0)R",
}
"""Layouts in a sharded state dict, over (dp, tp): dp cuts what the plan has left; the norm is not in the plan."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = MLPModule("cpu")
        self.norm = nn.LayerNorm(10, bias=False)

    def forward(self, x):
        return self.norm(x + self.mlp(x))


def batch(step):
    return torch.sin(torch.arange(80.0) * (step + 1)).view(8, 10)


def trained(model, part, steps=range(3), optimizer=None):
    """Losses of some steps on `part` of each batch; the optimizer."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in steps:
        x = part(batch(step))
        loss = F.mse_loss(model(x), x.flip(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, optimizer


def wrapped(mesh, **options):
    model = parallelize_module(Model(), mesh["tp"], PLAN)
    policy = ModuleWrapPolicy({MLPModule})
    cpu = torch.device("cpu")  # else FSDP1 looks for an accelerator
    return FSDP(model, device_mesh=mesh["dp"], auto_wrap_policy=policy, device_id=cpu, **options)


def plain(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def check(found, wanted):
    assert [*found] == [*wanted]
    for name, x in found.items():
        torch.testing.assert_close(plain(x), wanted[name], msg=lambda text, name=name: f"{name}: {text}")


def mean_over_dp(mesh, losses):
    parts = DTensor.from_local(torch.tensor(losses), mesh["dp"], [Partial("avg")])
    return parts.full_tensor().tolist()


@with_ranks(4)
def test_trains_and_its_states_go_out_and_in(rank, tmp_path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    enable_fsdp1()
    enable_fsdp1()  # the second call changes nothing
    alone = Model()
    first, optimizer = trained(alone, lambda x: x)
    values = copy.deepcopy(alone.state_dict())
    moments = {name: copy.deepcopy(optimizer.state[p]) for name, p in alone.named_parameters()}
    then, _ = trained(alone, lambda x: x, range(3, 6), optimizer)

    def part(x):
        return x.chunk(2)[mesh.get_local_rank("dp")]

    for use_orig_params in (True, False):
        model = wrapped(mesh, use_orig_params=use_orig_params)
        losses, optimizer = trained(model, part)
        assert mean_over_dp(mesh, losses) == pytest.approx(first, rel=1e-5)
        for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.FULL_STATE_DICT):
            with FSDP.state_dict_type(model, kind):
                state, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
            check(state, values)
            for name, found in states["state"].items():
                check(found, {key: moments[name][key] for key in found})
            if kind is StateDictType.SHARDED_STATE_DICT:
                check_layouts(mesh, state)
                check_layouts(mesh, {name: found["exp_avg"] for name, found in states["state"].items()})
            fresh = wrapped(mesh, use_orig_params=use_orig_params)
            with torch.no_grad():
                for p in fresh.parameters():
                    p.zero_()
            again = torch.optim.AdamW(fresh.parameters(), lr=0.05)
            with FSDP.state_dict_type(fresh, kind):
                if kind is StateDictType.SHARDED_STATE_DICT:
                    state = through_a_file(state, fresh.state_dict(), tmp_path / str(use_orig_params))
                fresh.load_state_dict(state)
                again.load_state_dict(FSDP.optim_state_dict_to_load(fresh, again, states))
            losses, _ = trained(fresh, part, range(3, 6), again)
            assert mean_over_dp(mesh, losses) == pytest.approx(then, rel=1e-5)
    for strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        losses, _ = trained(
            wrapped(mesh, use_orig_params=strategy.name != "NO_SHARD", sharding_strategy=strategy), part
        )
        assert mean_over_dp(mesh, losses) == pytest.approx(first, rel=1e-5)
    with pytest.raises(ValueError, match=r"with NO_SHARD \(which it also takes on an axis of one rank\) and use_orig"):
        wrapped(mesh, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD)
    check_accumulated(wrapped(mesh, use_orig_params=True), part)


def through_a_file(state, other, file):
    """`state`, written by all ranks, and read into tensors of other values."""
    dcp.save(state, checkpoint_id=file)
    assert not torch.equal(other["mlp.net2.bias"].full_tensor(), state["mlp.net2.bias"].full_tensor())
    dcp.load(other, checkpoint_id=file)
    return other


def check_accumulated(model, part):
    """Gradients of two batches, of which the first is not reduced, seen whole."""
    alone = Model()
    for found, take in ((alone, lambda x: x), (model, part)):
        for step in range(2):
            with contextlib.nullcontext() if found is alone or step else model.no_sync():
                x = take(batch(step))
                F.mse_loss(found(x), x.flip(-1)).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        check(
            {name: p.grad for name, p in model.named_parameters()},
            {name: p.grad for name, p in alone.named_parameters()},
        )


def check_layouts(mesh, state):
    for name, x in state.items():
        assert x.device_mesh == (mesh["dp"] if name == "norm.weight" else mesh)
        assert x._spec.layout is Layout.parse(SHARDED[name], x.dim()), name


def extensions(data_mesh, kept=False):
    return DTensorExtensions(their_parallel.fsdp.DTensorExtensions(torch.cpu), data_mesh, kept)


@with_threads(4)
def test_parts_go_out_and_come_back(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = extensions(mesh["dp"])
    for shape, placement in (
        ((7, 3), Shard(0)),
        ((3, 5), Shard(1)),
        ((1, 2), Shard(0)),
        ((4,), Replicate()),
        ((), None),
    ):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        p = nn.Parameter(distribute_tensor(x, mesh["tp"], [placement or Replicate()]))
        local, known = found.pre_flatten_transform(p)
        assert local.requires_grad
        assert local.data_ptr() == p.to_local().data_ptr()
        whole = found.post_unflatten_transform(local, known)
        one, other = whole._spec, p._spec  # not one object where a thread has made its mesh, and emptied caches, since
        for name in ("mesh", "layout", "shape", "stride", "dtype"):
            assert getattr(one, name) == getattr(other, name)
        for cut in (found.chunk_dtensor(whole, 0, mesh["dp"]), found.chunk_tensor(p, 0, 2, 1, mesh.get_group("dp"))):
            assert cut.device_mesh == mesh
            assert torch.equal(cut.full_tensor(), x)
            if shape:
                own = p.to_local().chunk(2)
                own = own[mesh.get_local_rank("dp")] if len(own) > mesh.get_local_rank("dp") else own[0][:0]
                assert torch.equal(cut.to_local(), own)
            assert torch.equal(found.all_gather_dtensor(cut, mesh), local)
            size, (shard,) = found.pre_load_state_dict_transform(cut)
            assert size.shape == local.shape
            assert torch.equal(shard.tensor, cut.to_local())
        # a state dict that torch's extensions made
        if shape:
            assert torch.equal(found.all_gather_dtensor(to_torch(cut), mesh), local)


@with_threads(8)
def test_hybrid_sharding_replicates_over_its_first_axis(rank):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copies", "dp", "tp"))
    x = torch.arange(32.0).view(8, 4)
    found = extensions(mesh["copies", "dp"])
    cut = found.chunk_dtensor(distribute_tensor(x, mesh["tp"], [Shard(0)]), 0, mesh["copies", "dp"])
    assert cut._spec.layout is Layout.parse("RS(0)#1S(0)#0", 2)
    assert torch.equal(cut.full_tensor(), x)
    assert found.chunk_dtensor(x, 0, mesh["copies", "dp"]).placements == (Replicate(), Shard(0))


@with_threads(2)
def test_gradients_of_replicas_are_summed(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = extensions(mesh)
    p = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
    local, known = found.pre_flatten_transform(p)
    rows = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
    (rows * found.post_unflatten_transform(local, known)).sum().backward()
    assert torch.equal(local.grad, torch.arange(12.0).view(4, 3).sum(0))


@with_threads(2)
def test_what_is_refused(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = extensions(mesh)
    p = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    _, known = found.pre_flatten_transform(p)
    with pytest.raises(ValueError, match=r"shape \[4, 2\] is shared by two modules of one FullyShardedDataParallel"):
        found.pre_flatten_transform(p)
    with pytest.raises(ValueError, match=r"has a part of shape \[2, 2\] on this rank; got one of shape \[4, 2\]"):
        found.post_unflatten_transform(torch.ones(4, 2), known)
    with pytest.raises(ValueError, match=r"is \[Partial\(reduce_op='sum'\)\], which FullyShardedDataParallel"):
        found.pre_flatten_transform(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    with pytest.raises(TypeError, match=r"a sharded state dict holds DTensors, not Tensor; load what was saved"):
        found.all_gather_dtensor(torch.ones(2), mesh)
    with pytest.raises(ValueError, match=r"with NO_SHARD"):
        extensions(mesh, kept=True).pre_flatten_transform(p)
