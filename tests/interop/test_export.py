"""`dtensor.export`: programs of torch.export that run one rank's part of a model of DTensors."""

import pytest
import torch
from torch import nn
from torch._dynamo.exc import UserError

import dtensor
from dtensor import Replicate, Shard, ShardingError, distribute_tensor, init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.testing import MLPModule, ModelArgs, Transformer, with_ranks

PLAN = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
ARGS = ModelArgs(dropout_p=0.0, vocab_size=13, max_seq_len=8, n_layers=1, dim=12, n_heads=2, weight_tying=True)
TOKENS = torch.arange(16).view(2, 8) % 13
X = torch.sin(torch.arange(80.0)).view(8, 10)


def collectives(program):
    names = [n.target.name() for n in program.graph.nodes if n.op == "call_function" and hasattr(n.target, "name")]
    return [name.split("::")[1] for name in names if name.startswith("dtensor::") and name != "dtensor::shard"]


@with_ranks(2)
def test_a_program_is_the_model(rank, tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    expected = MLPModule("cpu")(X)
    model = parallelize_module(MLPModule("cpu"), mesh, PLAN)
    program = dtensor.export(model, (X,))
    assert collectives(program) == ["all_reduce"]
    assert {name: tuple(x.shape) for name, x in program.state_dict.items()} == {
        "net1.weight": (8, 10),
        "net1.bias": (8,),
        "net2.weight": (10, 8),
        "net2.bias": (10,),
    }
    torch.testing.assert_close(program.module()(X), expected)
    assert torch.equal(program.module()(-X), model(-X))
    file = tmp_path / f"{rank}.pt2"
    torch.export.save(program, file)
    assert torch.equal(torch.export.load(file).module()(-X), model(-X))

    program = dtensor.export(fully_shard(MLPModule("cpu"), mesh), (X,))
    assert collectives(program) == ["all_gather"] * 4
    torch.testing.assert_close(program.module()(X), expected)

    torch.manual_seed(0)
    model = Transformer(ARGS).eval()
    expected = model(TOKENS)
    program = dtensor.export(Transformer.parallelize(model, mesh, True), (), {"tokens": TOKENS})
    assert set(collectives(program)) == {"all_gather", "reduce_scatter"}
    torch.testing.assert_close(program.module()(tokens=TOKENS), expected)
    torch.testing.assert_close(program.module()(tokens=TOKENS.flip(0)), expected.flip(0))


@pytest.mark.nightly
@with_ranks(2)
def test_sizes_may_vary(rank):
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = Transformer(ARGS).eval()
    four = torch.cat([TOKENS, TOKENS.flip(1)])
    eight = torch.cat([four, four.flip(0)])
    expected = model(four), model(eight)
    model = Transformer.parallelize(model, mesh, True)
    shapes = {"tokens": {0: 2 * torch.export.Dim("half", max=32)}}
    program = dtensor.export(model, (four,), dynamic_shapes=shapes).module()
    torch.testing.assert_close(program(four), expected[0])
    torch.testing.assert_close(program(eight), expected[1])


class Counting(nn.Module):
    """Parts of several kinds: a parameter, a buffer that is written to, one that is not saved, a nested output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, x, times=1):
        self.calls += 1
        return {"out": (self.linear(x) * self.scale * times, self.calls * 1)}


def test_buffers_and_nested_outputs(fake_mesh):
    mesh = fake_mesh(2)
    model = Counting()
    parallelize_module(model, mesh, {"linear": ColwiseParallel(output_layouts=Replicate())})
    program = dtensor.export(model, (torch.ones(2, 4),), {"times": 3})
    assert sorted(program.state_dict) == ["calls", "linear.bias", "linear.weight"]
    assert float(model.calls) == 0
    runs = program.module()
    assert program.graph_signature.user_inputs == ("x", 3)
    found = runs(torch.ones(2, 4), times=3)
    assert found["out"][0].shape == (2, 4)
    assert float(found["out"][1]) == 1
    assert float(runs(torch.ones(2, 4), times=3)["out"][1]) == 2


def test_what_is_refused(fake_mesh):
    mesh = fake_mesh(2)
    model = parallelize_module(MLPModule("cpu"), mesh, {"net1": ColwiseParallel(use_local_output=False)})
    with pytest.raises(TypeError, match=r"an input is a DTensor, placed as \[Shard\(dim=0\)\]; write x.to_local\(\)"):
        dtensor.export(model.net1, (distribute_tensor(X, mesh, [Shard(0)]),))
    with pytest.raises(TypeError, match=r"an output is a DTensor, placed as \[Shard\(dim=1\)\]"):
        dtensor.export(model.net1, (X,))
    for given in (parallelize_module(MLPModule("cpu"), mesh, PLAN), fully_shard(MLPModule("cpu"), mesh)):
        with pytest.raises(ShardingError, match=r"torch.export.export cannot .* write dtensor.export\(model"):
            torch.export.export(given, (X,))
    with pytest.raises(Exception, match=r"write dtensor.export\(model, args\)"):
        torch.export.export(parallelize_module(MLPModule("cpu"), mesh, PLAN), (X,), strict=True)


def test_sizes_that_may_not_vary(fake_mesh):
    model = Transformer.parallelize(Transformer(ARGS).eval(), fake_mesh(2), True)
    sequence = torch.export.Dim("sequence", max=8)  # of which each rank has a half
    with pytest.raises(UserError, match=r"Constraints violated \(sequence\)"):
        dtensor.export(model, (TOKENS,), dynamic_shapes={"tokens": {1: sequence}})
