"""Bisection of a run: with runs that are only told of, and with a program in processes of its own."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from dtensor.compile import Options
from dtensor.compile.bisect import bisect
from dtensor.compile.bisect.runs import RunFailed
from dtensor.passes import REGISTERED
from dtensor.program import environment
from tests.interpreter import python

NAMES = [p.name for p in REGISTERED if not p.required]
ROOT = Path(__file__).parents[3]


class Told:
    """Runs of which it is told by a function of the variables what they compute; 0 is right."""

    def __init__(self, tmp_path, computes):
        self.tmp_path, self.computes, self.given = tmp_path, computes, []

    def run(self, script, arguments, variables):
        assert (script, list(arguments)) == (Path("train.py"), ["--steps", "2"])
        self.given.append(dict(variables))
        folder = self.tmp_path / f"run{len(self.given)}"
        folder.mkdir()
        (folder / "loss").write_text(str(self.computes(variables)))
        return folder

    def differs(self, right, other):
        a, b = ((folder / "loss").read_text() for folder in (right, other))
        return None if a == b else f"the loss is {b} in place of {a}"

    def blame(self):
        out = self.tmp_path / "out"
        return bisect(Path("train.py"), ["--steps", "2"], out, run=self.run, differs=self.differs)


def level(variables):
    """How far a run compiles, and the passes that it runs."""
    off = variables.get("DTENSOR_PASSES") == "0"
    left_out = variables.get("DTENSOR_DISABLE", "").split(",")
    at = variables.get("DTENSOR_COMPILE_LEVEL", "inductor")
    return environment.LEVELS.index(at), [] if off or at in ("eager", "dynamo") else [
        n for n in NAMES if n not in left_out
    ]


def test_nobody(tmp_path):
    told = Told(tmp_path, lambda variables: 0)
    blame = told.blame()
    assert (blame.who, blame.folder, len(told.given)) == ("nobody", None, 2)
    assert told.given[0] == {"DTENSOR_COMPILE_LEVEL": "eager"}
    assert told.given[1] == {"DTENSOR_FINDINGS": str(tmp_path / "out" / "findings")}
    assert str(blame).startswith("Nobody is to blame")


@pytest.mark.parametrize(("who", "first"), [("Dynamo", 1), ("AOTAutograd", 2), ("Inductor", 3)])
def test_the_first_level_that_differs(tmp_path, who, first):
    blame = Told(tmp_path, lambda variables: int(level(variables)[0] >= first)).blame()
    assert (blame.who, blame.rewrite, blame.what) == (who, "", "the loss is 1 in place of 0")
    assert str(blame).startswith(f"To blame: {who}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("least", [2, 3])
def test_the_first_pass_that_differs(tmp_path, name, least):
    """Also where it does so under Inductor only."""
    told = Told(tmp_path, lambda variables: int(level(variables)[0] >= least and name in level(variables)[1]))
    blame = told.blame()
    assert (blame.who, blame.rewrite) == ("pass", name)
    assert f"DTENSOR_DISABLE={name}" in str(blame)
    assert len(told.given) <= 13


def test_what_else_the_program_says(tmp_path):
    told = Told(tmp_path, lambda variables: int("DTENSOR_COMPILE_LEVEL" not in variables))
    assert told.blame().who == "options"


def test_a_run_that_fails_differs(tmp_path):
    def computes(variables):
        if level(variables)[0] >= 2:
            raise RunFailed("rank 1 exited with 1")
        return 0

    blame = Told(tmp_path, computes).blame()
    assert (blame.who, blame.what) == ("AOTAutograd", "the run fails: rank 1 exited with 1")


def test_findings_of_an_earlier_bisection_do_not_count(tmp_path):
    earlier = tmp_path / "out" / "findings" / "rank0" / "000_joint_dead_code"
    earlier.mkdir(parents=True)
    (earlier / "report.txt").write_text("old")
    told = Told(tmp_path, lambda variables: 0)
    assert told.blame().who == "nobody"
    assert told.given[1] == {"DTENSOR_FINDINGS": str(tmp_path / "out" / "findings_1")}


def test_what_the_level_says_of_options(monkeypatch):
    given = Options.of({"inner": "aot_eager", "disable": ["bucket"], "split_batch": 2})
    assert given.at_level() == given
    monkeypatch.setenv("DTENSOR_PASSES", "0")
    assert given.at_level() == given, "without a level, options are what the program says"
    monkeypatch.setenv("DTENSOR_COMPILE_LEVEL", "inductor")
    assert given.at_level() == Options(inner="aot_eager", passes=(), disable=("bucket",), split_batch=2)
    monkeypatch.setenv("DTENSOR_PASSES", "")
    monkeypatch.setenv("DTENSOR_DISABLE", "schedule,lower")
    monkeypatch.setenv("DTENSOR_COMPILE_LEVEL", "dynamo")
    assert given.at_level() == Options(inner="eager", disable=("bucket", "schedule", "lower"), split_batch=2)
    monkeypatch.setenv("DTENSOR_COMPILE_LEVEL", "inducter")
    with pytest.raises(ValueError, match="DTENSOR_COMPILE_LEVEL is 'inducter'; write one of eager, dynamo, aot_eager"):
        given.at_level()


PROGRAM = """
import os, sys
import torch
import dtensor
from dtensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from dtensor.compile import statistics
from dtensor.testing import fake_ranks

seen = []

def own(gm, inputs):
    seen.append("own")
    return gm.forward

def f(x, y):
    return (x.redistribute(placements=[Replicate()]) + y.redistribute(placements=[Replicate()])).relu()

{more}
with fake_ranks(2):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x, y = (DTensor.from_local(torch.arange(8.0).view(2, 4) + k, mesh, [Partial()]) for k in (1, 3))
    with statistics() as s:
        {compiled}
    torch.save(out.to_local(), os.path.join(os.environ["RESULTS"], "out.pt"))
    print(len(s.records), sum([r.rewrites for g in s.records for r in g.passes if r.name != "agree"]), seen)
"""

FAULTY = """
from dtensor.passes import AddBeforeReduce
from tests.compile.bisect.mutants import MUTANTS
AddBeforeReduce.__call__ = type(MUTANTS[0].faulty()).__call__
"""


class Processes:
    """Runs of a program in processes of their own."""

    def __init__(self, tmp_path, compiled, more=""):
        self.tmp_path, self.count, self.said = tmp_path, 0, []
        self.script = tmp_path / "program.py"
        self.script.write_text(PROGRAM.format(compiled=compiled, more=more))

    def run(self, script, arguments, variables):
        self.count += 1
        results = self.tmp_path / f"results{self.count}"
        results.mkdir()
        ours = {"PYTHONPATH": str(ROOT), "RESULTS": str(results), "DTENSOR_LINKS": ""}
        command = [python(), str(script), *arguments]
        done = subprocess.run(
            command, env={**os.environ, **ours, **variables}, capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            raise RunFailed(done.stderr)
        self.said.append(done.stdout.strip())
        return results

    def differs(self, right, other):
        a, b = (torch.load(folder / "out.pt") for folder in (right, other))
        return None if a.equal(b) else f"off by {float((a - b).abs().max())}"


def test_a_program_with_a_faulty_pass(tmp_path):
    compiled = 'out = torch.compile(f, backend="dtensor", options={"inner": "aot_eager"})(x, y)'
    processes = Processes(tmp_path, compiled, FAULTY)
    blame = bisect(processes.script, [], tmp_path / "out", run=processes.run, differs=processes.differs)
    assert (blame.who, blame.rewrite, processes.count) == ("pass", "add_before_reduce", 2)
    assert blame.what == "off by 2.0"
    assert "program.py:" in blame.report
    assert blame.graphs[0].endswith("the pass 'add_before_reduce' goes wrong")
    assert blame.folder == tmp_path / "out" / "findings" / "rank0" / "000_inference_add_before_reduce"
    assert sorted(p.name for p in blame.folder.iterdir()) == [
        *("README.md", "after.txt", "before.txt", "graph.py", "replay.py", "report.txt")
    ]
    assert blame.folder is not None
    assert f"To see it again: python {blame.folder / 'replay.py'}" in str(blame)


OF_BACKENDS = """out = torch.compile(f)(x, y)
        torch.compiler.reset()
        torch.compile(f, backend="dtensor")(x, y)
        torch.compiler.reset()
        torch.compile(f, backend=own)(x, y)"""


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"DTENSOR_COMPILE_LEVEL": "eager"}, "0 0 []"),
        ({"DTENSOR_COMPILE_LEVEL": "dynamo"}, "0 0 []"),
        ({"DTENSOR_COMPILE_LEVEL": "aot_eager", "DTENSOR_PASSES": "0"}, "3 0 []"),
        ({"DTENSOR_COMPILE_LEVEL": "aot_eager", "DTENSOR_PASSES": "lower"}, "3 6 []"),
    ],
    ids=lambda x: str(x),
)
def test_a_level_holds_for_every_backend(tmp_path, variables, said):
    """Plain torch.compile, this library's backend, and one of the program's own."""
    processes = Processes(tmp_path, OF_BACKENDS)
    processes.run(processes.script, [], variables)
    assert processes.said == [said]
