"""Whatever the search decides, a plan can say, and says no more: from an assignment to names and back."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from dtensor import PlacementError, Plan, Shard, predict
from dtensor.parallel.search.choices import Choices
from dtensor.parallel.search.engine import Assignment, Engine
from dtensor.parallel.search.naming import assignment_of, plan_of
from dtensor.parallel.search.recording import record
from dtensor.parallel.search.repeats import steps_of
from dtensor.parallel.search.states import fits
from dtensor.parallel.search.tape import INPUT, PARAMETER
from dtensor.parallel.whole_model.plan import Activation, matches
from dtensor.prices.links import Network
from dtensor.prices.machine import MACHINES

from .programs import FAST, MODELS, made

MESH = {"dp": 2, "tp": 2}


class Layer(nn.Module):
    """It has a parameter of its own, and a module within that has one of that name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))
        self.act, self.inner = nn.GELU(), nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))

    def forward(self, x):
        return self.act(self.inner(self.act(x))) * self.weight


class Nested(nn.Module):
    """Layers with modules that are called twice, and others beside them whose names look like theirs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.layers.append(nn.Linear(16, 8))
        self.head = nn.Linear(8, 16)
        self.back = nn.Linear(16, 8)
        self.back.weight = self.layers[3].weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.back(self.head(x))


def recorded(name):
    torch.manual_seed(0)
    if name == "nested":
        return Nested(), (torch.randn(8, 16),)
    return made(name)


NAMES = [*MODELS, "nested"]
STEPS = {name: steps_of(record(*recorded(name))) for name in NAMES}


@st.composite
def assignments(draw, steps):
    """Parameters, inputs and borders anywhere."""
    sizes = tuple(MESH.values())

    def state(shape):
        entries = st.sampled_from([None, None, *range(len(shape))])
        found = (draw(entries), draw(entries))
        return found if fits(found, shape, sizes) else (None, None)

    assigned = Assignment()
    for t in steps.tensors:
        if t.step is None and t.kind == INPUT and t.like.ndim:
            assigned.stored[t] = state(t.like.shape)
        if t.kind == PARAMETER:
            assigned.stored[t] = state(t.like.shape)
            if draw(st.booleans()):
                assigned.used[t] = state(t.like.shape)
    for step in steps.places:
        if step.like.operands[0].dtype.is_floating_point and draw(st.integers(0, 3)) == 0:
            shape = step.like.operands[0].shape
            assigned.borders[step] = state(shape), state(shape)
    return assigned


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_what_is_assigned_is_said(name, data):
    steps = STEPS[name]
    assigned = data.draw(assignments(steps))
    plan = plan_of(assigned, steps, MESH)
    again = assignment_of(plan, steps, MESH)
    whole = (None,) * len(MESH)
    for t in steps.of_kind(INPUT):
        assert again.stored[t] == assigned.stored[t], t.name
    for t in steps.of_kind(PARAMETER):
        stored = assigned.stored[t]
        assert again.stored.get(t, whole) == stored, t.name
        assert again.used.get(t, stored) == assigned.used.get(t, stored), t.name
    assert again.borders == assigned.borders
    choices = Choices(torch.device("cpu"), Network.of(tuple(MESH.values()), FAST), MACHINES["cpu"])
    engine = Engine(steps, choices)
    one, other = engine.run(assigned), engine.run(again)
    assert (one.seconds, one.peak) == (other.seconds, other.peak)


def test_a_pattern_says_no_more_than_is_meant():
    steps = STEPS["nested"]
    (own,) = [t for t in steps.of_kind(PARAMETER) if t.name == "layers.*.weight" and t.like.ndim == 1]
    plan = plan_of(Assignment(stored={own: (None, 0)}), steps, MESH)
    assert sorted(plan.parameters) == [f"layers.{k}.weight" for k in range(3)]
    (layer,) = [s for s, at in steps.places.items() if "layers.0" in at and s.like.what == "output"]
    plan = plan_of(Assignment(borders={layer: ((None, 0), (None, 0))}), steps, MESH)
    assert list(plan.activations) == [f"layers.{k}.output" for k in range(3)]


def test_only_some_of_the_layers_may_be_gathered():
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.ones(8, 16)
    stored = {"*.weight": {"tp": Shard(0)}}

    def gathered(*names):
        plan = Plan({"tp": 2}, stored, used={f"{k}.weight": {} for k in names}, inputs={"tp": Shard(0)})
        return predict(model, {"tp": 2}, x, plan, mode="forward", machine=MACHINES["cpu"]).prediction.moves

    def times(moves):
        return sum(n for _, op, a, b, n, _ in moves if (op, a, b) == ("aten.t", "S(0)", "R"))

    assert times(gathered(0)) == times(gathered(1)) == 1
    assert times(gathered(0, 1)) == 2


def test_what_is_no_activation_of_the_model():
    tokens, table = torch.zeros(4, 8, dtype=torch.long), nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16))
    moved = Activation({"tp": Shard(1)}, {"tp": Shard(1)})
    plain = Plan({"tp": 2}, activations={"1.input": moved})
    both = Plan({"tp": 2}, activations={"*.input": moved})  # tokens stay where they are
    one, other = (predict(table, {"tp": 2}, tokens, plan).prediction for plan in (plain, both))
    assert one.moves == other.moves
    with pytest.raises(PlacementError, match=r"'2' of '2\.input' matches no module"):
        predict(table, {"tp": 2}, tokens, Plan({"tp": 2}, activations={"2.input": moved}))


def test_layers_that_are_alike_may_be_placed_differently():
    """What one of two layers is moved is half of what both are."""
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.ones(8, 16)
    sides = {"neither": (), "one": ("1",), "both": ("0", "1")}
    how = {"mode": "forward", "machine": MACHINES["cpu"]}

    def priced(some):
        weights = {f"{k}.weight": {"tp": Shard(0)} for k in some}
        plan = Plan({"tp": 2}, weights, activations={f"{k}.output": Activation() for k in some})
        return predict(model, {"tp": 2}, x, plan, **how).prediction

    neither, one, both = (priced(some) for some in sides.values())
    moved = [p.waiting - neither.waiting for p in (one, both)]  # each step compares its inputs first
    assert 0 < moved[0] == pytest.approx(moved[1] / 2)
    assert neither.static > one.static > both.static


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.*", "layers.0", True),
        ("layers.*", "layers.0.attention", False),
        ("layers.*.w?", "layers.10.w1", True),
        ("**.wo", "wo", True),
        ("**.wo", "layers.0.attention.wo", True),
        ("layers.**", "layers.0.attention", True),
        ("*", "layers.0", False),
    ],
)
def test_patterns_of_modules(pattern, name, expected):
    assert matches(name, pattern) is expected
