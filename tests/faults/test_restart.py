"""Workers, launchers and hosts of a job under torchrun are killed at random moments: it goes on from the newest
checkpoint, and its loss curve is that of a job that nothing has interrupted."""

import random

import pytest

from tests.faults.hosts import HERE, no_hosts, processes_in, two_hosts
from tests.faults.launched import Launched

LONG = 60.0
"""Seconds that a job may take from a kill to its next step, all of its ranks being started again."""

STARTED = 240.0
"""Seconds in which a job takes its first steps on a machine that does much else."""


def undisturbed(hosts, folder, **how):
    """The curve of a job, and the seconds it took."""
    with Launched(hosts, folder, **how) as job:
        took = job.finish(200)
    return job.curve(), took


def goes_on_from_the_newest(job):
    """No round of the job has lost more than the steps since the checkpoint that was complete at the kill."""
    for one in job.rounds[1:]:
        reached = max((step for step, _ in job.losses[: one.losses]), default=0)
        assert one.after >= (reached - 1) // job.every * job.every, (one, reached)


def disturb(job, kills, spread, rng):
    """Kill something after a random time of up to `spread` seconds since all ranks were started, `kills` times."""
    while len(job.kills) < kills:
        job.until(lambda: job.all_run() or job.is_done, 100)
        job.go_on(rng.uniform(0, spread))
        if job.is_done:
            return
        if job.all_run():
            what = rng.choices(("worker", "agent", "node"), (4, 1, 1))[0] if len(job.hosts) > 1 else "worker"
            job.kill(what, rng.choice(job.hosts), rng.randrange(job.each))


@pytest.fixture(scope="module")
def orphaned(tmp_path_factory):
    """A job that nothing disturbs for eight steps, after which torchrun is killed and its ranks have ended: its curve
    and what was written to stderr."""
    how = {"each": 2, "nodes": "1", "steps": 10_000, "every": 3}
    folder = tmp_path_factory.mktemp("orphaned") / "job"
    with Launched([HERE], folder, **how) as job:
        job.until(lambda: job.step >= 8, STARTED)
        job.away.add(HERE)
        job.kill("agent", HERE)
        job.until(lambda: job.kills[0].gone, 10)
    return {step: losses for step, losses in job.curve().items() if step <= 8}, (folder / "errors").read_text()


@pytest.mark.nightly
def test_a_killed_rank_is_started_again(orphaned, tmp_path):
    """On one host, in the fourth step, with torchrun as it is by default."""
    how = {"each": 2, "nodes": "1", "steps": 8, "every": 3, "options": ["--pause", "0.05"]}
    wanted, _ = orphaned
    with Launched([HERE], tmp_path / "disturbed", forked=True, **how) as job:
        job.until(lambda: job.step >= 4, STARTED)
        job.kill("worker", HERE, 1)
        job.finish(LONG)
    assert [r.after for r in job.rounds] == [0, 3]
    assert (tmp_path / "disturbed" / "errors").read_text().count("failed (exitcode") == 1  # the first restart succeeds
    assert job.curve() == wanted
    assert sorted(wanted) == list(range(1, 9))


def test_ranks_end_with_their_launcher(orphaned):
    """torchrun is killed: its ranks end by themselves, and so write to no checkpoint of the job that comes next."""
    _, errors = orphaned
    assert "torchrun, which started it, is gone" in errors


needs_hosts = pytest.mark.skipif(bool(no_hosts()), reason=no_hosts())


@needs_hosts
@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_thirty_kills(tmp_path, capsys):
    """Four ranks on two hosts, eager and compiled in turns."""
    rng, kills, jobs, lost = random.Random(0), [], 0, 0.0
    how = {"each": 2, "nodes": "2", "steps": 120, "every": 10}
    with two_hosts() as hosts:
        wanted = {}
        for options in ((), ("--compile",)):
            wanted[options] = undisturbed(hosts, tmp_path / f"undisturbed{len(options)}", options=options, **how)
        while len(kills) < 30:
            options = ("--compile",) if jobs % 2 else ()
            curve, took = wanted[options]
            with Launched(hosts, tmp_path / f"job-{jobs}", options=options, **how) as job:
                disturb(job, min(8, 30 - len(kills)), took / 2, rng)
                lost += job.finish(2 * took + LONG) - took
            with capsys.disabled():
                print("\n" + told(job, took))
            assert job.curve() == curve
            goes_on_from_the_newest(job)
            kills, jobs = kills + job.kills, jobs + 1
        assert [processes_in(host.namespace) for host in hosts] == [[], []]
    with capsys.disabled():
        print(f"{len(kills)} kills in {jobs} jobs; {lost / len(kills):.1f} s lost for each")
    assert lost / len(kills) < LONG


@needs_hosts
@pytest.mark.nightly
def test_a_host_is_lost_and_comes_back(tmp_path):
    """The job goes on with the two ranks that are left, and again with four when there are two hosts again."""
    how = {"each": 2, "nodes": "1:2", "steps": 200, "every": 10, "options": ["--pause", "0.1"]}
    with two_hosts() as hosts:
        wanted, _ = undisturbed(hosts, tmp_path / "undisturbed", **{**how, "nodes": "2", "options": []})
        with Launched(hosts, tmp_path / "disturbed", **how) as job:
            job.until(lambda: job.step >= 25, 100)
            job.away.add(hosts[1])
            job.kill("node", hosts[1])
            job.until(lambda: job.rounds[-1].ranks == 2 and job.step >= 45, 100)
            job.away.clear()
            job.until(lambda: job.rounds[-1].ranks == 4, 100)
            job.finish(100)
    goes_on_from_the_newest(job)
    assert {r.ranks for r in job.rounds} == {2, 4}
    for step, losses in job.curve().items():
        for loss in losses:
            assert float(loss) == pytest.approx(float(*wanted[step]), abs=1e-4), step


def told(job, took):
    """What was killed in a job, and what it cost."""
    lines = [f"{' '.join(job.options) or 'eager'}: {took:.1f} s undisturbed, {job.seen - job.began:.1f} s now"]
    for k in job.kills:
        begun = next((r for r in job.rounds if r.at > k.at), None)
        up = f"up after {begun.at - k.at:.1f} s from step {begun.after}" if begun else "done"
        lines.append(f"  {k.what} in {k.phase} after step {k.step}: the others ended in {k.gone - k.at:.1f} s; {up}")
    return "\n".join(lines)
