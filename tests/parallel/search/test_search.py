"""Plans that are found: what they compute, what they cost, and what is said where none is."""

import copy
import re
import threading
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dtensor import Activation, PlacementError, Plan, Shard, distribute_model, predict, search
from dtensor.prices.links import Link
from dtensor.prices.machine import MACHINES
from dtensor.testing import with_ranks

from .programs import FAST, MODELS, SLOW, made, trains_as_one_device

MESHES = {"four": {"tp": 4}, "two by two": {"dp": 2, "tp": 2}}
LINKS = {"slow": SLOW, "fast": FAST}


def searched(name, sizes, link, **options):
    model, batch = made(name)
    return search(model, sizes, batch, links=dict.fromkeys(sizes, link), machine=MACHINES["cpu"], **options)


@cache
def known(name, sizes, link):
    """The plan of a search without options, which many tests look at."""
    return searched(name, dict(sizes), link)


def found(name, sizes, link, **options):
    plan = searched(name, sizes, link, **options) if options else known(name, tuple(sizes.items()), link)
    return *made(name), plan


@pytest.mark.parametrize(
    ("name", "mesh", "link"),
    [
        pytest.param(
            name, mesh, link, marks=() if (mesh == "four") == (name in ("wide", "images")) else pytest.mark.nightly
        )
        for name in MODELS
        for mesh in MESHES
        for link in LINKS
    ],
)
def test_a_found_plan_computes_what_one_device_does(name, mesh, link):
    model, batch, plan = found(name, MESHES[mesh], LINKS[link])
    trains_as_one_device(model, batch, plan)


class Lookups(nn.Module):
    """Rows of a large table beside features, as in recommender systems."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(65536, 64)
        self.up, self.down = nn.Linear(512, 512), nn.Linear(512, 64)

    def forward(self, rows, features):
        return (self.down(torch.relu(self.up(features))) * self.table(rows)).square().mean()


def lookups():
    torch.manual_seed(0)
    return Lookups(), (torch.arange(4096) * 37 % 65536, torch.randn(4096, 512))


def test_arguments_may_be_placed_differently():
    """All ranks look up all rows, in their part of a table that is too large to be sent, and have a part of the batch
    of features."""
    model, batch = lookups()
    link = Link(alpha=1e-5, bandwidth=3e8, start=1e-3)
    plan = search(model, {"tp": 2}, batch, links={"tp": link}, machine=MACHINES["cpu"], gap=1e-4)
    assert plan.inputs == {"features": {"tp": Shard(0)}}
    assert plan.parameters["table.weight"] == {"tp": Shard(1)}
    assert plan.prediction.seconds < 0.98 * min(seconds for seconds, _ in plan.prediction.others.values())
    trains_as_one_device(model, batch, plan)


@pytest.mark.parametrize("name", MODELS)
def test_a_found_plan_is_predicted_to_cost_what_the_search_says(name):
    _, batch, plan = found(name, {"dp": 2, "tp": 2}, FAST)
    links = dict.fromkeys(plan.mesh, FAST)
    again = predict(made(name)[0], dict(plan.mesh), batch, plan, links=links, machine=MACHINES["cpu"])
    assert again == plan
    for figure in ("seconds", "computing", "waiting", "beside", "updating", "memory", "static"):
        assert getattr(again.prediction, figure) == pytest.approx(getattr(plan.prediction, figure), rel=1e-9), figure


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan({"tp": 2}), "the plan is for a mesh {'tp': 2}, and the mesh has {'dp': 2, 'tp': 2}"),
        (Plan({"dp": 2, "tp": 2}, {"nothing": {"tp": Shard(0)}}), "'nothing' matches no parameter or buffer"),
        (Plan({"dp": 2, "tp": 2}, {"*.wq.weight": {"pp": Shard(0)}}), "names the axis 'pp', and the mesh has"),
        (Plan({"dp": 2, "tp": 2}, inputs={"z": {"dp": Shard(0)}}), "inputs: the model is given no 'z', but 'x', 'y'"),
    ],
)
def test_plans_that_cannot_be_priced(plan, said):
    model, batch = made("decoder")
    with pytest.raises(PlacementError, match=re.escape(said)):
        predict(model, {"dp": 2, "tp": 2}, batch, plan)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", MODELS)
def test_no_well_known_plan_is_cheaper(name, link):
    *_, plan = found(name, {"dp": 2, "tp": 2}, LINKS[link])
    predicted = plan.prediction
    assert 0 < predicted.bound <= predicted.seconds
    assert all(predicted.seconds <= 1.01 * seconds for seconds, _ in predicted.others.values())


def test_the_links_decide():
    """Where sending is dear every rank computes all; where it is cheap nothing is computed twice."""
    *_, slow = found("decoder", {"tp": 4}, SLOW)
    *_, fast = found("decoder", {"tp": 4}, FAST)
    assert fast.inputs or fast.parameters
    assert slow.prediction.computing > 1.5 * fast.prediction.computing


def test_memory_counts_what_is_gathered_and_what_is_sent():
    """A moved activation is a new tensor; a gathered parameter is there as long as it is read; gradients wait in
    buckets."""
    model, x = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)), torch.ones(32, 64)
    data, half, whole = {"tp": Shard(0)}, 16 * 64 * 4, 32 * 64 * 4

    def memory(**given):
        return predict(copy.deepcopy(model), {"tp": 2}, x, Plan({"tp": 2}, **given), mode="forward").prediction

    apart, gathered = memory(inputs=data), memory(inputs=data, activations={"0.output": Activation()})
    assert gathered.memory - apart.memory >= whole - half
    stored = memory(inputs=data, parameters={"*.weight": data}, used={"*.weight": {}})
    assert stored.memory - stored.static >= 64 * 64 * 4
    trained = predict(copy.deepcopy(model), {"tp": 2}, x, Plan({"tp": 2}, inputs=data)).prediction
    assert trained.memory - trained.static >= 2 * 64 * 64 * 4


def test_parameters_are_gathered_in_the_forward_and_in_the_backward():
    """But a table once, as the backward does not read it, and the last two once, as they stay gathered."""
    data, whole = {"tp": Shard(0)}, {"*.weight": {}}
    tokens = torch.zeros(32, 8, dtype=torch.long)

    def gathers(model, x):
        plan = Plan({"tp": 2}, {"*.weight": data}, whole, data)
        moves = predict(model, {"tp": 2}, x, plan, machine=MACHINES["cpu"]).prediction.moves
        return {op: n for _, op, a, b, n, _ in moves if (a, b) == ("S(0)", "R")}

    both = nn.Sequential(nn.Embedding(512, 64), *[nn.Linear(64, 64, bias=False) for _ in range(4)])
    assert gathers(both, tokens) == {"aten.embedding": 1, "aten.t": 6}


def test_memory_of_what_views_of_are_read():
    """Queries, keys and values are slices of one tensor, all of which stays for the backward."""

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.all, self.out = nn.Linear(64, 192, bias=False), nn.Linear(64, 64, bias=False)

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.all(x).chunk(3, -1))
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    x = torch.ones(8, 128, 64)
    held = predict(Fused(), {"tp": 2}, x, Plan({"tp": 2}), machine=MACHINES["cpu"]).prediction.held
    assert held["all"][1] >= 3 * x.nbytes


def test_frozen_parameters_need_no_gradients_and_states():
    model, x = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 8)), torch.ones(8, 256)
    for p in model[:2].parameters():
        p.requires_grad_(False)
    most = 2.5 * sum(p.nbytes for p in model.parameters())
    plan = search(model, {"tp": 2}, x, memory=most, machine=MACHINES["cpu"], links={"tp": SLOW})
    assert not {"0.weight", "1.weight", "*.weight"} & set(plan.parameters)
    assert plan.prediction.gap < 0.03  # the bound knows nothing of what is exposed where a step begins and ends


def test_what_if():
    """Under a condition that is no worse, no more time is needed."""
    *_, plan = found("wide", {"dp": 2, "tp": 2}, SLOW, memory=1e9, what_if=True)
    seconds = {name: s for name, (s, _) in plan.prediction.what_if.items()}
    assert list(seconds) == [
        "every rank with the whole batch",
        "dp twice as fast",
        "tp twice as fast",
        "twice the memory",
    ]
    whole, *better = seconds.values()
    assert whole >= 0.98 * plan.prediction.seconds
    assert all(s <= 1.02 * plan.prediction.seconds for s in better)
    assert "The best plan, if things were otherwise:" in plan.explain()


def test_memory_is_a_bound():
    """With less memory than the fastest plan takes, another one is found that fits."""
    model, batch, plan = found("wide", {"tp": 4}, SLOW)
    most = 0.6 * plan.prediction.memory
    _, _, small = found("wide", {"tp": 4}, SLOW, memory=most)
    assert small.prediction.memory <= most < plan.prediction.memory
    assert small.prediction.seconds > plan.prediction.seconds
    trains_as_one_device(model, batch, small)


def test_too_little_memory_is_an_error_that_says_how_much_is_needed():
    with pytest.raises(PlacementError, match=r"no plan found fits into 1,000 bytes, .* at least [\d,]{5,}"):
        found("wide", {"tp": 4}, SLOW, memory=1000)


def test_what_is_fixed_stays():
    fixed = {"inner.up.weight": {"tp": Shard(1)}, "inputs": {}}
    *_, plan = found("wide", {"tp": 4}, FAST, fixed=fixed)
    assert plan.parameters["inner.up.weight"] == {"tp": Shard(1)}
    assert not plan.inputs
    *_, plan = found("wide", {"tp": 4}, SLOW, fixed={"inputs.x": {"tp": Shard(1)}})
    assert plan.input("x") == {"tp": Shard(1)}


@pytest.mark.parametrize(
    ("name", "placement"),
    [("inner.table.weight", Shard(-1)), ("inner.up.weight", Shard(0)), ("inner.head.weight", Shard(0))],
    ids=["from the back", "of different lengths", "by its other name"],
)
def test_whatever_fits_can_be_fixed(name, placement):
    model, batch = made("wide")
    model.inner.up, model.inner.down = nn.Linear(16, 250).double(), nn.Linear(250, 16).double()
    model.inner.head = nn.Linear(16, 512, bias=False)
    model.inner.head.weight = model.inner.table.weight
    given = {name: {"tp": placement}}
    plan = search(model, {"tp": 4}, batch, links={"tp": SLOW}, machine=MACHINES["cpu"], fixed=given)
    found = plan.parameters["inner.table.weight" if "head" in name else name]
    assert found == {"tp": Shard(placement.dim % 2)}
    assert plan.prediction.bound > 0
    trains_as_one_device(model, batch, plan)


def test_layers_that_repeat_are_named_once():
    *_, plan = found("decoder", {"tp": 4}, FAST)
    assert any(name.startswith("inner.layers.*.") for name in plan.parameters)
    assert not any(".0." in name or ".1." in name for name in (*plan.parameters, *plan.used, *plan.activations))


def test_modules_of_one_pattern_that_differ_are_named_one_by_one():
    """`0.weight` and `2.weight` of a sequence are both `*.weight`, and have other shapes."""
    *_, plan = found("perceptron", {"tp": 4}, FAST)
    assert not any(name.startswith("inner.*.") for name in (*plan.parameters, *plan.used))


@pytest.mark.nightly
def test_the_same_plan_each_time():
    one, other = (searched("decoder", {"dp": 2, "tp": 2}, FAST) for _ in range(2))
    assert one == other


def test_nothing_is_computed_and_the_model_stays_as_it_is():
    model, batch = made("decoder")
    before = copy.deepcopy(model.state_dict())
    with torch.device("meta"):
        inner, _ = MODELS["decoder"]()
    search(model, {"tp": 4}, batch)
    torch.testing.assert_close(model.state_dict(), before)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    search(inner, {"tp": 4}, batch[0].to("meta"), mode="forward")


def test_a_forward_alone():
    *_, plan = found("decoder", {"tp": 4}, FAST, mode="forward")
    *_, step = found("decoder", {"tp": 4}, FAST)
    assert plan.prediction.updating == 0
    assert plan.prediction.seconds < step.prediction.seconds / 2


def test_operators_without_a_rule_are_named():
    class Rare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return torch.linalg.det(self.weight) * x.sum() + torch.ops.aten._foreach_norm([self.weight])[0]

    plan = search(Rare(), {"tp": 2}, torch.randn(4, 8), mode="forward")
    assert any("_foreach_norm" in name for name in plan.prediction.gathered)


class Counted(nn.Module):
    def forward(self, x):
        return x[: int(x.sum())]


BAD = {
    "values": (lambda: search(Counted(), {"tp": 2}, torch.ones(4)), PlacementError, "needs the values of tensors"),
    "mode": (lambda: search(nn.Linear(2, 2), {"tp": 2}, torch.ones(4, 2), mode="train"), ValueError, '"training" or'),
    "fixed": (
        lambda: search(nn.Linear(2, 2), {"tp": 2}, torch.ones(4, 2), fixed={"wieght": {}}),
        PlacementError,
        "'wieght' matches no parameter",
    ),
    "input": (
        lambda: search(nn.Linear(2, 2), {"tp": 2}, torch.ones(4, 2), fixed={"inputs.x": {"tp": Shard(0)}}),
        PlacementError,
        "inputs: the model is given no 'x', but 'input'",
    ),
    "axis of inputs": (
        lambda: search(nn.Linear(2, 2), {"tp": 2}, torch.ones(4, 2), fixed={"inputs": {"dp": Shard(0)}}),
        PlacementError,
        r"'inputs' names the axis 'dp', and the mesh has \['tp'\]",
    ),
    "dim": (
        lambda: search(nn.Linear(2, 2), {"tp": 2}, torch.ones(4, 2), fixed={"weight": {"tp": Shard(2)}}),
        PlacementError,
        r"'weight' of shape \[2, 2\]: Shard\(2\) does not fit",
    ),
    "memory": (lambda: search(nn.Linear(2, 2), {"tp": 2}, torch.ones(4, 2), memory=0), ValueError, "memory is a posi"),
    "microbatches": (
        lambda: search(nn.Linear(2, 2), {"tp": 2}, torch.ones(4, 2), split_batch=0),
        ValueError,
        "split_batch is a number of microbatches, 1 or more; got 0",
    ),
    "an option": (
        lambda: predict(nn.Linear(2, 2), {"tp": 2}, torch.ones(4, 2), Plan({"tp": 2}, options={"split_batch": "2"})),
        ValueError,
        "option split_batch is a number of microbatches",
    ),
    "alike": (
        lambda: search(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            {"tp": 2},
            torch.ones(4, 2),
            fixed={"0.weight": {"tp": Shard(0)}, "1.weight": {"tp": Shard(1)}},
        ),
        PlacementError,
        "different placements; layers that are alike are placed alike",
    ),
    "axis": (
        lambda: search(nn.Linear(2, 2), {"tp": 2}, torch.ones(4, 2), fixed={"weight": {"dp": Shard(0)}}),
        PlacementError,
        "names the axis 'dp'",
    ),
    "link": (
        lambda: search(nn.Linear(2, 2), {"tp": 2}, torch.ones(4, 2), links={"dp": FAST}),
        ValueError,
        "no 'dp'",
    ),
    "no tensor": (
        lambda: search(nn.Identity(), {"tp": 2}, torch.ones(4, dtype=torch.long)),
        ValueError,
        "pass loss=",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error(name):
    call, kind, said = BAD[name]
    with pytest.raises(kind, match=said):
        call()


def test_a_plan_is_a_file(tmp_path):
    *_, plan = found("decoder", {"dp": 2, "tp": 2}, FAST)
    plan = replace(plan, inputs={"x": {"tp": Shard(1)}, "y": {}})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    (tmp_path / "plan.json").write_text(
        '{"format": "dtensor plan 1", "mesh": {"tp": 2}, "parameters": {"w": {"tp": "X"}}}'
    )
    with pytest.raises(PlacementError, match="is not one placement"):
        Plan.load(tmp_path / "plan.json")


@with_ranks(2)
def test_a_plan_of_another_mesh_or_model(rank):
    from dtensor import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(PlacementError, match=r"the plan is for a mesh {'dp': 2}, and the mesh has {'tp': 2}"):
        distribute_model(nn.Linear(2, 2), mesh, Plan({"dp": 2}))
    with pytest.raises(PlacementError, match="'wieght' matches no parameter"):
        distribute_model(nn.Linear(2, 2), mesh, Plan({"tp": 2}, {"wieght": {"tp": Shard(0)}}))
    with pytest.raises(PlacementError, match=r"'x' of 'x.input' matches no module"):
        distribute_model(nn.Sequential(nn.Linear(2, 2)), mesh, Plan({"tp": 2}, activations={"x.input": None}))
    with pytest.raises(PlacementError, match="is not an activation"):
        distribute_model(nn.Sequential(nn.Linear(2, 2)), mesh, Plan({"tp": 2}, activations={"0.out": None}))


@with_ranks(2)
def test_one_rank_searches_for_all(rank):
    from dtensor import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, batch = made("perceptron")
    plan = search(model, mesh, batch)
    assert plan.mesh == {"tp": 2}
    assert plan.prediction.seconds > 0
    with pytest.raises(PlacementError, match="no plan found fits"):
        search(model, mesh, batch, memory=10)


def test_it_explains_itself():
    *_, plan = found("decoder", {"dp": 2, "tp": 2}, SLOW)
    said = plan.explain()
    for word in ("of the best there is", "Where the time goes", "replicas (DDP)", "of communication"):
        assert word in said
    assert "Nothing is predicted" in Plan({"tp": 2}).explain()


def test_who_reads_a_plan_while_others_save_it_reads_all_of_it(tmp_path):
    """Every rank may save the plan that all of them found."""
    plan = Plan({"tp": 2}, {f"layers.{k}.weight": {"tp": Shard(0)} for k in range(200)})
    path = tmp_path / "plan.json"
    plan.save(path)
    done = threading.Event()

    def saving():
        while not done.is_set():
            plan.save(path)

    others = [threading.Thread(target=saving) for _ in range(2)]
    for other in others:
        other.start()
    try:
        assert all(Plan.load(path) == plan for _ in range(100))
    finally:
        done.set()
        for other in others:
            other.join()
