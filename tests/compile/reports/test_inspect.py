"""`dtensor inspect` and `dtensor check`, as a user runs them: on programs that know nothing of this library."""

import os
import re
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch.distributed as dist
from click.testing import CliRunner

import dtensor
from dtensor.compile.recording.imagined import imagined
from dtensor.compile.reports.inspection import clear, inspect
from dtensor.compile.reports.reading import read
from dtensor.tools.cli import main
from tests.interpreter import python

FOREIGN = """
    import sys
    import torch, torch.distributed as dist
    import torch.distributed._functional_collectives as funcol
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            h = self.b(self.a(x).relu())
            print("a graph break")
            return funcol.all_reduce(h * 2, "sum", (mesh, 1))

    net = parallelize_module(Net(), mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
    run = torch.compile(net, backend=sys.argv[1])
    run(torch.ones(8, 16)).sum().backward()
    if "planted" in sys.argv:
        gathers = torch.compile(lambda x: funcol.all_gather_tensor(x, 0, (mesh, 1)) + 1, backend=sys.argv[1])
        gathers(torch.ones(4, 2))
    dist.destroy_process_group()
"""


def called(*arguments, **environment):
    """What the command prints, and its exit code."""
    run = [python(), "-m", "dtensor", *map(str, arguments)]
    done = subprocess.run(run, capture_output=True, text=True, env=os.environ | environment)
    return done.stdout + done.stderr, done.returncode


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "foreign.py"
    path.write_text(textwrap.dedent(FOREIGN))
    return path


def test_inspect_and_check_a_program_that_knows_nothing_of_this_library(script, tmp_path):
    """On a mesh that is not there; a graph break; a planted gather fails the check and is named."""
    out, planted, lock = tmp_path / "out", tmp_path / "planted", tmp_path / "manifest.lock"
    said, code = called("inspect", "--mesh", "dp=4,tp=8", "-o", planted, script, "aot_eager", "planted")
    assert code == 0, said
    assert "1 rank, 3 compiled frames, 1 graph break, 0 of the frames recompiled" in said
    assert "exposed: all_reduce over tp in forward, 896 bytes" in said
    assert re.search(r"requested at .*foreign.py:\d+ in b: h = self.b\(self.a\(x\).relu\(\)\)", said)
    assert "On dp=4 x tp=8 one step takes about" in said
    assert (planted / "index.html").exists()
    shutil.copytree(planted, out, ignore=shutil.ignore_patterns("002_*"))  # the dump without the gather
    first, second = read(out)
    (c,) = first.manifest["collectives"]
    assert (c["op"], c["how"], len(c["ranks"]), c["shapes"], c["code"]) == (
        "all_reduce",
        "explicit",
        8,
        [[8, 16]],
        "h = self.b(self.a(x).relu())",
    )
    assert [c["direction"] for c in second.manifest["collectives"]] == ["forward", "backward"]
    assert 'print("a graph break")' in (first.folder / "graph_breaks.txt").read_text()

    runner = CliRunner()
    assert runner.invoke(main, ["check", "--write", "--dump", str(out), str(lock)]).exit_code == 0
    done = runner.invoke(main, ["check", "--dump", str(out), str(lock)])
    assert (done.exit_code, done.output) == (0, f"Nothing is sent that is not in {lock}.\n")
    done = runner.invoke(main, ["check", "--dump", str(planted), str(lock)])
    assert done.exit_code == 1
    assert "MORE than in the lock: inference all_gather over tp, float32 [[4, 2]], 224 bytes" in done.output
    assert "foreign.py:" in done.output
    assert "funcol.all_gather_tensor(x, 0, (mesh, 1)) + 1" in done.output
    done = runner.invoke(main, ["diff", str(out), str(planted)])
    assert done.exit_code == 1
    assert f"only in {planted}: rank0/002_lambda" in done.output
    assert runner.invoke(main, ["diff", str(out), str(out)]).exit_code == 0
    assert "1 rank, 2 compiled frames" in runner.invoke(main, ["report", str(out)]).output


def test_a_program_that_fails_fails(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import sys; sys.exit(3)")
    with pytest.raises(SystemExit):
        inspect(script, (), tmp_path / "out")
    assert sys.argv[0] != str(script)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "--mesh", "dp", "{script}"], "does not give sizes to axes; write, for example, dp=128,tp=8"),
        (
            ["inspect", "--mesh", "dp=2", "--nproc", "2", "{script}"],
            "--nproc starts processes, so it cannot be used",
        ),
        (["inspect", "-o", "{folder}", "{script}"], "holds notes.txt, which is not part of a dump; write another"),
        (["check", "{folder}/lock"], "give a SCRIPT to run, or --dump FOLDER"),
        (["diff", "{folder}/a", "{folder}/b"], "there is no"),
        (["report", "{folder}"], "holds no dump; write one with `dtensor inspect SCRIPT`"),
    ],
)
def test_wrong_arguments(script, tmp_path, arguments, message):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    done = CliRunner().invoke(main, [a.format(script=script, folder=folder) for a in arguments])
    assert done.exit_code in (1, 2)
    assert message in " ".join(done.output.replace("│", " ").split())
    assert (folder / "notes.txt").read_text() == "mine"


def test_axes_of_an_imagined_mesh(monkeypatch):
    """Axes that are named get their sizes, others stay; everything is as it was afterwards."""
    before = (dist.init_process_group, dist.device_mesh.init_device_mesh, dict(os.environ))
    with imagined({"tp": 4, "dp": 2}):
        dist.init_process_group("nccl")
        try:
            assert (dist.get_world_size(), os.environ["WORLD_SIZE"]) == (8, "8")
            mesh = dtensor.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
            assert tuple(mesh.shape) == (2, 4)
            with pytest.raises(ValueError, match=r"the program makes a mesh .*; write mesh_dim_names"):
                dtensor.init_device_mesh("cpu", (8,))
        finally:
            dist.destroy_process_group()
    assert before == (dist.init_process_group, dist.device_mesh.init_device_mesh, dict(os.environ))


def test_clearing_leaves_other_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("rank0", "rank1", "rank2"):
        (tmp_path / name / "000_f").mkdir(parents=True)
    (tmp_path / "index.html").write_text("old")
    clear(tmp_path, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index.html", "rank0", "rank2"]
    clear(tmp_path, 0)
    assert [p.name for p in tmp_path.iterdir()] == []
