"""Every optimizer of torch on sharded parameters: ten steps, against one device; the compiled step."""

import inspect

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from dtensor import DTensor, Replicate, Shard, distribute_tensor, fallbacks, init_device_mesh
from dtensor.testing import CountCollectives, with_ranks, with_threads
from dtensor.torch_private.compiling import dynamo_counters

VALUES = [torch.sin(torch.arange(30.0)).view(6, 5), torch.cos(torch.arange(10.0)).view(5, 2), torch.linspace(-1, 1, 7)]
PLACED = [[Shard(0)], [Shard(1)], [Shard(0)]]

KINDS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer and name != "SparseAdam"
}
"""All but SparseAdam, which takes sparse gradients."""

ALONG_ROWS = ("Adafactor", "Muon", "LBFGS")
"""Optimizers that do more than work element by element."""


def modes(name):
    found = inspect.signature(KINDS[name]).parameters
    return [
        {mode: flag} for mode, flag in (("foreach", True), ("foreach", False), ("fused", True)) if mode in found
    ] or [{}]


CASES = [(name, mode) for name in KINDS for mode in modes(name)]
RUNS = [
    pytest.param(
        (name, mode),
        id=f"{name}-{'-'.join(f'{k}={v}' for k, v in mode.items())}",
        marks=[pytest.mark.nightly] if mode == {"foreach": False} else [],
    )
    for name, mode in CASES
]


def pair(mesh, name, mode):
    """Dense and sharded parameters, and an optimizer for each."""
    use = [i for i, v in enumerate(VALUES) if v.dim() == 2 or name != "Muon"]
    dense = [nn.Parameter(VALUES[i].clone()) for i in use]
    pad = [Replicate()] * (mesh.ndim - 1)
    sharded = [nn.Parameter(distribute_tensor(VALUES[i], mesh, [*pad, *PLACED[i]])) for i in use]
    return dense, sharded, KINDS[name](dense, **mode), KINDS[name](sharded, **mode)


def closure(parameters, optimizer):
    def evaluate():
        optimizer.zero_grad()
        loss = sum((p * p).sum() + p.sin().sum() for p in parameters)
        loss.backward()
        return loss

    return evaluate


def same(dense, sharded, name):
    for d, s in zip(dense, sharded):
        torch.testing.assert_close(s.full_tensor(), d, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", RUNS)
@with_threads(2)
def test_ten_steps_are_those_of_one_device(rank, case):
    name, mode = case
    mesh = init_device_mesh("cpu", (2,))
    dense, sharded, one, two = pair(mesh, name, mode)
    before = fallbacks()
    for _ in range(10):
        one.step(closure(dense, one))
        two.step(closure(sharded, two))
    same(dense, sharded, name)
    assert not fallbacks() - before
    if name not in ALONG_ROWS:
        closure(sharded, two)()
        with CountCollectives() as counted:
            two.step()
        assert not counted.collectives
        for p in sharded:
            state = [x for x in two.state[p].values() if isinstance(x, DTensor) and x.dim()]
            assert all(x.placements == p.placements for x in state)


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "SGD"])
@with_threads(4)
def test_on_two_axes(rank, name):
    mesh = init_device_mesh("cpu", (2, 2))
    dense, _, one, _ = pair(mesh, name, {})
    sharded = [nn.Parameter(distribute_tensor(v, mesh, [Shard(0), Shard(v.dim() - 1)])) for v in VALUES]
    two = KINDS[name](sharded)
    for _ in range(10):
        one.step(closure(dense, one))
        two.step(closure(sharded, two))
    same(dense, sharded, name)


@pytest.mark.parametrize("name", ["AdamW", "Rprop", "Adafactor"])
@with_threads(2)
def test_state_goes_on_in_another_optimizer(rank, name):
    mesh = init_device_mesh("cpu", (2,))
    dense, sharded, one, two = pair(mesh, name, {})
    for _ in range(3):
        one.step(closure(dense, one))
        two.step(closure(sharded, two))
    again = KINDS[name](sharded)
    again.load_state_dict(two.state_dict())
    for x, y in zip(two.state[sharded[0]].values(), again.state[sharded[0]].values()):
        if isinstance(x, DTensor):
            assert y.placements == x.placements
    for _ in range(3):
        one.step(closure(dense, one))
        again.step(closure(sharded, again))
    same(dense, sharded, name)


def compiled_steps(cases, backend):
    """Where torch compiles the step of one device, ours is compiled too, and gives the same."""
    mesh = init_device_mesh("cpu", (2,))
    for name, mode in cases:
        dense, sharded, one, two = pair(mesh, name, mode)
        graphs = []
        for parameters, optimizer in ((dense, one), (sharded, two)):
            torch.compiler.reset()
            dynamo_counters().clear()
            step = torch.compile(optimizer.step, backend="eager" if optimizer is one else backend)
            for _ in range(4):
                closure(parameters, optimizer)()
                step()
            graphs.append(dynamo_counters()["stats"]["unique_graphs"])
        same(dense, sharded, name)
        assert graphs[0] == graphs[1], (name, mode)


@pytest.mark.nightly
@with_ranks(2)
def test_compiled_step(rank):
    compiled_steps([("AdamW", {"fused": True})], "dtensor")


@pytest.mark.nightly
@with_ranks(2, timeout=900)
def test_compiled_step_of_every_optimizer(rank):
    compiled_steps([(n, m) for n, m in CASES if n != "LBFGS" and m != {"foreach": False}], "dtensor")


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@with_threads(4)
def test_numbers_of_fused_steps_come_in_any_shape_and_on_any_mesh(rank, name):
    """A rate of shape [1], as torch's DTensor takes it, and counts of steps that a checkpoint put on another mesh."""
    other = init_device_mesh("cpu", (4,))
    mesh = init_device_mesh("cpu", (2, 2))
    dense, sharded, plain, ours = pair(mesh, name, {"fused": True, "lr": torch.tensor([0.1])})
    for _ in range(3):
        closure(dense, plain)()
        closure(sharded, ours)()
        plain.step()
        ours.step()
        for state in ours.state.values():
            if not isinstance(state["step"], DTensor):
                state["step"] = distribute_tensor(state["step"], other, [Replicate()])
    assert [float(state["step"].to_local()) for state in ours.state.values()] == [3.0] * 3
    for a, b in zip(sharded, dense):
        torch.testing.assert_close(a.full_tensor(), b)
