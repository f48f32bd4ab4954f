"""What the report says of the lines of the program."""

import torch

import dtensor
from dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.runs.comparing.comparison import compare
from dtensor.runs.comparing.report import report
from dtensor.runs.comparing.values import load
from dtensor.testing import run_threads


def line_of(text):
    """The line of this file with a remark."""
    with open(__file__, encoding="utf-8") as file:
        (number,) = [n for n, line in enumerate(file, 1) if line.rstrip().endswith(f"# {text}")]
    return f"test_report.py:{number}"


def test_what_lies_between_has_its_line(tmp_path):
    data = torch.linspace(1, 2, 32).view(8, 4)

    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(data, mesh, [Shard(0)])
        with dtensor.record(tmp_path / "two"):
            y = x.exp()
            whole = y.redistribute(placements=[Replicate()])  # gathers
            whole.mul(2.5)  # doubles

    with dtensor.record(tmp_path / "one"):
        data.exp().mul(2.0)
    run_threads(on_rank, 2)
    text = report(compare(load(tmp_path / "one"), load(tmp_path / "two")))
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "mul (forward, float32[8, 4]), step 0" in text
    assert lines["line"].endswith(line_of("doubles"))
    assert lines["between"].endswith(f"redistribute S(0)->R (forward, float32[8, 4]) {line_of('gathers')}"), text
