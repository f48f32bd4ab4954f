"""Optimizers in checkpoints: with exactly the state that they had, on any mesh, as if nothing had been interrupted."""

import functools
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from dtensor import CheckpointError, Checkpoints, DTensor, init_device_mesh, load_torch_checkpoint
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.testing import run_ranks, with_ranks

PLAN = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}


class Net(nn.Module):
    """Two layers, the first frozen on demand, a scalar parameter, and a layer that is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net1, self.net2, self.unused = nn.Linear(10, 16), nn.Linear(16, 6), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.net2(F.relu(self.net1(x))) * self.scale


def alone():
    return Net()


def sharded(*axes):
    return fully_shard(Net(), init_device_mesh("cpu", axes or (torch.distributed.get_world_size(),)))


def parallel():
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return parallelize_module(Net(), mesh, PLAN)


def adafactor(model):
    return torch.optim.Adafactor([model.net1.weight, model.net2.weight, model.net2.bias], lr=0.1)


def grouped(model):
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": others}, {"params": biases, "lr": 0.01, "weight_decay": 0.0}], lr=0.1)


def of(cls, **options):
    return lambda model: cls(model.parameters(), **options)


OPTIMIZERS = {
    "adamw": of(torch.optim.AdamW, lr=0.1),
    "foreach": of(torch.optim.AdamW, lr=0.1, foreach=True, amsgrad=True),
    "fused": of(torch.optim.AdamW, lr=0.1, fused=True),
    "tensor_lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)),
    "sgd": of(torch.optim.SGD, lr=0.1, momentum=0.9),
    "plain_sgd": of(torch.optim.SGD, lr=0.1),
    "nadam": of(torch.optim.NAdam, lr=0.1),
    "adafactor": adafactor,
    "grouped": grouped,
}


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        # The loss is of the whole batch on every rank.
        loss = model(torch.sin(torch.arange(80.0) + step).view(8, 10)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def held(model, optimizer):
    """The state of an optimizer by name, in whole tensors."""
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: {key: whole(x) for key, x in state.items()} for p, state in optimizer.state.items()}


def settings(optimizer):
    return [{key: x for key, x in group.items() if key != "params"} for group in optimizer.param_groups]


def placements(optimizer):
    return [[getattr(x, "placements", None) for x in state.values()] for state in optimizer.state.values()]


def saved_and_resumed(folder, made, resumed, optimizer_of):
    """The losses of a run that goes on with fresh objects, and of one that was not interrupted."""
    checkpoints = Checkpoints(folder)
    model = made()
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    checkpoints.save({"at": {"model": model, "optimizers": [optimizer]}, "epoch": 7}, 2)
    before = held(model, optimizer), settings(optimizer)
    again = resumed()
    fresh = optimizer_of(again)
    for group in fresh.param_groups:
        group["weight_decay"] = 0.5
    state = {"at": {"model": again, "optimizers": [fresh]}, "epoch": 0}
    assert checkpoints.load(state) == 2
    assert state["epoch"] == 7
    assert state["at"]["optimizers"] == [fresh]
    assert (held(model, optimizer).keys(), settings(optimizer)) == (before[0].keys(), before[1])
    torch.testing.assert_close(held(again, fresh), before[0], rtol=0, atol=0)
    assert settings(fresh) == before[1]
    resumes, goes_on = train(again, fresh, range(2, 4)), train(model, optimizer, range(2, 4))
    if made is resumed:
        assert placements(fresh) == placements(optimizer)
        assert resumes == goes_on
    assert resumes == pytest.approx(goes_on, rel=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_process(name, tmp_path):
    saved_and_resumed(tmp_path, alone, alone, OPTIMIZERS[name])


@with_ranks(2)
def test_sharded_runs_resume_as_if_not_interrupted(rank, tmp_path):
    for name in ("foreach", "fused", "sgd", "adafactor", "grouped"):
        saved_and_resumed(tmp_path / name, sharded, sharded, OPTIMIZERS[name])
    saved_and_resumed(tmp_path / "parallel", sharded, parallel, OPTIMIZERS["adamw"])
    saved_and_resumed(tmp_path / "back", parallel, sharded, OPTIMIZERS["adafactor"])


@with_ranks(2)
def test_state_is_what_it_was(rank, tmp_path):
    """Moments of a frozen parameter stay; a parameter without a gradient and a fresh optimizer have none."""
    checkpoints, model = Checkpoints(tmp_path), sharded()
    optimizer = OPTIMIZERS["adamw"](model)
    checkpoints.save({"model": model, "optimizer": optimizer}, 0)
    assert not optimizer.state
    train(model, optimizer, range(2))
    model.net1.weight.requires_grad_(False)
    checkpoints.save_async({"model": model, "optimizer": optimizer}, 1).result(60)
    again = sharded()
    fresh = OPTIMIZERS["adamw"](again)
    again.net1.weight.requires_grad_(False)
    checkpoints.load({"model": again, "optimizer": fresh})
    assert again.unused.weight not in fresh.state
    for m in (model, again):
        m.net1.weight.requires_grad_(True)
    assert train(again, fresh, range(2, 4)) == train(model, optimizer, range(2, 4))
    kept = fresh.state[again.net2.weight]["exp_avg"]
    checkpoints.load({"model": again, "optimizer": fresh})
    assert fresh.state[again.net2.weight]["exp_avg"] is kept
    checkpoints.load({"model": again, "optimizer": fresh}, 0)
    assert not fresh.state
    names, moments = get_state_dict(model, optimizer)
    checkpoints.save({"model": names, "optimizer": moments}, 5)
    checkpoints.load({"model": again, "optimizer": fresh})
    assert train(again, fresh, range(4, 6)) == train(model, optimizer, range(4, 6))


@with_ranks(2)
def test_what_would_be_lost_is_an_error(rank, tmp_path):
    checkpoints, model = Checkpoints(tmp_path), sharded()
    optimizer = OPTIMIZERS["adamw"](model)
    train(model, optimizer, range(1))
    raw = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    wanted = re.escape('give the optimizer itself: {"model": model, "optimizer": optimizer}')
    for call in (checkpoints.save, checkpoints.save_async):
        with pytest.raises(CheckpointError, match=wanted):
            call(raw, 1)
        with pytest.raises(CheckpointError, match=wanted):
            call(optimizer.state_dict(), 1)
        with pytest.raises(CheckpointError, match=r"no module with 7 of the 7 parameters .* give the model too"):
            call({"model": model.state_dict(), "optimizer": optimizer}, 1)
    assert checkpoints.steps() == []
    checkpoints.save({"model": model, "optimizer": optimizer}, 1)
    again = sharded()
    before = whole(again.net1.weight)
    with pytest.raises(CheckpointError, match=wanted):
        checkpoints.load({"model": again, "optimizer": OPTIMIZERS["adamw"](again).state_dict()})
    with pytest.raises(CheckpointError, match="has no optimizer 'other'"):
        checkpoints.load({"model": again, "other": OPTIMIZERS["adamw"](again)})
    with pytest.raises(
        CheckpointError, match=r"state of 'optimizer' for a parameter '.*', which the SGD does not hold"
    ):
        checkpoints.load({"model": again, "optimizer": torch.optim.SGD(again.net1.parameters(), lr=0.1)})
    assert torch.equal(whole(again.net1.weight), before)
    optimizer = torch.optim.SGD(model.net1.parameters(), lr=0.1)
    checkpoints.save({"model": model, "optimizer": optimizer}, 2)
    with pytest.raises(CheckpointError, match=r"holds 'net2.weight', which the optimizer in the checkpoint did not"):
        checkpoints.load({"model": again, "optimizer": torch.optim.SGD(again.net2.parameters(), lr=0.1)})
    checkpoints.save({"model": model, "optimizer": grouped(model)}, 3)
    fresh = OPTIMIZERS["adamw"](again)
    with pytest.raises(CheckpointError, match=r"different groups of the checkpoint: '.*' in group 0, '.*' in group 1"):
        checkpoints.load({"model": again, "optimizer": fresh})
    assert not fresh.state


def test_parameters_of_several_modules_and_compiled_ones(tmp_path):
    """Equal names in two modules are told apart, and a name does not depend on whether a module is compiled."""
    checkpoints = Checkpoints(tmp_path)
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = torch.optim.AdamW([*one.parameters(), *two.parameters()])
    two(one(torch.ones(2, 3))).sum().backward()
    optimizer.step()
    checkpoints.save({"one": torch.compile(one), "two": two, "optimizer": optimizer}, 1)
    wanted = [x["exp_avg"].clone() for x in optimizer.state.values()]
    again = nn.Linear(3, 3), nn.Linear(3, 3)
    fresh = torch.optim.AdamW([p for m in again for p in m.parameters()])
    checkpoints.load({"one": again[0], "two": torch.compile(again[1]), "optimizer": fresh})
    torch.testing.assert_close([x["exp_avg"] for x in fresh.state.values()], wanted, rtol=0, atol=0)
    assert torch.equal(again[1].weight, two.weight)


@with_ranks(2)
def test_schedulers_and_checkpoints_of_torch(rank, tmp_path):
    """Optimizers made before sharding too; torch's checkpoints are read by name, and by number."""

    def made():
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        fully_shard(model, init_device_mesh("cpu", (2,)))
        return {"model": model, "optimizer": optimizer, "rate": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    def run(state, steps):
        losses = []
        for step in steps:
            losses += train(state["model"], state["optimizer"], [step])
            state["rate"].step()
        return losses

    state, again = made(), made()
    run(state, range(2))
    Checkpoints(tmp_path).save(state, 2)
    Checkpoints(tmp_path).load(again)
    assert run(again, range(2, 4)) == run(state, range(2, 4))
    model, optimizer = state["model"], state["optimizer"]
    names, moments = get_state_dict(model, optimizer)
    dcp.save({"model": names, "optimizer": moments}, checkpoint_id=tmp_path / "names")
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "numbers")
    wanted = train(model, optimizer, range(4, 6))
    for name in ("names", "numbers"):
        again = made()
        load_torch_checkpoint({"model": again["model"], "optimizer": again["optimizer"]}, tmp_path / name)
        assert train(again["model"], again["optimizer"], range(4, 6)) == wanted


def half_way(rank, folder, made):
    for name, optimizer_of in OPTIMIZERS.items():
        model = made()
        optimizer = optimizer_of(model)
        train(model, optimizer, range(2))
        Checkpoints(folder / name).save({"model": model, "optimizer": optimizer}, 2)


def second_half(rank, folder, made):
    losses = {}
    for name, optimizer_of in OPTIMIZERS.items():
        model = made()
        optimizer = optimizer_of(model)
        Checkpoints(folder / name).load({"model": model, "optimizer": optimizer})
        losses[name] = train(model, optimizer, range(2, 5))
    return losses


@pytest.mark.nightly
@pytest.mark.parametrize("resumed", [sharded, parallel])
@pytest.mark.parametrize("made", [sharded, parallel, functools.partial(sharded, 2, 2)])
def test_saved_on_four_ranks_and_resumed_on_two(tmp_path, made, resumed):
    wanted = {}
    for name, optimizer_of in OPTIMIZERS.items():
        model = alone()
        wanted[name] = train(model, optimizer_of(model), range(5))[2:]
    run_ranks(half_way, 4, tmp_path, made)
    for losses in run_ranks(second_half, 2, tmp_path, resumed):
        assert losses == {name: pytest.approx(of_name, rel=1e-4) for name, of_name in wanted.items()}
