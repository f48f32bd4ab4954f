"""`distribute_model`: an unmodified model over a mesh against the same model on one device."""

import copy
import pickle
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from dtensor import (
    AgreementError,
    Checkpoints,
    DTensor,
    MeshError,
    Partial,
    PlacementError,
    Plan,
    Replicate,
    Shard,
    distribute_model,
    init_device_mesh,
)
from dtensor.compile import statistics
from dtensor.parallel import fully_shard
from dtensor.testing import fake_ranks, with_ranks, with_threads

COLUMNS, ROWS = {"tp": Shard(0)}, {"tp": Shard(1)}
PLAN = {"table.weight": COLUMNS, "*.up.weight": COLUMNS, "*.up.bias": COLUMNS, "*.down.weight": ROWS}


def part_of(given, rank, ranks):
    return {key: x.chunk(ranks)[rank] for key, x in given.items()}


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    name: str = "told"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8)
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device)
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale + positions[:, None] / 8


class Model(nn.Module):
    """Its head is its table: one parameter of two names."""

    def __init__(self, blocks=2):
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, batch, *, weight=None):
        x = self.table(batch["tokens"])
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        return Output(loss if weight is None else loss * weight, logits)


def made(**options):
    torch.manual_seed(0)
    return Model(**options).double()


def batch():
    tokens = torch.arange(24).view(4, 6) * 5 % 16
    return {"tokens": tokens, "labels": (tokens + 3) % 16}


def expected(**options):
    model = made(**options)
    out = model(batch(), weight=torch.tensor(2.0))
    out.loss.backward()
    return out, [p.grad for p in model.parameters()]


def check_gradients(model, gradients):
    for (name, p), g in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), g, msg=f"{name}: {{}}".format)
        assert p.grad.placements == p.placements


def runs(model, compiled, dynamic=None):
    if not compiled:
        return model
    return torch.compile(model, backend="dtensor", fullgraph=True, dynamic=dynamic, options={"inner": "aot_eager"})


@pytest.mark.parametrize("compiled", [pytest.param(False, marks=pytest.mark.nightly), True])
@with_ranks(2)
def test_whole_inputs_and_outputs(rank, compiled):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = distribute_model(made(blocks=1), mesh, PLAN, outputs={})
    assert model.head.weight is model.table.weight
    assert model.head.weight.placements == (Shard(0),)
    out = runs(model, compiled)(batch(), weight=torch.tensor(2.0))
    want, gradients = expected(blocks=1)
    assert not isinstance(out.logits, DTensor)
    assert out.name == "told"
    torch.testing.assert_close((out.loss, out.logits), (want.loss, want.logits))
    out.loss.backward()
    check_gradients(model, gradients)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.nightly)])
@with_ranks(4)
def test_parts_of_a_batch_beside_tensor_parallelism(rank, compiled):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    me = mesh.get_local_rank("dp")
    want, gradients = expected()
    model = distribute_model(made(), mesh, PLAN, inputs={"dp": Shard(0)}, outputs={"dp": Shard(0)})
    run = runs(model, compiled)
    out = run(part_of(batch(), me, 2), weight=torch.tensor(2.0))
    torch.testing.assert_close(out.loss, want.loss)  # the mean over the global batch
    torch.testing.assert_close(out.logits, want.logits.chunk(2)[me])
    out.loss.backward()
    check_gradients(model, gradients)

    model.zero_grad()
    given = part_of(batch(), me, 2)
    logits = run(given, weight=torch.tensor(2.0)).logits
    loss = F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten()) * 2  # of this rank's part
    loss.backward()
    check_gradients(model, gradients)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.nightly)])
@with_ranks(4)
def test_inputs_placed_one_by_one(rank, compiled):
    check_placed_one_by_one(rank, (2, 2), compiled, tokens=3, labels=1)


@with_ranks(2)
def test_inputs_placed_one_by_one_in_compiled_code(rank):
    check_placed_one_by_one(rank, (1, 2), True, labels=1)


def check_placed_one_by_one(rank, sizes, compiled, **also):
    """Tokens along the sequence, labels along the batch, and a weight of which nothing is said. `also`: of each input,
    a rank that is to have the same part of it as another."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    rows, columns = {"dp": Shard(0)}, {"tp": Shard(1)}
    given = {"batch.tokens": columns, "batch": rows}
    run = runs(distribute_model(made(blocks=1), mesh, PLAN, inputs=given, outputs={}), compiled)
    whole, weight = batch(), torch.tensor(2.0)
    mine = {
        "tokens": whole["tokens"].chunk(sizes[1], 1)[mesh.get_local_rank("tp")],
        "labels": whole["labels"].chunk(sizes[0])[mesh.get_local_rank("dp")],
    }
    want, gradients = expected(blocks=1)
    out = run(mine, weight=weight)
    torch.testing.assert_close((out.loss, out.logits), (want.loss, want.logits))
    out.loss.backward()
    check_gradients(getattr(run, "_orig_mod", run), gradients)
    plan = Plan(dict(zip(("dp", "tp"), sizes)), inputs=given)
    part, _ = plan.part((whole, 0.5), mesh, made(blocks=1))
    torch.testing.assert_close(part, mine)
    assert {x.storage_offset() for x in part.values()} == {0}
    for name, other in also.items():
        with pytest.raises(AgreementError, match=rf"argument batch\.{name} of forward differs between ranks"):
            run({**mine, name: (mine[name] + (rank == other)) % 16}, weight=weight)


class Several(nn.Module):
    """Any number of arguments, by position."""

    def forward(self, first, *others):
        return first.sum() + sum([x.sum() * k for k, x in enumerate(others)])


@with_ranks(2)
def test_inputs_by_position_are_named_after_their_parameters(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    inputs = {"others.1": {"dp": Shard(0)}, "first": [Shard(0)]}
    model = distribute_model(Several(), mesh, inputs=inputs, outputs={})
    whole = (torch.arange(4.0), torch.ones(3), torch.arange(6.0))
    given = Plan({"dp": 2}, inputs={"others.1": {"dp": Shard(0)}, "first": {"dp": Shard(0)}}).part(
        whole, mesh, Several()
    )
    assert [len(x) for x in given] == [2, 3, 3]
    assert model(*given) == Several()(*whole)


def test_inputs_of_other_names():
    named = {"tokens": {"dp": Shard(0)}}
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        with pytest.raises(PlacementError, match="inputs: forward takes no 'tokens'; write one of its arguments, 'bat"):
            distribute_model(made(), mesh, inputs=named)
        with pytest.raises(PlacementError, match=r"inputs \(batch\) are Replicate\(\) or Shard\(dim\), dim from the"):
            distribute_model(made(), mesh, inputs={"batch": {"dp": Partial()}})
        with pytest.raises(PlacementError, match="pass inputs in a dict from names, or the model as the third"):
            Plan({"dp": 2}, inputs=named).part((torch.ones(2),), mesh)
        with pytest.raises(PlacementError, match="the plan places 'tokens', and inputs are 'batch'; pass arguments by"):
            Plan({"dp": 2}, inputs=named).part((torch.ones(2),), mesh, made())


class Scores(nn.Module):
    """The smallest model of tokens and labels."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 16)

    def forward(self, batch):
        return F.cross_entropy(self.table(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("compiled", [False, True])
@with_ranks(2)
def test_inputs_that_differ_are_refused_on_all_ranks(rank, compiled):
    """Each rank a batch of its own, and parts of unequal lengths; the graphs are there already."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    whole = runs(distribute_model(Scores(), mesh, outputs={}), compiled)
    whole(batch())
    given = {**batch(), "labels": batch()["labels"] + rank}
    gave = "" if compiled else r".*passed a torch.int64 \[4, 6\] of checksum \w{6} on ranks \[0\]; a .* on ranks \[1\]"
    with pytest.raises(AgreementError, match=r"argument batch\.labels of forward differs between ranks" + gave):
        whole(given)
    parts = runs(distribute_model(Scores(), mesh, inputs={"dp": Shard(0)}, outputs={}), compiled, dynamic=True)
    parts(part_of(batch(), rank, 2))
    given = {key: x.split([3, 1])[rank] for key, x in batch().items()}
    with pytest.raises(AgreementError, match=r"argument batch\.tokens of forward differs between ranks"):
        parts(given)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.nightly)])
@with_ranks(4)
def test_a_rank_that_differs_from_one_neighbour_is_told_to_all(rank, compiled):
    """Ranks 2 and 3 are to give the same part; the others do, and would wait for them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    run = runs(distribute_model(made(), mesh, PLAN, inputs={"dp": Shard(0)}, outputs={}), compiled)
    given = part_of(batch(), mesh.get_local_rank("dp"), 2)
    run(given)
    with pytest.raises(AgreementError, match=r"argument batch\.labels of forward differs between ranks"):
        run({**given, "labels": (given["labels"] + (rank == 3)) % 16})


@pytest.mark.parametrize("inputs", [{"tp": Partial()}, [Shard(-1)]])
def test_inputs_are_whole_or_cut_from_the_front(inputs):
    with fake_ranks(2):
        mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), made()
        with pytest.raises(PlacementError, match=r"inputs are Replicate\(\) or Shard\(dim\), dim from the front"):
            distribute_model(model, mesh, inputs=inputs)


def test_a_buffer_of_two_modules_stays_one():
    with fake_ranks(2):
        model = made()
        first, second = model.blocks
        second.scale = first.scale
        distribute_model(model, init_device_mesh("cpu", (2,)))
    assert isinstance(first.scale, DTensor)
    assert second.scale is first.scale


@with_ranks(2)
def test_without_outputs_they_are_dtensors(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    out = distribute_model(made(), mesh, PLAN)(batch())
    assert isinstance(out.logits, DTensor)
    assert out.logits.shape == (4, 6, 16)


def test_the_most_specific_pattern_counts():
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = {"*": {}, "*.weight": COLUMNS, "blocks.1.up.weight": ROWS, "*.up.*": [Replicate()], "*.scale": COLUMNS}
        model = distribute_model(made(), mesh, {**plan, "*.norm.weight": {}})
    assert isinstance(model, Model)
    assert model.table.weight.placements == (Shard(0),)
    first, second = model.blocks
    assert second.up.weight.placements == (Shard(1),)
    assert first.up.weight.placements == (Shard(0),)
    assert first.norm.weight.placements == (Replicate(),)
    assert first.scale.placements == (Shard(0),)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"*.upp.weight": COLUMNS},
            r"'\*.upp.weight' matches no parameter or buffer of the model; .* blocks.0.up.weight",
        ),
        ({"*.norm.weight": ROWS}, r"blocks.0.norm.weight \('\*.norm.weight'\) of shape \[8\]: .*dim"),
        ({"*.up.weight": {"pp": Shard(0)}}, r"the mesh has axes \['tp'\] and no 'pp'"),
        ({"*.up.weight": [Shard(0)] * 2}, "the mesh has 1 axis but got"),
        ({"*.up.weight": Shard(0)}, r"up.weight .*the mesh has 1 axis but got Shard\(dim=0\)"),
        ({"*.up.weight": {"tp": "rows"}}, "a placement is .*got 'rows'"),
        ({"*.up.*": COLUMNS, "*up.*t": ROWS, "*.up.b*": {}}, r"matched by '\*.up.\*' and as closely by"),
        ({"table.weight": COLUMNS, "head.weight": ROWS}, "table.weight and head.weight are one tensor"),
    ],
)
def test_wrong_plans_change_nothing(given, message):
    with fake_ranks(2):
        mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), made()
        with pytest.raises(PlacementError, match=message):
            distribute_model(model, mesh, given)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        distribute_model(model, mesh)
        with pytest.raises(RuntimeError, match="distributed before"):
            distribute_model(model, mesh)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("sharded", [False, True])
def test_copies_share_nothing_but_the_class(copied, sharded):
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = distribute_model(made(), mesh["tp"], PLAN, inputs=[Shard(0)], outputs={})
        if sharded:
            fully_sharded(model, mesh["dp"])
        other = copied(model)
        assert other.table.weight is not model.table.weight
        assert isinstance(other, Model)
        loss = other(batch()).loss
        assert torch.equal(loss, model(batch()).loss)
        loss.backward()
        assert all(p.grad.placements == p.placements for p in other.parameters())
        assert all(p.grad is None for p in model.parameters())


def fully_sharded(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh)
    return fully_shard(model, mesh)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("first", ["distribute_model", "fully_shard"])
@with_ranks(4)
def test_beside_fully_shard_in_either_order(rank, first, compiled):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, me = made(), mesh.get_local_rank("dp")
    if first == "fully_shard":
        fully_sharded(model, mesh["dp"])
    distribute_model(model, mesh["tp"], PLAN, outputs={})
    if first != "fully_shard":
        fully_sharded(model, mesh["dp"])
    assert model.head.weight is model.table.weight
    assert model.blocks[0].up.weight.device_mesh.ndim == 2
    run = runs(model, compiled)
    want, gradients = expected()
    given = {**part_of(batch(), me, 2)}
    out = run(given, weight=torch.tensor(2.0))
    torch.testing.assert_close(out.logits, want.logits.chunk(2)[me])
    out.loss.backward()
    check_gradients(model, gradients)


def test_a_model_sharded_over_the_same_axis_is_refused():
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = fully_shard(made(), mesh)
        with pytest.raises(MeshError, match="the parameter is already on axis dp of the mesh"):
            distribute_model(model, mesh)


@with_ranks(4)
def test_trained_saved_and_read_on_another_mesh(rank, tmp_path):
    """By Checkpoints, optimizer included; training goes on as on one device."""
    plain = made()
    steps = torch.optim.AdamW(plain.parameters(), lr=0.1)
    losses = [train(plain, steps) for _ in range(4)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = distribute_model(made(), mesh, PLAN, outputs={})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert [train(model, optimizer) for _ in range(2)] == pytest.approx(losses[:2])
    Checkpoints(tmp_path).save({"model": model, "optimizer": optimizer}, 2)
    other = distribute_model(
        made(), init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), {"*.up.*": COLUMNS}, outputs={}
    )
    again = torch.optim.AdamW(other.parameters(), lr=0.1)
    Checkpoints(tmp_path).load({"model": other, "optimizer": again})
    assert [train(other, again) for _ in range(2)] == pytest.approx(losses[2:])


def train(model, optimizer):
    optimizer.zero_grad()
    loss = model(batch()).loss
    loss.backward()
    optimizer.step()
    return loss.item()


class SquaredLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(3, 4))

    def forward(self, x):
        return (x @ self.weight).square().mean()


@with_threads(2)
def test_a_plain_loss_may_be_scaled_in_place(rank):
    """As trainers do it, which accumulate gradients."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x, plain = torch.ones(2, 3), SquaredLoss()
    (plain(x) * 3).backward()
    for outputs in ({}, {"tp": Shard(0)}):
        model = distribute_model(SquaredLoss(), mesh, {"weight": {"tp": Shard(1)}}, outputs=outputs)
        loss = model(x)
        loss *= 3
        loss.backward()
        torch.testing.assert_close(model.weight.grad.full_tensor(), plain.weight.grad)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@with_ranks(2)
def test_nothing_goes_in_front_of_what_the_model_sends(rank, inner):
    """The comparison of inputs is the second message of the forward, and no rank meets another before."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"blocks.*.up.*": COLUMNS, "blocks.*.down.weight": ROWS}
    model = distribute_model(made(blocks=1), mesh, plan, inputs={}, outputs={})
    run = torch.compile(model, backend="dtensor", options={"inner": inner})
    with patch("dtensor.comm.agreement.meet") as met, statistics() as seen:
        for _ in range(2):
            run(batch()).loss.backward()
    forward = next(r for r in seen.records if r.direction == "forward")
    first, second = forward.collectives[:2]
    numbers = 2 * 2 * torch.int64.itemsize
    assert first.bytes > numbers
    assert (second.op, second.bytes) == ("all_gather", numbers)
    assert not met.called


class Scaled(nn.Module):
    """A parametrization."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.full((8, 1), 2.0))

    def forward(self, x):
        return self.factor * x


class Adapted(nn.Module):
    """Parametrizes its frozen weight while its forward runs, as peft does for adapters of parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 4), requires_grad=False)
        self.adapter = Scaled()

    def forward(self, x):
        parametrize.register_parametrization(self, "weight", self.adapter)
        out = F.linear(x, self.weight)
        parametrize.remove_parametrizations(self, "weight", leave_parametrized=False)
        return out


@with_threads(2)
def test_a_forward_may_parametrize_a_parameter(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, plain, x = distribute_model(Adapted(), mesh, {"*weight": COLUMNS}), Adapted(), torch.ones(3, 4)
    for run in (model, plain):
        run(x).square().sum().backward()
    torch.testing.assert_close(model.adapter.factor.grad.full_tensor(), plain.adapter.factor.grad)
