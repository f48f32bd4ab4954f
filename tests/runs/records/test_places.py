"""Where an operator is called: module, line and phase, in forward, backward, recomputation and optimizer."""

import linecache
import re

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtensor
from dtensor.runs.comparing.values import load


class Block(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.up, self.down, self.checkpointed = nn.Linear(4, 8), nn.Linear(8, 4), checkpointed

    def inner(self, x):
        return self.down(self.up(x).tanh())  # the line of tanh

    def forward(self, x):
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x))


class Model(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.layers = nn.ModuleList([Block(checkpointed), Block(checkpointed)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def recorded(folder, model, steps=1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with dtensor.record(folder):
        for _ in range(steps):
            loss = model(torch.ones(2, 4)).square().mean()  # the line of the loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return list(load(folder).values.values())


def places(values, op):
    return [(v.phase, v.module) for v in values if v.op == op]


def code(value):
    file, _, number = value.line.partition(":")
    assert file == "test_places.py"
    return linecache.getline(__file__, int(number))


def test_modules_and_lines(tmp_path):
    values = recorded(tmp_path, Model())
    forward = [v for v in values if v.phase == "forward"]
    assert places(forward, "addmm") == [("forward", f"layers.{k}.{name}") for k in range(2) for name in ("up", "down")]
    assert [v.module for v in forward if v.op == "tanh"] == ["layers.0", "layers.1"]
    assert all("the line of tanh" in code(v) for v in forward if v.op == "tanh")
    (loss,) = [v for v in forward if v.op == "mean"]
    assert (loss.module, "the line of the loss" in code(loss)) == ("", True)


def test_a_backward_has_the_places_of_its_forward(tmp_path):
    backward = [v for v in recorded(tmp_path, Model()) if v.phase == "backward"]
    assert places(backward, "tanh_backward") == [("backward", "layers.1"), ("backward", "layers.0")]
    assert all("the line of tanh" in code(v) for v in backward if v.op == "tanh_backward")
    assert {m for _, m in places(backward, "mm")} == {f"layers.{k}.{name}" for k in range(2) for name in ("up", "down")}


def test_an_optimizer_has_the_names_of_parameters(tmp_path):
    values = recorded(tmp_path, Model(), steps=2)
    names = {name for name, _ in Model().named_parameters()}
    for phase in ("gradient", "optimizer", "updated"):
        found = [v for v in values if v.phase == phase]
        assert {v.module for v in found if re.fullmatch(r"layers\..*", v.module)} == names, phase
        assert {v.step for v in found} == {0, 1}
    assert {v.module for v in values if v.phase == "parameter"} == names


def test_what_a_checkpoint_computes_again(tmp_path):
    values = recorded(tmp_path, Model(checkpointed=True))
    assert places(values, "tanh") == [
        ("forward", "layers.0"),
        ("forward", "layers.1"),
        ("recompute", "layers.1"),
        ("recompute", "layers.0"),
    ]
    assert all("the line of tanh" in code(v) for v in values if v.op in ("tanh", "tanh_backward"))
    assert places(values, "tanh_backward") == [("backward", "layers.1"), ("backward", "layers.0")]


def test_a_second_model_has_its_class_in_front(tmp_path):
    first, second = nn.Linear(2, 2), Block()
    with dtensor.record(tmp_path):
        first(torch.ones(1, 2))
        second(torch.ones(1, 4))
    assert [m for _, m in places(load(tmp_path).values.values(), "addmm")] == ["", "Block.up", "Block.down"]


def test_outside_of_modules(tmp_path):
    x = torch.ones(3, requires_grad=True)
    with dtensor.record(tmp_path):
        (x * 2).sin().sum().backward()
    values = list(load(tmp_path).values.values())
    assert {v.module for v in values} == {""}
    assert [v.phase for v in values if v.op == "cos"] == ["backward"]


def test_operators_that_only_look_are_not_recorded(tmp_path):
    """Of a watch, which reads all parameters after a step."""
    ops = []
    for watched in (False, True):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dtensor.record(tmp_path / str(watched)):
            watch = dtensor.watch(model, optimizer, every=1) if watched else None
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if watch is not None:
                watch.close()
        ops.append([v.op for v in load(tmp_path / str(watched)).values.values() if v.kind == "op"])
    assert ops[0] == ops[1]
