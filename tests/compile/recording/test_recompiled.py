"""Why a frame is compiled again, said as the user would say it."""

import logging
import re

import pytest
import torch
import torch._dynamo
from torch import nn

import dtensor
from dtensor import Replicate, Shard, distribute_tensor
from dtensor.compile.recording.recompiled import named, why_again

WHOLE = Replicate()
SIZE = "dim 0 of x has length 6, and had 4"

SAID = [
    (["0/0: GLOBAL_STATE changed: grad_mode "], "gradients are on now, and were off"),
    (["0/1: GLOBAL_STATE changed: num_threads "], "torch's setting num_threads is another"),
    (["0/0: tensor 'L['x']' rank mismatch. expected 2, actual 3"], "x has 3 dimensions, and had 2"),
    (["tensor 'x' stride mismatch at index 1. expected 4, actual 1"], "dim 1 of x has stride 1, and had 4"),
    (["tensor 'x' requires_grad mismatch. expected requires_grad=1"], "x requires no gradient now, and did before"),
    (["0/2: 2 <= x._local_tensor.size()[0]  # return x  # a.py:3 in f"], "2 <= x.size()[0] no longer holds"),
    (["0/0: GLOBAL_STATE changed: grad_mode ", "0/1: flag == 1"], "flag is no longer 1"),
    (["0/0: flag == 1", "0/1: tensor 'x' size mismatch at index 0. expected 4, actual 6"], SIZE),
    ([], "torch.compile gives no reason"),
]


@pytest.mark.parametrize(("reasons", "said"), SAID)
def test_what_dynamo_says(reasons, said):
    assert why_again(reasons) == said


def test_names():
    assert named("L['self']._modules['layers']._parameters['weight']") == "self.layers.weight"
    assert named("G['SCALE']") == "SCALE"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop, self.scale = nn.Linear(8, 8), nn.Dropout(0.5), 3

    def forward(self, x, flag=1):
        return self.drop(self.linear(x)) * self.scale * flag


def test_what_a_user_changes(fake_mesh, caplog):
    """Each change of a program that compiles it again, from what it was at first; none is said twice."""
    mesh = fake_mesh(2, names=("tp",))
    model = dtensor.distribute_module(Net(), mesh)
    compiled = torch.compile(model, backend="eager")

    def tensor(*shape, dtype=torch.float32, placement=WHOLE):
        return distribute_tensor(torch.ones(*shape, dtype=dtype), mesh, [placement])

    def evaluate():
        with torch.no_grad():
            compiled(tensor(4, 8))

    def autocast():
        with torch.autocast("cpu"):
            compiled(tensor(4, 8))

    def in_double():
        model.double()(tensor(4, 8, dtype=torch.float64))
        compiled(tensor(4, 8, dtype=torch.float64))
        model.float()

    def in_evaluation():
        model.eval()
        compiled(tensor(4, 8))
        model.train()

    def scaled():
        model.scale = 4
        compiled(tensor(4, 8))
        model.scale = 3

    changes = {
        "gradients are off now (torch.no_grad or torch.inference_mode), and were on": evaluate,
        SIZE: lambda: compiled(tensor(6, 8)),
        "x is float64, and was float32": in_double,
        "a DTensor has other placements, dimensions or another mesh": lambda: compiled(
            tensor(4, 8, placement=Shard(0))
        ),
        "x requires a gradient now, and did not before": lambda: compiled(tensor(4, 8).requires_grad_()),
        "self.drop is in evaluation mode now, and was in training mode": in_evaluation,
        "self.scale is no longer 3": scaled,
        "flag is no longer 1": lambda: compiled(tensor(4, 8), 2),
        "torch.autocast is on now, and was off": autocast,
    }
    for said, change in changes.items():
        for times in range(2):  # what is compiled anew for a new start is the same change, and not said again
            torch._dynamo.reset()
            compiled(tensor(4, 8))
            caplog.clear()
            with caplog.at_level(logging.INFO, "dtensor"):
                change()
            again = [m for m in caplog.messages if "is compiled again" in m]
            found = re.sub(r" \(first used at .*\)", "", again[0].split("again: ")[1]) if again else ""
            assert (len(again), found) == ((1, said) if times == 0 else (0, "")), (said, again)
