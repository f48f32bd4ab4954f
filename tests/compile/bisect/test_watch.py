"""The graphs of a program are examined as they are compiled."""

import pytest
import torch

from dtensor import Partial, Replicate, Shard, distribute_tensor
from dtensor.compile.backends import run_passes
from dtensor.compile.bisect.watching import _Watch
from dtensor.passes import AddBeforeReduce
from tests.compile.bisect.mutants import MUTANTS

FAULTY = MUTANTS[0]
R, S0 = Replicate(), Shard(0)


@pytest.fixture
def watched(tmp_path, monkeypatch):
    monkeypatch.setattr(run_passes, "WATCHERS", [_Watch(tmp_path)])
    return tmp_path / "rank0"


def both(x, y):
    return (x.redistribute(placements=[R]) + y.redistribute(placements=[R])).relu().sum()


def test_graphs_of_a_program(fake_mesh, watched, monkeypatch):
    mesh = fake_mesh(2, names=("tp",))
    monkeypatch.setattr(AddBeforeReduce, "__call__", type(FAULTY.faulty()).__call__)
    x, y = (distribute_tensor(torch.ones(4, 4), mesh, [Partial()]).requires_grad_() for _ in range(2))
    for dynamic in (False, True):
        torch.compiler.reset()
        torch.compile(both, backend="dtensor", options={"inner": "aot_eager"}, dynamic=dynamic)(x, y).backward()
    assert sorted(p.name for p in watched.iterdir()) == ["000_joint_add_before_reduce", "graphs.txt"]
    lines = (watched / "graphs.txt").read_text().splitlines()
    assert [line.split(" graph")[0] for line in lines] == ["joint", "joint", "forward"] * 2
    assert [line.split(": ")[1] for line in lines] == [
        *("the pass 'add_before_reduce' goes wrong", *["nothing is wrong on 2 simulated ranks"] * 2) * 2
    ]
    report = (watched / "000_joint_add_before_reduce" / "report.txt").read_text()
    assert "From test_watch.py:" in report
    assert "'sum', tp)" in report


def test_graphs_that_cannot_be_examined_are_listed(fake_mesh, watched):
    mesh = fake_mesh(2, names=("tp",))
    x = distribute_tensor(torch.ones(5, 4), mesh, [S0])
    torch.compile(lambda x: x.redistribute(placements=[R]) + 1, backend="dtensor", options={"inner": "aot_eager"})(x)
    said = (watched / "graphs.txt").read_text()
    assert ": not examined: %all_gather" in said
    assert "uneven shards" in said


def test_a_search_that_fails_stops_nothing(fake_mesh, watched, monkeypatch):
    def fails(*args, **options):
        raise KeyError("what")

    monkeypatch.setattr("dtensor.compile.bisect.watching.examine", fails)
    x = distribute_tensor(torch.ones(4, 4), fake_mesh(2), [S0])
    torch.compile(lambda x: x.redistribute(placements=[R]) + 1, backend="dtensor", options={"inner": "aot_eager"})(x)
    assert ": not examined: the search fails: KeyError: 'what'" in (watched / "graphs.txt").read_text()
