"""Layers whose forward the backward runs again: in plans, on ranks, and as a choice of the search."""

import copy
import re
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.cuts import CUTS
from dtensor import Activation, PlacementError, Plan, Shard, distribute_model, init_device_mesh, predict, search
from dtensor.parallel.search.best import Best
from dtensor.parallel.search.engine import Assignment, Run
from dtensor.parallel.search.recording import record
from dtensor.parallel.search.schedule import Half
from dtensor.parallel.search.search import layers_of
from dtensor.parallel.whole_model.plan import recomputed_of
from dtensor.prices.links import Link
from dtensor.prices.machine import MACHINES, Machine
from dtensor.testing import run_threads, with_ranks

from .programs import WithLoss, alone, made, on_ranks

CUT = {"*.w1.weight": {"tp": Shard(0)}, "*.w1.bias": {"tp": Shard(0)}, "*.w2.weight": {"tp": Shard(1)}}


class Deep(nn.Module):
    def __init__(self, dim=32, layers=8):
        super().__init__()
        one = [nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(layers)]
        self.layers = nn.ModuleList(one)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_each_nth_of_the_outermost_modules():
    names = [name for name, _ in Deep().named_modules()]
    assert recomputed_of(Plan({"tp": 2}, recomputed={"layers.*": 1}), names) == [f"layers.{k}" for k in range(8)]
    assert recomputed_of(Plan({"tp": 2}, recomputed={"layers.*": 3}), names) == ["layers.0", "layers.3", "layers.6"]
    both = Plan({"tp": 2}, recomputed={"layers.*.0": 1, "layers.0": 1})
    assert recomputed_of(both, names) == [f"layers.{k}.0" for k in range(1, 8)] + ["layers.0"]
    assert layers_of(Deep()) == ["layers.*"]
    assert layers_of(nn.Linear(2, 2)) == []


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"blocks.*": 1}, "'blocks.*' of 'recomputed' matches no module of the model; it has for example layers"),
        ({"layers.*": 0}, "recomputed: each n-th of 'layers.*' with n = 0; write 1 for all, 2 for every other one"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_changes(entry, said):
    def distributed(rank):
        mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), Deep()
        with pytest.raises(PlacementError, match=re.escape(said)):
            distribute_model(model, mesh, Plan({"tp": 2}, recomputed=entry))
        assert type(model.layers[0]) is nn.Sequential
        assert type(model.get_parameter("layers.0.0.weight")) is nn.Parameter

    run_threads(distributed, 2)


def test_files(tmp_path):
    plan = Plan({"tp": 2}, recomputed={"layers.*": 2, "head": 1})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert str(plan).splitlines()[1:] == [
        "layers.*  recomputed in the backward, one of 2",
        "head  recomputed in the backward",
    ]


def test_what_is_recomputed_trains_like_one_device():
    model, batch = made("decoder")
    plan = Plan({"tp": 2}, CUT, recomputed={"inner.layers.*": 1})
    loss, gradients = on_ranks(model, batch, plan)
    expected, grads = alone(model, batch)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, grads)


def test_the_forward_runs_twice_where_the_plan_says_so():
    def counted(rank):
        model, seen = Deep(8, 4), [0] * 4
        for k, layer in enumerate(model.layers):
            layer.get_submodule("0").register_forward_hook(lambda *_, k=k: seen.__setitem__(k, seen[k] + 1))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = Plan({"tp": 2}, recomputed={"layers.*": 2})
        distribute_model(model, mesh, plan, outputs={})(torch.ones(2, 8)).sum().backward()
        return seen

    assert run_threads(counted, 2)[0] == [2, 1, 2, 1]


@pytest.mark.nightly
@with_ranks(2)
def test_a_compiled_model_recomputes(rank):
    model, batch = made("decoder")
    expected, grads = alone(model, batch)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    mine = distribute_model(model, mesh, Plan({"tp": 2}, CUT, recomputed={"inner.layers.*": 1}), outputs={})
    loss = torch.compile(mine, backend="dtensor", options={"inner": "aot_eager"})(*batch)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close({name: p.grad.full_tensor() for name, p in mine.named_parameters()}, grads)


def test_a_tape_has_what_is_computed_again():
    model, x = Deep(), torch.empty(64, 32)

    def products(tape, backward):
        return sum([op.func is torch.ops.aten.addmm.default and op.backward == backward for op in tape.ops])

    plain, again = record(model, x), record(model, x, recomputed=[f"layers.{k}" for k in range(8)])
    assert products(plain, False) == products(again, False) == 16
    assert (products(plain, True), products(again, True)) == (0, 8)  # what comes last in a layer is not needed
    assert "forward" not in vars(model.layers[0])


def test_a_model_may_recompute_by_itself():
    own = Deep()
    for layer in own.layers:
        layer.forward = lambda x, f=layer.forward: checkpoint(f, x, use_reentrant=False)
    x, mesh = torch.empty(4096, 32), {"tp": 2}
    by_plan = predict(Deep(), mesh, x, Plan(mesh, recomputed={"layers.*": 1})).prediction
    by_itself = predict(own, mesh, x, Plan(mesh)).prediction
    assert by_itself.seconds == pytest.approx(by_plan.seconds)
    assert by_itself.memory == pytest.approx(by_plan.memory)


def test_less_memory_for_more_time():
    model, x, mesh = Deep(), torch.empty(4096, 32), {"tp": 2}
    given = [Plan(mesh, recomputed={"layers.*": n} if n else {}) for n in (0, 4, 2, 1)]
    priced = [predict(model, mesh, x, plan, machine=MACHINES["cpu"]).prediction for plan in given]
    assert [p.memory for p in priced] == sorted([p.memory for p in priced], reverse=True)
    assert [p.seconds for p in priced] == sorted([p.seconds for p in priced])
    assert priced[-1].memory < priced[0].memory / 2


def test_what_runs_again_is_moved_as_the_first_time():
    """Activations cut along the sequence between layers: the gather before a layer is repeated, and what the backward
    reads comes the way it came when it was saved, if by another operator."""
    model, batch = made("decoder")
    cut = {"tp": Shard(1)}
    moved = {
        "inner.layers.*.feed_forward.input": Activation({}, cut),
        "inner.layers.*.feed_forward.output": Activation(cut, {}),
    }
    mesh = {"tp": 2}

    def moves(**more):
        plan = Plan(mesh, CUT, activations=moved, **more)
        found = predict(model, mesh, batch, plan, machine=MACHINES["cpu"]).prediction.moves
        counts: Counter[tuple[str, str]] = Counter()
        for _, _, a, b, n, _ in found:
            counts[a, b] += n
        return counts

    once, twice = moves(), moves(recomputed={"inner.layers.*": 1})
    assert set(twice) <= set(once)
    assert sum(twice.values()) > sum(once.values())


def test_the_search_recomputes_no_more_than_it_must():
    x, mesh = torch.empty(4096, 32), {"tp": 2}
    kept = search(Deep(), mesh, x)
    assert kept.recomputed == {}
    need = kept.prediction.memory
    assert search(Deep(), mesh, x, memory=2 * need).recomputed == {}
    least = predict(Deep(), mesh, x, Plan(mesh, inputs={"tp": Shard(0)}, recomputed={"layers.*": 1})).prediction.memory
    some = search(Deep(), mesh, x, memory=(need + least) / 2)
    assert 1 < some.recomputed["layers.*"] <= 4
    assert some.prediction.memory <= (need + least) / 2
    assert search(Deep(), mesh, x, memory=1.3 * least).recomputed == {"layers.*": 1}
    assert search(Deep(), mesh, x, recomputed={"layers.*": 2}).recomputed == {"layers.*": 2}


def test_two_microbatches_may_take_more_to_be_recomputed(monkeypatch):
    """They were tried with what one batch needs to fit, and left if they did not fit with that."""
    told = [  # microbatches, and seconds of the plan found, or None if nothing fits
        (1, None),
        *[(1, 1.0), (2, None)],
        *[(1, 1.1), (2, 0.7)],
        (2, 0.8),
    ]
    called = []

    def found(self):
        parts, seconds = told[len(called)]
        called.append(self.engine.regime.parts)
        self.free, self.short = False, seconds is None
        halves = [Half(self.choices.network, self.choices.machine, []) for _ in range(2)]
        run = None if seconds is None else Run(*halves, parts=parts, waiting=seconds, seconds=seconds)
        return None if run is None else (Assignment(), run, 0.0)

    monkeypatch.setattr(Best, "found", found)
    plan = search(Deep(), {"tp": 2}, torch.empty(4096, 32), memory=1e9)
    assert called == [parts for parts, _ in told]
    assert (plan.recomputed, plan.options) == ({"layers.*": 2}, {"split_batch": 2})


def test_a_program_that_ended_the_process_in_the_presolve_of_highs():
    """With its presolve, which is off, HiGHS 1.15 crashed here."""
    inner, batch = CUTS["weights"].make()
    machine = Machine(1.05e11, 4.5e11, 2.1e10, 2e-6, overlap=0.0, efficiency=0.82)
    mesh, model = {"x": 2}, WithLoss(inner)
    links = {"x": Link(alpha=1e-4, bandwidth=1.2e7, memory=2e10, launch=2e-5, start=1e-3)}
    how = {"links": links, "machine": machine, "optimizer_states": 0.0, "device_type": "cpu"}
    ddp = predict(model, mesh, batch, Plan(mesh, inputs={"x": Shard(0)}), **how).prediction.memory
    assert search(model, mesh, batch, memory=1.05 * ddp, limit=1.0, **how).prediction.memory <= ddp


def test_auto_searches_and_applies():
    model, batch = made("perceptron")
    expected, grads = alone(model, batch)

    def step(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        mine = distribute_model(copy.deepcopy(model), mesh, "auto", batch=batch, inputs={}, outputs={})
        loss = mine(*batch)
        loss.backward()
        return loss.detach(), {name: p.grad.full_tensor() for name, p in mine.named_parameters()}

    loss, gradients = run_threads(step, 2)[0]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, grads)


@pytest.mark.parametrize(
    ("word", "said"),
    [("auto", "pass batch=, the arguments of forward of the whole batch"), ("best", "'model' or 'auto'; got 'best'")],
)
def test_words_in_place_of_plans(word, said):
    def distributed(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(PlacementError, match=re.escape(said)):
            distribute_model(Deep(), mesh, word)

    run_threads(distributed, 2)
