"""`dtensor plan`: a plan for a mesh that is not there, printed, and written to files."""

import pytest
from click.testing import CliRunner

from dtensor import Plan
from dtensor.tools.cli import main

SCRIPT = """
import torch
from torch import nn

def example():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.empty(64, 64)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(SCRIPT)
    return path


def called(*words):
    done = CliRunner().invoke(main, ["plan", *map(str, words)])
    return done.output, done.exit_code


def test_a_plan_is_printed_and_written(script, tmp_path):
    said, code = called(
        "--mesh", "dp=2,tp=2", "--out", tmp_path / "plan.json", "--page", tmp_path / "plan.html", script
    )
    assert code == 0, said
    assert "A step is expected to take" in said
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.mesh == {"dp": 2, "tp": 2}
    assert str(plan) in said
    assert "Sequential on dp=2, tp=2" in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize("option", ["--out", "--page"])
def test_a_file_that_cannot_be_written_is_named(script, tmp_path, option):
    said, code = called("--mesh", "dp=2", option, tmp_path / "absent" / "file", script)
    assert code == 2
    assert "cannot be written: No such file or directory" in " ".join(said.split())


def test_too_little_memory_is_said(script):
    said, code = called("--mesh", "dp=2", "--memory", "1kB", script)
    assert code == 1
    assert "no plan found fits into 1,000 bytes" in said


def test_gradients_may_be_sent_in_a_narrower_dtype(script):
    script.write_text(SCRIPT.replace("64, 64)", "1 << 20, 64)"))  # so many rows that they are worth cutting
    without, code = called("--mesh", "dp=2", script)
    assert code == 0, without
    said, code = called("--mesh", "dp=2", "--gradients", "bfloat16", script)
    assert code == 0, said
    assert "gradients  sent as bfloat16" in said
    assert "sent as" not in without
