"""Graphs for GPUs and NCCL, compiled without: `python -m tests.cuda.traced tests/cuda/graphs` writes them anew."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
PATIENCE = 300.0


@pytest.mark.parametrize(
    "plans", [pytest.param(("2d",), id="some"), pytest.param((), id="all", marks=pytest.mark.nightly)]
)
@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for CUDA asks the driver for the device")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the device is compiled")
def test_graphs_are_as_written(plans, tmp_path):
    """By day those of one plan: sequence parallelism, fully sharded over another axis."""
    command = [sys.executable, "-m", "tests.cuda.traced", str(tmp_path), *plans]
    done = subprocess.run(command, cwd=HERE.parents[1], timeout=PATIENCE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {p.name: p.read_text() for p in tmp_path.iterdir()}
    written = {p.name: p.read_text() for p in (HERE / "graphs").iterdir() if not plans or p.stem in plans}
    assert found == written
    assert len(found) == (len(plans) or 5)
