"""The agreement as one rank goes through it: the others are what stands in the store, and time is told by hand."""

import contextlib
import hashlib
import itertools
import json
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dtensor import AgreementError
from dtensor.comm import agreement
from dtensor.comm.agreement import agree, dumps
from dtensor.job.collective_order import mark
from dtensor.job.groups import calls_on
from dtensor.testing import fake_ranks

SUM = ("all_reduce sum of float32[4]", "a.py:1")
MAX = ("all_reduce max of float32[4]", "a.py:2")
OPEN = ("all_reduce sum of float32[?]", "b.py:7")
ELSEWHERE = ("all_reduce sum of float32[4]", "c.py:9")
PREFIX = "dtensor/agreement/0,1"


class Here:
    """This rank's job, of two ranks in one store."""

    def __init__(self, rank=0):
        self.store, self.rank, self.failures, self.news = dist.HashStore(), rank, 0, ""
        self.gone, self.checks, self.asked, self.is_waiting = {}, 0, [], False

    def check(self):
        self.checks += 1
        if self.news == "other":
            raise AgreementError("another rank's failure")

    def failing(self, said):
        self.failures += 1
        return AgreementError(said)

    @contextlib.contextmanager
    def waiting(self):
        self.is_waiting = True
        yield
        self.is_waiting = False

    def absent(self, rank):
        self.asked.append((rank, round(self.clock.now, 1)))
        return self.gone.get(rank, "")

    # What the other ranks do.

    def arrived(self, entries, failures=0):
        digest = hashlib.sha256(json.dumps([what for what, _ in entries]).encode()).hexdigest()
        return f"{PREFIX}/{failures}/{digest}"

    def told(self, rank, index, entries, failures=0):
        self.store.set(f"{PREFIX}/{rank}/{index}", json.dumps([failures, entries]))
        self.store.add(self.arrived(entries, failures), 1)

    def confirmed(self, rank, index, entries, failures=0):
        self.store.set(f"{PREFIX}/{rank}/{index}/confirmed", "")
        self.store.add(f"{self.arrived(entries, failures)}/confirmed", 1)

    def agrees(self, rank, index, entries, failures=0):
        self.told(rank, index, entries, failures)
        self.confirmed(rank, index, entries, failures)

    def heard_of(self, index, rank=0):
        """What this rank told at `index`; None if nothing."""
        key = f"{PREFIX}/{rank}/{index}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None


class Clock:
    """Time that passes only in sleeps; `at` maps a time to what happens then."""

    def __init__(self):
        self.now, self.sleeps, self.at = 100.0, [], {}

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.sleeps.append(seconds)
        self.now += seconds
        for time in [time for time in self.at if time <= self.now]:
            self.at.pop(time)()


@pytest.fixture
def here(monkeypatch):
    found = Here()
    found.clock = Clock()
    monkeypatch.setattr(agreement, "job", lambda: found)
    monkeypatch.setattr(agreement, "time", found.clock)
    monkeypatch.setattr(agreement, "default_group_timeout", lambda: timedelta(seconds=10))
    monkeypatch.setattr(agreement, "_state", agreement._State())
    with fake_ranks(2):
        yield found


def run(*entries, group=None, untagged=(), alike=(), said=""):
    """This rank's graph with these collectives begins."""
    name = group or dist.group.WORLD.group_name
    agree(torch.zeros(1), dumps({name: list(entries)}, untagged), list(alike), said)


def calls():
    return calls_on(dist.group.WORLD)


def test_the_text_says_of_each_group_its_collectives_and_whether_its_first_is_tagged():
    text = dumps({"0": [SUM], "5": [MAX, SUM]}, ["5"])
    assert json.loads(text) == {"0": [False, [list(SUM)]], "5": [True, [list(MAX), list(SUM)]]}


def test_ranks_that_told_and_confirmed_the_same_go_on_at_once(here):
    here.agrees(1, 0, [SUM, MAX])
    run(SUM, MAX)
    assert here.heard_of(0) == [0, [list(SUM), list(MAX)]]
    assert here.store.add(here.arrived([SUM, MAX]), 0) == 2
    assert here.store.check([f"{PREFIX}/0/0/confirmed"])
    assert here.store.add(f"{here.arrived([SUM, MAX])}/confirmed", 0) == 2
    assert here.clock.sleeps == []
    assert not here.is_waiting
    assert (calls().count, list(calls().last), calls().mark) == (1, [SUM, MAX], mark([SUM, MAX]))


def test_what_was_agreed_is_told_once(here):
    here.agrees(1, 0, [SUM])
    run(SUM)
    run(SUM)
    assert here.heard_of(1) is None
    assert calls().count == 2
    run(ELSEWHERE)  # another text, alike collectives
    assert here.heard_of(1) is None
    assert calls().count == 3
    assert list(calls().last) == [ELSEWHERE]
    here.agrees(1, 1, [MAX])
    run(MAX)
    assert here.heard_of(1) == [0, [list(MAX)]]
    assert calls().mark == mark([MAX])
    run(SUM)
    assert here.heard_of(2) is None
    assert calls().mark == mark([SUM])


def test_sizes_that_one_rank_leaves_open_are_any(here):
    """The digests differ, so it is the other's list that says that it has come, and that it has confirmed."""
    here.agrees(1, 0, [OPEN])
    run(SUM)
    assert here.store.add(here.arrived([SUM]), 0) == 1
    assert list(calls().last) == [SUM]


def test_a_rank_that_never_had_such_a_sequence_and_this_one_do_not_go_on(here):
    here.told(1, 0, [SUM, MAX])
    with pytest.raises(AgreementError) as raised:
        run(SUM)
    assert str(raised.value).splitlines()[1:3] == [
        "  rank 0, collective 1 of 1: none",
        "  rank 1, collective 1 of 2: all_reduce max of float32[4], from a.py:2",
    ]
    assert here.failures == 1
    assert here.clock.now == 100.0
    assert calls().mark == 0  # it did not go on


def test_of_several_sequences_the_one_that_this_rank_never_had_is_said(here):
    here.agrees(1, 0, [SUM])
    run(SUM)
    here.told(1, 1, [MAX, MAX])
    with pytest.raises(AgreementError, match="rank 1, collective 0 of 2: all_reduce max"):
        run(SUM, SUM)


def test_a_rank_that_runs_what_this_one_ran_before_is_waited_for_until_time_is_up(here):
    here.agrees(1, 0, [SUM])
    run(SUM)
    with pytest.raises(AgreementError) as raised:
        run(MAX, SUM)
    assert str(raised.value) == (
        "rank 0 is about to run a compiled graph with 2 collectives on ranks [0, 1], the first "
        "all_reduce max of float32[4], from a.py:2; ranks [1] did not reach a matching graph "
        "within 10 s. They hang or took another path in the program"
    )
    assert here.failures == 1
    assert 110 < here.clock.now < 110.1
    assert here.checks == len(here.clock.sleeps) + 1


def test_pauses_double_to_the_longest_and_the_missing_are_looked_at_each_second(here):
    with pytest.raises(AgreementError, match="did not reach a matching graph"):
        run(SUM)
    assert here.clock.sleeps[:8] == pytest.approx([0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.05, 0.05])
    assert set(here.clock.sleeps[6:]) == {0.05}
    assert [rank for rank, _ in here.asked] == [1] * 9
    times = [at for _, at in here.asked]
    assert times[0] == pytest.approx(101, abs=0.11)
    assert all(1 <= round(b - a, 1) <= 1.1 for a, b in itertools.pairwise(times))


def test_a_rank_that_is_gone_is_not_waited_for(here):
    here.gone[1] = "rank 1 has left the program"
    with pytest.raises(AgreementError, match=r"from a\.py:1; rank 1 has left the program$"):
        run(SUM)
    assert 101 < here.clock.now < 101.1
    assert here.failures == 1


def test_a_rank_that_comes_late_is_waited_for(here):
    heard = []
    here.clock.at = {
        103.9: lambda: heard.append(here.store.check([f"{PREFIX}/0/0/confirmed"])),
        104.0: lambda: here.told(1, 0, [OPEN]),
        104.2: lambda: heard.append(here.store.check([f"{PREFIX}/0/0/confirmed"])),
        107.0: lambda: here.confirmed(1, 0, [OPEN]),
    }
    run(SUM)
    assert heard == [False, True]
    assert 107 <= here.clock.now < 107.1
    assert here.asked
    assert calls().count == 1


def test_without_the_others_word_that_they_heard_too_nobody_goes_on(here):
    here.told(1, 0, [SUM])
    with pytest.raises(AgreementError, match=r"ranks \[1\] did not reach a matching graph"):
        run(SUM)
    assert here.store.check([f"{PREFIX}/0/0/confirmed"])
    here.failures = 0
    here.confirmed(1, 0, [SUM])
    run(SUM)  # it was not taken for agreed, and is told again
    assert here.heard_of(1) == [0, [list(SUM)]]


def test_sequences_of_before_a_failure_count_only_if_they_were_confirmed(here):
    here.failures = 1
    here.told(1, 0, [SUM, SUM])  # before the failure: no reason to raise
    here.told(1, 1, [SUM])
    with pytest.raises(AgreementError, match="did not reach a matching graph"):
        run(SUM)
    assert here.heard_of(0) == [1, [list(SUM)]]
    assert not here.store.check([f"{PREFIX}/0/0/confirmed"])
    here.failures = 1
    here.confirmed(1, 1, [SUM])
    run(SUM)
    assert calls().last == [SUM]


def test_sequences_of_after_a_failure_that_this_rank_has_yet_to_raise_do_not_count(here):
    here.told(1, 0, [MAX], failures=1)  # no reason to say that the graphs differ
    here.told(1, 1, [SUM], failures=1)
    with pytest.raises(AgreementError, match="did not reach a matching graph"):
        run(SUM)
    assert not here.store.check([f"{PREFIX}/0/0/confirmed"])


def test_what_was_told_after_as_many_failures_is_counted_with_it(here):
    here.failures = 3
    here.agrees(1, 0, [SUM], failures=3)
    run(SUM)
    assert here.heard_of(0) == [3, [list(SUM)]]
    assert here.store.add(here.arrived([SUM], 3), 0) == 2


def test_a_group_of_one_rank_has_nobody_to_tell(here):
    alone = dist.new_group([0])
    run(SUM, group=alone.group_name)
    assert not here.store.check(["dtensor/agreement/0/0/0"])
    assert calls_on(alone).count == 1
    assert calls_on(alone).mark == mark([SUM])


def test_all_groups_are_told_before_any_is_waited_for(here):
    with fake_groups() as (one, other):
        here.clock.at = {105.0: lambda: here.told(1, 0, [SUM])}
        with pytest.raises(AgreementError):
            agree(torch.zeros(1), dumps({one: [SUM], other: [MAX]}), [], "")
        assert here.heard_of(0) is not None
        assert here.heard_of(1) == [0, [list(MAX)]]


@contextlib.contextmanager
def fake_groups():
    """Names of two groups of the same ranks."""
    group = dist.new_group([0, 1])
    yield dist.group.WORLD.group_name, group.group_name


def test_nothing_is_done_without_a_job_or_where_it_is_switched_off(here, monkeypatch):
    monkeypatch.setenv("DTENSOR_AGREEMENT", "0")
    run(SUM)
    assert calls().count == 0
    monkeypatch.delenv("DTENSOR_AGREEMENT")
    monkeypatch.setattr(agreement, "job", lambda: None)
    run(SUM)
    assert calls().count == 0
    assert here.heard_of(0) is None


def test_another_job_has_agreed_on_nothing(here, monkeypatch):
    here.agrees(1, 0, [SUM])
    run(SUM)
    later = Here()
    later.clock = here.clock
    monkeypatch.setattr(agreement, "job", lambda: later)
    later.agrees(1, 0, [SUM])
    run(SUM)
    assert later.heard_of(0) == [0, [list(SUM)]]


def test_news_of_a_failure_are_raised_before_anything_runs(here):
    here.agrees(1, 0, [SUM])
    run(SUM)
    assert here.checks == 0
    here.news = "other"
    with pytest.raises(AgreementError, match="another rank's failure"):
        run(SUM)
    assert calls().count == 1


def test_ranks_meet_where_the_first_collective_would_be_taken_for_another(here, monkeypatch):
    met = []
    monkeypatch.setattr(agreement, "meet", lambda group: met.append((group, calls().mark)))
    name = dist.group.WORLD.group_name
    here.agrees(1, 0, [SUM])
    run(SUM, untagged=[name])
    assert met == []  # this group is none of gloo's
    calls().over_gloo = True
    run(SUM)
    run(ELSEWHERE)
    assert met == []
    run(ELSEWHERE, untagged=[name])
    run(ELSEWHERE, untagged=[name])
    assert met == [(dist.group.WORLD, mark([SUM]))] * 2
    alone = dist.new_group([0])
    calls_on(alone).over_gloo = True
    run(SUM, group=alone.group_name, untagged=[alone.group_name])
    assert len(met) == 2


def test_inputs_are_looked_at_the_first_time_and_one_in_so_many_calls(here, monkeypatch):
    looks, heard = [], []

    class Look:
        def __init__(self, job, calls, place, given):
            assert job is here
            self.seen = calls.name, place, [(said, x.tolist()) for said, x in given]

        def tell(self):
            looks.append((self.seen, here.heard_of(0) is not None))

        def hear(self):
            heard.append((self.seen, here.store.check([f"{PREFIX}/0/0/confirmed"])))

    monkeypatch.setattr(agreement, "Look", Look)
    monkeypatch.setattr(agreement, "EVERY", 3)
    name = dist.group.WORLD.group_name
    said = json.dumps(["graph", [["x", [name]], ["y", ["no such group"]]]])
    xs = [torch.tensor([1.0]), torch.tensor([2.0])]
    here.agrees(1, 0, [SUM])
    for _ in range(7):
        run(SUM, alike=xs, said=said)
    seen = [(name, str(count), [("x", [1.0])]) for count in (1, 3, 6)]
    # Told before this rank told its collectives, and heard after all had confirmed.
    assert looks == list(zip(seen, (False, True, True)))
    assert heard == [(s, True) for s in seen]
    assert calls().looked == 6
    run(SUM, alike=xs, said=json.dumps(["other graph", [["z", [name]], ["y", [name]]]]))
    assert looks[-1][0] == (name, "8", [("z", [1.0]), ("y", [2.0])])
    elsewhere = json.dumps(["third graph", [["x", ["no such group"]]]])
    run(SUM, alike=xs[:1], said=elsewhere)
    assert len(looks) == 4  # nothing of it is alike over this group
    with pytest.raises(ValueError, match="zip"):
        run(SUM, alike=xs, said=elsewhere.replace("third", "fourth"))


def test_no_look_while_a_cuda_graph_is_captured(here, monkeypatch):
    looks = []
    monkeypatch.setattr(agreement, "Look", lambda *args: looks.append(args))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on_gpu = SimpleNamespace(is_cuda=True)
    runs = [agreement._run(dist.group.WORLD.group_name, False, [list(SUM)])]
    said = json.dumps(["graph", [["x", [dist.group.WORLD.group_name]], ["y", []]]])
    assert agreement._looks(here, runs, [on_gpu, torch.ones(1)], said) == []
    on_gpu.is_cuda = False
    assert len(agreement._looks(here, runs, [on_gpu, torch.ones(1)], said)) == len(looks) == 1
