"""`dtensor.watch(nan=True)`: the first operator that makes a NaN or an infinity is named, and no other."""

import math
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtensor
from dtensor import AgreementError, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.job.job import job
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dtensor.testing import Transformer, with_ranks
from dtensor.testing.models import ModelArgs
from dtensor.torch_private.core import current_dispatch_mode


class Scaled(nn.Module):
    """Divides by the norm, whose gradient at zero is infinite."""

    def __init__(self, factor=1.0, power=2):
        super().__init__()
        self.factor, self.power = factor, power

    def forward(self, x):
        total = (x * self.factor).pow(self.power).sum(-1, keepdim=True)
        return total.sqrt()


class Net(nn.Module):
    def __init__(self, last):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Tanh(), last])

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def raised(call):
    with pytest.raises(FloatingPointError) as found:
        call()
    return str(found.value)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_forward_is_named(compiled):
    model: Any = Net(Scaled(power=3))
    with torch.no_grad():
        model.first.weight.fill_(-1.0)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    with dtensor.watch(run, nan=True):
        text = raised(lambda: run(torch.ones(2, 4)))
    assert text.startswith(
        "aten.sqrt.default of (float32 [2, 1]) made a NaN on rank 0, in layers.1 (test_non_finite.py:"
    )
    assert ": return total.sqrt())" in text
    assert current_dispatch_mode() is None


def test_the_backward_is_named_with_the_line_of_the_forward():
    model = Net(Scaled(factor=0.0))
    with dtensor.watch(model, torch.optim.SGD(model.parameters()), nan=True):
        out = model(torch.ones(2, 4)).sum()
        text = raised(out.backward)
    assert text.startswith("aten.div.Tensor of (float32 [2, 1], float32 [2, 1]) made an infinity on rank 0")
    assert "in the backward of layers.1 (test_non_finite.py:" in text
    assert "return total.sqrt()), node SqrtBackward0" in text


def test_a_forward_that_is_computed_again_has_its_line():
    model = Net(Scaled(factor=0.0))
    with dtensor.watch(model, nan=True):
        out = checkpoint(model, torch.ones(2, 4), use_reentrant=False)
        text = raised(out.sum().backward)
    assert "in the backward of layers.1 (test_non_finite.py:" in text
    assert "return total.sqrt()), node SqrtBackward0" in text


def test_a_line_outside_of_the_model():
    with dtensor.watch(Net(nn.Tanh()), nan=True):
        assert "in test_non_finite.py:" in (text := raised(lambda: torch.zeros(2) / torch.zeros(2)))
    assert "torch.zeros(2) / torch.zeros(2)" in text


MADE = {
    "division": lambda: torch.ones(2) / torch.zeros(2),
    "overflow": lambda: torch.full((2,), 1e30).pow(2),
    "cast": lambda: torch.full((2,), 70000.0).half(),
    "rsqrt": lambda: torch.zeros(2).rsqrt(),
    "in place": lambda: torch.zeros(2).reciprocal_(),
    "logarithm": lambda: -torch.ones(2).neg().log(),
    "difference of infinities": lambda: torch.full((2,), math.inf) - torch.full((2,), math.inf),
    "a masked row": lambda: torch.full((2, 2), -math.inf).softmax(-1),
    "complex": lambda: torch.ones(2, dtype=torch.complex64) / torch.zeros(2),
    "a list": lambda: torch._foreach_div([torch.ones(2), torch.ones(1)], [torch.ones(2), torch.zeros(1)]),
}


@pytest.mark.parametrize("what", list(MADE))
def test_arithmetic_is_named(what):
    with dtensor.watch(Net(nn.Tanh()), nan=True):
        raised(MADE[what])
    MADE[what]()  # afterwards nothing is looked at


def causal(x):
    scores = x @ x.T
    scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, -math.inf)
    scores = torch.where(torch.eye(len(scores)) > 2, -math.inf, scores)
    scores = scores + torch.full_like(scores, -math.inf).triu(1)
    return scores.softmax(-1) @ x


LEFT_ALONE = {
    "masks": lambda: causal(torch.ones(3, 4, requires_grad=True)).sum().backward(),
    "attention": lambda: (
        nn.functional.scaled_dot_product_attention(*[torch.ones(1, 2, 8, 4, requires_grad=True)] * 3, is_causal=True)
        .sum()
        .backward()
    ),
    "padding": lambda: nn.functional.pad(torch.ones(2, 2), (1, 1), value=-math.inf).amax(-1),
    "logarithm of zero": lambda: torch.zeros(2).log().exp(),
    "a given NaN": lambda: torch.full((2,), math.nan) + 1,
    "data with NaNs": lambda: torch.tensor([1.0, math.nan]).sqrt() * 2,
    "memory that is not written": lambda: torch.empty(1 << 12).fill_(1.0).add(1),
    "integers": lambda: torch.arange(3) // 2,
}


@pytest.mark.parametrize("what", list(LEFT_ALONE))
def test_what_is_meant_is_left_alone(what):
    with dtensor.watch(Net(nn.Tanh()), nan=True):
        LEFT_ALONE[what]()


def test_training_is_left_alone():
    torch.manual_seed(0)
    model = Transformer(ModelArgs())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with dtensor.watch(model, optimizer, every=1, nan=True):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randint(8, (2, 16))).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def test_close_removes_hooks_and_the_mode():
    model = Net(nn.Tanh())
    watched = dtensor.watch(model, nan=True)
    assert current_dispatch_mode() is not None
    assert all(m._forward_hooks and m._forward_pre_hooks for m in model.modules())
    watched.close()
    assert current_dispatch_mode() is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def hear_of_it():
    """Do nothing until the failure of another rank is known here, which then raises it, as it would communicating."""
    while True:
        job().check()
        time.sleep(0.05)


@with_ranks(2)
def test_operators_on_dtensors_are_named_by_their_global_shapes(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model: Any = nn.Sequential(nn.Linear(8, 8), Scaled(factor=0.0))
    parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False)})
    with dtensor.watch(model, nan=True):
        x = distribute_tensor(torch.tensor([1.0, -1.0, 1.0, 1.0]), mesh, [Shard(0)])
        if rank == 0:
            assert "aten.sqrt.default of (float32 [4] S(0)) made a NaN on rank 0, in test_" in raised(x.sqrt)
        else:
            x.sqrt()
            with pytest.raises(AgreementError, match="made a NaN on rank 0"):
                hear_of_it()
    with dtensor.watch(model, nan=True):
        loss = model(distribute_tensor(torch.ones(2, 8), mesh, [Replicate()])).sum()
        text = raised(loss.backward)
    assert text.startswith("aten.div.Tensor of (float32 [2, 1] R, float32 [2, 1] S(0)) made an infinity"), text
    assert "in the backward of 1 (test_non_finite.py:" in text
    assert "node SqrtBackward0" in text


@with_ranks(2)
def test_sharded_training_is_left_alone(rank):
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters())
    with dtensor.watch(model, optimizer, every=1, nan=True):
        for _ in range(3):
            model(torch.ones(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@with_ranks(2)
def test_ranks_that_wait_for_the_one_that_raises_are_told(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.tensor([1.0, -1.0]), mesh, [Shard(0)])
    begin = time.monotonic()
    with (
        mock.patch("dtensor.job.job.PATIENCE", 1.0),
        dtensor.watch(Net(nn.Tanh()), nan=True),
        pytest.raises((FloatingPointError, AgreementError)) as found,
    ):
        x.sqrt().full_tensor()
    assert "made a NaN on rank 1" in str(found.value)
    assert found.type is (FloatingPointError if rank else AgreementError)
    assert time.monotonic() - begin < 30
