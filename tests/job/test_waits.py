"""Who waits in vain, from what ranks publish: circles, ranks that have ended, ranks that take their time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dtensor.job.collective_order import Order, text
from dtensor.job.elastic import state_of, this_process
from dtensor.job.waits import RankState, Waiting, in_vain, missing, mixed_up

SUM, GATHER = "all_reduce(sum) of float32[]", "all_gather(0, 8) of float32[…]"


def eager(ranks, number, what=SUM, group="g", others=None, place="a.py:1"):
    """A rank that waits in the eager collective `number` of a group."""
    groups = {group: (tuple(ranks), number, 0, []), **(others or {})}
    return RankState(
        1, place=place, stuck=9.0, waits=Waiting("eager", what, group, tuple(ranks), number), groups=groups
    )


def computing(ranks=(), number=0, graphs=0, group="g", sums=()):
    return RankState(1, place="b.py:2", groups={group: (tuple(ranks), number, graphs, list(sums))} if ranks else {})


def graph(ranks, graphs, number=0, group="g"):
    return RankState(1, waits=Waiting("graph", "a compiled graph"), groups={group: (tuple(ranks), number, graphs, [])})


def plain(ranks, group="w"):
    return RankState(1, waits=Waiting("torch", "torch.distributed.barrier", group, tuple(ranks)))


ENDED = RankState(ended=True)
ALL = (0, 1, 2)
CASES = [
    ("one computes", [eager((0, 1), 1), computing((0, 1))], []),
    ("one has not come", [eager((0, 1), 1), RankState()], []),
    ("all entered", [eager((0, 1), 1), eager((0, 1), 1)], []),
    ("one has ended", [eager((0, 1), 1), ENDED], [0, 1]),
    ("one had entered and computes on", [eager((0, 1), 1), computing((0, 1), 1)], []),
    ("two groups crosswise", [eager((0, 1), 1, group="a"), eager((0, 1), 1, group="b")], [0, 1]),
    ("a slow third", [eager((0, 1), 1, group="a"), eager((1, 2), 1, group="b"), computing()], []),
    ("a dead third", [eager((0, 1), 1, group="a"), eager((1, 2), 1, group="b"), ENDED], [0, 1, 2]),
    (
        "a circle of three",
        [eager((0, 1), 1, group="a"), eager((1, 2), 1, group="b"), eager((0, 2), 1, group="c")],
        [0, 1, 2],
    ),
    ("a graph against an eager one", [eager((0, 1), 1), graph((0, 1), 1)], [0, 1]),
    ("a graph that both run", [graph((0, 1), 1), graph((0, 1), 1)], []),
    ("a graph before that of a slow one", [graph((0, 1), 2), computing((0, 1), graphs=1)], []),
    ("eager against plain", [eager((0, 1), 1), plain((0, 1))], [0, 1]),
    ("all in a plain one", [plain((0, 1)), plain((0, 1))], []),
    ("plain with a slow one", [plain(ALL), plain(ALL), computing()], []),
    # Rank 1 may have passed what rank 0 waits in, for the slow rank 2.
    ("plain, passed by one", [plain(ALL), eager((0, 1), 1), computing()], []),
    ("plain, and no one goes on", [plain(ALL), eager((0, 1), 1), eager((0, 2), 1, group="h")], [0, 1, 2]),
]


@pytest.mark.parametrize(("states", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_in_vain(states, expected):
    read = [RankState.of(json.loads(json.dumps(state.data()))) for state in states]
    assert in_vain(0, read.__getitem__) == expected


def test_whom_a_rank_waits_for():
    states = [eager(ALL, 2), computing(ALL, 1), computing(ALL, 2)]
    assert missing(0, states[0], states.__getitem__) == [1]


def test_collectives_of_one_number_that_differ():
    said = mixed_up(0, eager((0, 1), 3), 1, eager((0, 1), 3, GATHER, place="c.py:7"))
    assert f"rank 0 waits in {SUM} at a.py:1" in said
    assert f"rank 1 waits in {GATHER} at c.py:7" in said
    assert mixed_up(0, eager((0, 1), 3), 1, eager((0, 1), 4, GATHER)) == ""
    assert mixed_up(0, eager((0, 1), 3), 1, RankState(failures=1)) == ""


def order(*operators):
    made = Order()
    for op in operators:
        made.begin((op, torch.float32, torch.Size([2]), ("sum", "g")))
    made.sum_up()
    return made


def test_checksums_tell_what_was_exchanged_wrongly():
    mine, same, other = (
        order(*["all_reduce"] * 70),
        order(*["all_reduce"] * 67),
        order(*["all_reduce"] * 60, "all_gather", *["all_reduce"] * 9),
    )
    states = [computing((0, 1), o.count, sums=sorted(set(o.checksums.values()))) for o in (mine, same, other)]
    assert mixed_up(0, states[0], 1, states[1]) == ""
    assert "ranks 0 and 1 differ in the first 64 eager collectives" in mixed_up(0, states[0], 1, states[2])
    assert dict(mine.checksums.values())[64] == dict(same.checksums.values())[64]


def test_text_leaves_out_what_uneven_shards_make_different():
    shapes = torch.Size([3]), torch.Size([2])
    gathers = {text(("all_gather", torch.float32, shape, (0, 5, "g"))) for shape in shapes}
    assert gathers == {"all_gather(0, 5) of float32[…]"}
    sums = {text(("all_reduce", torch.float32, shape, ("sum", "g"))) for shape in shapes}
    assert sums == {"all_reduce(sum) of float32[3]", "all_reduce(sum) of float32[2]"}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_state_of_a_process():
    mine = this_process()
    assert state_of(mine) == "running"
    assert state_of("") == state_of(mine.replace("/", "x", 1)) == ""
    assert state_of(f"{mine}1") == "ended"
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    name = f"{mine.split()[0]} {child.pid} {started}"
    try:
        os.kill(child.pid, 19)
        for _ in range(200):
            if state_of(name) == "stopped":
                break
        assert state_of(name) == "stopped"
    finally:
        child.kill()
        child.communicate()
    assert state_of(name) == "ended"
