"""Styles and DTensors of torch given to this library: taken for their namesakes, or an error with what to write."""

from typing import Any

import pytest
import torch
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.parallel as theirs
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from dtensor import (
    DTensor,
    MixedTensorError,
    PlacementError,
    Shard,
    distribute_model,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from dtensor.parallel import ColwiseParallel, fully_shard, parallelize_module
from dtensor.testing import with_ranks

R, S = torch_tensor.Replicate(), torch_tensor.Shard


def made():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 4))


PLANS = {
    "pair": {"0": theirs.ColwiseParallel(output_layouts=R), "2": theirs.RowwiseParallel(input_layouts=R)},
    "sequence": {
        "0": theirs.ColwiseParallel(output_layouts=S(0)),
        "1": theirs.SequenceParallel(sequence_dim=0, use_local_output=True),
        "2": theirs.RowwiseParallel(input_layouts=S(0)),
    },
    "input": {
        "0": theirs.ColwiseParallel(),
        "1": theirs.PrepareModuleInput(input_layouts=S(-1), desired_input_layouts=R, use_local_output=True),
    },
    "both": {
        "0": theirs.ColwiseParallel(),
        "1": theirs.PrepareModuleInputOutput(
            input_layouts=(S(-1),),
            desired_input_layouts=(R,),
            use_local_input=True,
            output_layouts=R,
            desired_output_layouts=S(-1),
        ),
        "2": theirs.RowwiseParallel(),
    },
    "output": {"": theirs.PrepareModuleOutput(output_layouts=R, desired_output_layouts=R)},
}


class Own(theirs.ColwiseParallel):
    """A style that a user has derived from one of torch's."""


@with_ranks(2)
def test_styles_of_torch(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.arange(24.0).view(4, 6)
    for name, plan in PLANS.items():
        model: Any = parallelize_module(made(), mesh, plan)
        torch.testing.assert_close(model(x), made()(x), msg=name)
        assert all(isinstance(p, DTensor) for p in model[0].parameters()) == ("0" in plan)
    whole: Any = parallelize_module(nn.Linear(4, 4), mesh, theirs.ColwiseParallel())
    assert isinstance(whole.weight, DTensor)
    with pytest.raises(TypeError, match=r"Own is a style for torch's .*from dtensor\.parallel import ColwiseParallel`"):
        parallelize_module(made(), mesh, {"0": Own()})


@with_ranks(2)
def test_tensors_of_torch(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.arange(8.0).view(4, 2)
    x, y = distribute_tensor(whole, mesh, [Shard(0)]), torch_tensor.distribute_tensor(whole, mesh, [S(0)])
    parameter = distribute_tensor(nn.Parameter(y), mesh, [Shard(0)])
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad
    assert distribute_tensor(y, mesh, [Shard(0)]).full_tensor().equal(whole)
    with pytest.raises(PlacementError, match="already distributed as"):
        distribute_tensor(y, mesh, [Shard(1)])
    for act in (lambda: x + y, lambda: torch.cat([x, y]), lambda: x.copy_(y)):
        with pytest.raises(MixedTensorError, match=r"is a DTensor of torch.*write dtensor\.interop\.from_torch\(x\)"):
            act()
    with pytest.raises(TypeError, match=r"got a DTensor of torch.*write dtensor\.interop\.from_torch\(x\)"):
        DTensor.from_local(y, mesh, [Shard(0)])
    plan = {"0": theirs.ColwiseParallel(), "2": theirs.RowwiseParallel()}
    doors = {
        "distribute_model": lambda m: distribute_model(m, mesh),
        "parallelize_module": lambda m: parallelize_module(m, mesh, {"0": ColwiseParallel()}),
        "distribute_module": lambda m: distribute_module(m, mesh),
        "fully_shard": lambda m: fully_shard(m, mesh),
    }
    for name, door in doors.items():
        for model in (theirs.parallelize_module(made(), mesh, plan), torch_fully_shard(made(), mesh=mesh)):
            with pytest.raises(
                PlacementError, match=rf"{name}: '0.weight' is a DTensor of torch.*convert_module\(model\)"
            ):
                door(model)
