"""What one rank compiled is taken by those for which it is right, and by no other."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import get_rank as who
from torch.distributed import tensor as torch_tensor

import dtensor
import dtensor.compile
from dtensor import Replicate, Shard, distribute_tensor
from dtensor.compile.packages import sharing
from dtensor.compile.packages.which_ranks import asks_for_rank, group_of_this_rank
from dtensor.layout.chunks import uneven_noted
from dtensor.testing import fake_ranks, run_ranks

from . import programs
from .test_sharing import shared

NUMBER = 0


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * (self.scale + 1)


def ones(mesh, rows=4, placement=None):
    return distribute_tensor(torch.ones(rows, 4), mesh, [placement or Replicate()])


def closure(mesh):
    rank = dist.get_rank()

    def f(x):
        return x + 1 if rank == 0 else x + 2

    return torch.compile(f)(ones(mesh))


def a_global(mesh):
    globals()["NUMBER"] = dist.get_rank()
    return torch.compile(lambda x: x + NUMBER + 1)(ones(mesh))


def an_attribute(mesh):
    return torch.compile(Scaled(dist.get_rank()))(ones(mesh))


def an_argument(mesh):
    return torch.compile(lambda x, n: x * (n + 1), dynamic=False)(ones(mesh), dist.get_rank())


def a_call(mesh):
    return torch.compile(lambda x: x * (dist.get_rank() + 1))(ones(mesh))


def place():
    return dist.get_rank()


def a_call_inside(mesh):
    return torch.compile(lambda x: x * (place() + 1))(ones(mesh))


def a_place_in_a_mesh(mesh):
    return torch.compile(lambda x: x * (mesh.get_local_rank() + 1))(ones(mesh))


def the_environment(mesh):
    os.environ["OF_A_RANK"] = str(dist.get_rank())
    return torch.compile(lambda x: x * (int(os.environ["OF_A_RANK"]) + 1))(ones(mesh))


def under_another_name(mesh):
    return torch.compile(lambda x: x * (who() + 1))(ones(mesh))


class Placed:
    """What Dynamo finds behind an attribute of an object, which it does not guard."""

    @property
    def number(self):
        return who()


def a_property(mesh):
    placed = Placed()
    return torch.compile(lambda x: x * (placed.number + 1))(ones(mesh))


@torch.compiler.assume_constant_result
def assumed_constant():
    return int(open(f"/proc/{os.getpid()}/stat").read() != "") * who()


def a_constant(mesh):
    return torch.compile(lambda x: x * (assumed_constant() + 1))(ones(mesh))


def first(rank, run):
    return shared(rank, lambda mesh: RUNS[run](mesh).to_local()[0, 0].item())


RUNS = {
    f.__name__: f
    for f in (closure, a_global, an_attribute, an_argument, a_call, a_call_inside, a_place_in_a_mesh, the_environment)
}
RUNS |= {f.__name__: f for f in (under_another_name, a_property, a_constant)}


@pytest.mark.parametrize("run", RUNS)
def test_graphs_that_depend_on_the_rank(run, own_caches):
    found = run_ranks(first, 2, run)
    expected = [1.0 + 1, 1.0 + 2] if run in ("closure", "a_global") else [1.0, 2.0]
    assert [value for value, *_ in found] == expected
    assert [len(made.taken) for _, made, _ in found] == [0, 0]


def beside(rank):
    """What depends on the rank is no part of the graph, which is the same on all ranks."""

    def run(mesh):
        out, number = torch.compile(lambda x: (x * 2, who() * 10))(ones(mesh))
        return out.full_tensor().sum().item(), number

    return shared(rank, run)


def test_a_number_beside_the_graph(own_caches):
    found = run_ranks(beside, 2)
    assert [value for value, *_ in found] == [(32.0, 0), (32.0, 10)]
    assert sorted([len(made.taken) for _, made, _ in found]) == [0, 1]


def of_torch(rank):
    """Torch's DTensors put the lengths of this rank's shards into a trace, and nobody notes that."""

    def run(mesh):
        x = torch_tensor.distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [torch_tensor.Replicate()])
        made = torch.compile(lambda x: x.redistribute(placements=[torch_tensor.Shard(0)]).to_local() * 2)
        return made(x).sum().item()

    return shared(rank, run)


def test_dtensors_of_torch_are_not_shared(own_caches):
    found = run_ranks(of_torch, 2)
    assert [value for value, *_ in found] == [30.0, 60.0]
    assert [(made.taken, made.given) for _, made, _ in found] == [([], [])] * 2


def stepped(model, x, compiled):
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    step = torch.compile(optimizer.step) if compiled else optimizer.step
    for _ in range(3):
        model(x).square().mean().backward()
        step()
        optimizer.zero_grad()
    return list(model.parameters())


def stepping(rank):
    """A compiled step of an optimizer, whose parameters Dynamo puts into its graph."""

    def run(mesh):
        torch.manual_seed(0)
        model, x = nn.Linear(8, 8), torch.randn(4, 8)
        expected = stepped(copy.deepcopy(model), x, compiled=False)
        model = dtensor.distribute_model(model, mesh, {"weight": [Shard(0)], "bias": [Shard(0)]})
        return expected, [x.full_tensor() for x in stepped(model, x, compiled=True)]

    return shared(rank, run)


def test_steps_of_optimizers_are_shared(own_caches):
    """And each rank steps with its own shards, which differ."""
    found = run_ranks(stepping, 2)
    for (expected, values), *_ in found:
        torch.testing.assert_close(values, expected)
    (_, first, _), (_, second, _) = found
    assert len(first.taken) + len(second.taken) == len(first.given) + len(second.given) > 0


def test_what_asks_for_the_rank():
    assert asks_for_rank(place.__code__)
    assert asks_for_rank((lambda: [dist.get_rank() for _ in "a"]).__code__)
    assert not asks_for_rank(ones.__code__)


def drawn(rank):
    """Every rank keeps its part of what all draw: which part is a number in the graph."""

    def run(mesh):
        torch.manual_seed(0)
        return torch.compile(lambda x: x + dtensor.randn(4, 4, device_mesh=x.device_mesh, placements=[Shard(0)]))(
            ones(mesh, placement=Shard(0))
        ).full_tensor()

    return shared(rank, run)


def test_what_is_drawn_notes_the_place_of_the_rank(fake_mesh):
    with uneven_noted() as found:
        torch.compile(lambda x: x + dtensor.randn(4, 4, device_mesh=x.device_mesh, placements=[Shard(0)]))(
            ones(fake_mesh(2), placement=Shard(0))
        )
    assert found == {(0, ""): 0}


def test_random_numbers(own_caches):
    (one, *_), (other, *_) = found = run_ranks(drawn, 2)
    assert torch.equal(one, other)
    assert not torch.equal(one[:2], one[2:])
    assert [made.taken for _, made, _ in found] == [[], []]


def within(rank):
    """Shards that are uneven in the middle of a frame, whose input is the same on all ranks: 3, 3, 3 and 1 rows."""

    def run(mesh):
        made = torch.compile(lambda x: (x.redistribute(placements=[Shard(0)]).sin() * 2).sum(1).full_tensor())
        return made(distribute_tensor(torch.arange(40.0).view(10, 4), mesh, [Replicate()]))

    return shared(rank, run)


def given(rank):
    """Shards that are uneven from the start."""

    def run(mesh):
        made = torch.compile(lambda x: (x.sin() * 2).sum(1).full_tensor())
        return made(distribute_tensor(torch.arange(40.0).view(10, 4), mesh, [Shard(0)]))

    return shared(rank, run)


@pytest.mark.parametrize("program", [within, given], ids=["within", "given"])
def test_ranks_with_equal_shards_share(program, own_caches):
    found = run_ranks(program, 4)
    expected = (torch.arange(40.0).view(10, 4).sin() * 2).sum(1)
    for value, made, _ in found:
        torch.testing.assert_close(value, expected)
        assert made.alone == []
    assert sum([compiled for *_, compiled in found]) == 2
    assert found[3][2] == 1  # nobody has shards as short as the last rank's


def packed(rank, path):
    mesh = dtensor.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    package = dtensor.compile.load(path)
    value = rows(mesh)
    package.unload()
    return value, package.taken, package.missed


def rows(mesh):
    made = torch.compile(summed)
    return made(distribute_tensor(torch.arange(40.0).view(10, 4), mesh, [Replicate()]))


def summed(x):
    return (x.redistribute(placements=[Shard(0)]).sin() * 2).sum(1).full_tensor()


def test_a_package_serves_ranks_with_equal_shards(safe_folder, own_caches):
    path = safe_folder / "uneven.package"
    dtensor.compile.package(rows, {"tp": 4}, (), path)
    expected = (torch.arange(40.0).view(10, 4).sin() * 2).sum(1)
    *equal, last = run_ranks(packed, 4, path)
    for value, taken, missed in equal:
        torch.testing.assert_close(value, expected)
        assert (taken, missed) == (["summed"], [])
    torch.testing.assert_close(last[0], expected)
    said = "its shards are uneven: 10 over mesh.tp, of which it was compiled for 3, not for 1; make the package again"
    assert last[1:] == ([], [("summed", said)])


def in_turn(rank):
    """The second size is compiled by the rank that took the first: it knows that there was another one."""

    def run(mesh):
        made, values = torch.compile(lambda x: (x * 2).sum()), []
        for turn, size in enumerate((4, 8, 12)):
            x = distribute_tensor(torch.ones(size, 2), mesh, [Replicate()])
            if turn == rank:
                values.append(made(x).item())
                dist.barrier()
            else:
                dist.barrier()
                values.append(made(x).item())
        return values

    return shared(rank, run)


def test_sizes_that_another_rank_has_seen(own_caches):
    found = run_ranks(in_turn, 2)
    assert [values for values, *_ in found] == [[16.0, 32.0, 48.0]] * 2
    assert [compiled for *_, compiled in found] == [1, 1]  # 12 is served by the graph for any size


def different(rank):
    """Each rank has a program of its own, as the stages of a pipeline do."""

    def run(mesh):
        x = ones(mesh)
        if rank == 0:
            return torch.compile(lambda x: x.sin() + 1)(x).to_local().sum().item()
        return torch.compile(lambda x: x.cos() * 2)(x).to_local().sum().item()

    return shared(rank, run)


def test_nobody_waits_for_another_program(own_caches):
    found = run_ranks(different, 2)
    assert [made.waited for _, made, _ in found] == [0, 0]
    assert [len(made.given) for _, made, _ in found] == [1, 1]


def counted(rank):
    def run(mesh):
        with dtensor.compile.statistics() as found:
            programs.small(mesh, programs.batch(), steps=1)
        return found.graphs, len(found.records), sorted(found.seconds)

    return shared(rank, run)


def test_who_counts_graphs_has_graphs_of_its_own(own_caches):
    for (graphs, records, seconds), made, _ in run_ranks(counted, 2):
        assert (graphs, records) == (1, 2)
        assert "waiting" not in seconds
        assert made == sharing.Shared()


def timed(rank):
    def run(mesh):
        with dtensor.compile.statistics(fresh=False) as found:
            programs.small(mesh, programs.batch(), steps=1)
        report = dtensor.compile.report()
        return found.seconds, [c["op"] for c in report.manifests[-1]["collectives"]]

    return shared(rank, run)


def test_seconds_and_reports_of_a_frame_from_another_rank(own_caches):
    leader, other = sorted(run_ranks(timed, 2), key=lambda x: len(x[1].taken))
    assert set(leader[0][0]) == {"tracing", "passes", "generating code", "compiling kernels", "saving"}
    assert {"waiting", "loading"} <= set(other[0][0]) <= {"tracing", "waiting", "loading"}
    assert leader[0][1] == other[0][1] == ["all_reduce"]


def again(rank):
    return shared(rank, lambda mesh: programs.small(mesh, programs.batch()))


def test_the_next_start_compiles_nothing(own_caches):
    first = run_ranks(again, 2)
    second = run_ranks(again, 2)
    assert [losses for losses, *_ in first] == [losses for losses, *_ in second]
    assert [len(made.kept) for _, made, _ in second] == [1, 1]
    assert [compiled for *_, compiled in second] == [0, 0]


def test_groups_that_have_other_names_on_other_ranks():
    with fake_ranks(4):
        name = dist.new_group([0, 1]).group_name
        code = f"buf1 = torch.ops._c10d_functional.all_reduce.default(buf0, 'sum', '{name}')"
        assert group_of_this_rank([code]) == name
        assert group_of_this_rank([code.replace("torch.ops.", ""), f"x = '{dist.group.WORLD.group_name}'"]) == ""
