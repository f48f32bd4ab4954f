"""Plans and arguments: what a name matches, and what the errors say."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dtensor.errors import PlacementError
from dtensor.layout.placements import Replicate, Shard
from dtensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    parallelize_module,
)
from dtensor.tensor.tensor import DTensor
from dtensor.testing import MLPStacked, ModelArgs, Transformer, with_threads
from dtensor.testing.models import Tied


class Record(ParallelStyle):
    """Notes the modules it is applied to."""

    def __init__(self):
        self.modules = []

    def apply(self, module, device_mesh):
        self.modules.append((module, device_mesh, self.src_data_rank))
        return module


def one_axis():
    return init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))


def matched(model, pattern):
    """Names of the modules that `pattern` matches."""
    record = Record()
    parallelize_module(model, one_axis(), {pattern: record})
    names = {id(m): name for name, m in model.named_modules()}
    return [names[id(m)] for m, _, _ in record.modules]


@with_threads(1)
def test_what_a_name_matches(rank):
    model = Transformer(ModelArgs(n_layers=3))
    assert matched(model, "") == [""]
    assert matched(model, "norm") == ["norm"]
    assert matched(model, "layers.*.attention.wq") == [f"layers.{i}.attention.wq" for i in range(3)]
    assert matched(model, "layers.[0-1].ffn_norm") == ["layers.0.ffn_norm", "layers.1.ffn_norm"]
    assert matched(model, "layers.2.feed_forward.w?") == ["layers.2.feed_forward.w1", "layers.2.feed_forward.w2"]
    assert matched(model, "*") == ["tok_embeddings", "pos_embeddings", "dropout", "layers", "norm", "output"]


@with_threads(1)
def test_a_module_with_two_names_is_taken_once(rank):
    shared = nn.Linear(2, 2)
    assert matched(nn.ModuleDict({"a": shared, "b": shared}), "?") == ["a"]


@with_threads(1)
def test_a_name_without_a_module(rank):
    model = Transformer(ModelArgs())
    record = Record()
    with pytest.raises(ValueError, match=r"'layers.\*.attention.qw', but no module .*layers.\d.attention.w"):
        parallelize_module(model, one_axis(), {"norm": record, "layers.*.attention.qw": ColwiseParallel()})
    assert not record.modules, "nothing is sharded by a plan that is wrong somewhere"
    with pytest.raises(ValueError, match="has no modules inside; write ''"):
        parallelize_module(nn.Linear(2, 2), one_axis(), {"weight": ColwiseParallel()})


@with_threads(4)
def test_the_mesh_has_one_axis(rank):
    model, record = MLPStacked("cpu"), Record()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"this one has 2; slice one axis out, such as mesh\['tp'\]"):
        parallelize_module(model, mesh, record)
    with pytest.raises(ValueError, match="mesh_dim_names"):
        parallelize_module(model, init_device_mesh("cpu", (2, 2)), record)
    with pytest.raises(ValueError, match="given no device_mesh"):
        parallelize_module(model, None, record)
    with mesh["tp"]:
        parallelize_module(model, parallelize_plan=record, src_data_rank=None)
    assert record.modules == [(model, mesh["tp"], None)]


@with_threads(1)
def test_plans_that_are_none(rank):
    model, mesh = MLPStacked("cpu"), one_axis()
    with pytest.raises(TypeError, match=r"got \[ColwiseParallel"):
        parallelize_module(model, mesh, [ColwiseParallel()])
    with pytest.raises(TypeError, match=r"parallelize_plan\['layers'\] is not a ParallelStyle but 'colwise'"):
        parallelize_module(model, mesh, {"layers": "colwise"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert parallelize_module(model, mesh) is model


@with_threads(1)
def test_modules_that_cannot_be_sharded(rank):
    for style in (ColwiseParallel(), RowwiseParallel()):
        with pytest.raises(NotImplementedError, match=r"shards nn.Linear and nn.Embedding, not Conv2d"):
            parallelize_module(nn.Conv2d(1, 1, 1), one_axis(), style)


@with_threads(1)
def test_inputs_that_do_not_fit(rank):
    mesh = one_axis()
    linear = parallelize_module(nn.Linear(2, 2), mesh, ColwiseParallel())
    with pytest.raises(ValueError, match="pass the input by position"):
        linear(input=torch.ones(2))
    with pytest.raises(ValueError, match=r"Replicate\(\).* is not a tensor but 'x'"):
        linear("x")
    style = PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Shard(0), None))
    module = parallelize_module(nn.Linear(2, 2), mesh, style)
    with pytest.raises(ValueError, match="input_layouts has 2 layouts, but the module has 1 values"):
        module(torch.ones(2))


@with_threads(1)
def test_a_keyword_that_forward_does_not_take(rank):
    style = PrepareModuleInput(
        input_kwarg_layouts={"inputs": Shard(0)}, desired_input_kwarg_layouts={"inputs": Replicate()}
    )
    with pytest.raises(ValueError, match=r"names 'inputs', which Linear\.forward does not take; write one of: input"):
        parallelize_module(nn.Linear(2, 2), one_axis(), style)


@pytest.mark.parametrize(
    ("style", "options", "message"),
    [
        (ColwiseParallel, {"input_layouts": (Shard(0),)}, r"input_layouts is one placement.*input_layouts=Shard"),
        (RowwiseParallel, {"output_layouts": "S(0)"}, r"a placement is Shard\(dim\).*got 'S\(0\)'"),
        (PrepareModuleInput, {"desired_input_layouts": Shard(0)}, "given without input_layouts"),
        (PrepareModuleInput, {"input_layouts": Shard(0)}, "given without desired_input_layouts"),
        (
            PrepareModuleInput,
            {"input_layouts": (Shard(0), None), "desired_input_layouts": Shard(0)},
            "input_layouts has 2 layouts but desired_input_layouts has 1",
        ),
        (
            PrepareModuleInput,
            {"input_kwarg_layouts": {"x": Shard(0)}, "desired_input_kwarg_layouts": {"y": Shard(0)}},
            "write a layout in both for: x, y",
        ),
        (
            PrepareModuleOutput,
            {"output_layouts": None, "desired_output_layouts": None},
            "PrepareModuleOutput needs output_layouts",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(style, options, message):
    with pytest.raises(ValueError, match=message):
        style(**options)


@with_threads(2)
def test_parameters_are_placed_and_keep_requires_grad(rank):
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (2,))
    linear = nn.Linear(4, 6)
    linear.bias.requires_grad_(False)
    given = linear.weight.detach().clone()
    parallelize_module(linear, mesh, ColwiseParallel())
    assert isinstance(linear.weight, DTensor)
    assert linear.weight.placements == (Shard(0),)
    assert linear.weight.requires_grad
    assert not linear.bias.requires_grad
    assert torch.equal(linear.weight.full_tensor(), given) == (rank == 0), "all take the values of rank 0"
    norm = parallelize_module(nn.LayerNorm(4), mesh, SequenceParallel())
    assert norm.bias.placements == (Replicate(),)


def test_styles_print_their_arguments():
    assert repr(SequenceParallel(sequence_dim=2)) == "SequenceParallel(sequence_dim=2, use_local_output=False)"
    text = repr(RowwiseParallel(input_layouts=Shard(0)))
    assert text.startswith("RowwiseParallel(input_layouts=Shard(")
    assert "use_local_output=True" in text


@with_threads(2)
def test_a_plan_names_all_modules_that_share_a_parameter(rank):
    mesh, model = init_device_mesh("cpu", (2,)), Tied()
    with pytest.raises(ValueError, match=r"shards 'table', which shares a parameter with 'head', .* for 'head'"):
        parallelize_module(model, mesh, {"table": RowwiseParallel(), "head": PrepareModuleInput()})
    assert model.head.weight is model.table.weight
    assert not isinstance(model.head.weight, DTensor)
    parallelize_module(model, mesh, {"table": PrepareModuleInput()})
    assert not isinstance(model.head.weight, DTensor)


class Own(ParallelStyle):
    """A style of a user's own, which does not say that it shards."""

    def apply(self, module, device_mesh):
        self.distribute_parameter(module, "weight", device_mesh, Shard(0))
        return module


@pytest.mark.parametrize("sharded", [False, True])
@with_threads(2)
def test_what_takes_the_place_of_a_shared_parameter_does_so_everywhere(rank, sharded):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = Tied()
    if sharded:
        fully_shard(model.head, mesh["dp"])
        fully_shard(model, mesh["dp"])
    parallelize_module(model, mesh["tp"], {"table": Own()})
    assert model.head.weight is model.table.weight
    assert isinstance(model.head.weight, DTensor)
    assert Shard(0) in model.head.weight.placements
    both = {"table": RowwiseParallel(), "head": ColwiseParallel()}
    model = parallelize_module(fully_shard(Tied(), mesh["dp"]) if sharded else Tied(), mesh["tp"], both)
    assert model.head.weight is model.table.weight
    wrong = {"table": ColwiseParallel(), "head": ColwiseParallel()}
    with pytest.raises(PlacementError, match=r"shared by several modules.*Shard\(dim=1\)\] on.*Shard\(dim=0\)\] on"):
        parallelize_module(fully_shard(Tied(), mesh["dp"]) if sharded else Tied(), mesh["tp"], wrong)
