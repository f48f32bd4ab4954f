"""DTENSOR_RECORD: programs under torchrun are recorded as they are, eager and compiled, and compute what they would."""

import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest

from dtensor.runs.comparing.report import report
from dtensor.testing import run_ranks
from tests.interpreter import python
from tests.runs.comparing import programs

ROOT = Path(__file__).resolve().parent.parent.parent.parent
PROGRAM = """
import sys

import torch
import torch.distributed as dist
from torch import nn

from dtensor import init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down, self.norm = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(self.down(self.act(self.up(x))))


def trained(mode):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Model()
    parallelize_module(model, mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
    run = torch.compile(model, backend="dtensor", options={"inner": "aot_eager"}) if mode == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        loss = run(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    local = [p.to_local() if hasattr(p, "to_local") else p for p in run.parameters()]
    return f"said {loss.item().hex()} {[x.double().sum().item().hex() for x in local]}"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    said = trained(sys.argv[1])
    if dist.get_rank() == 0:
        print(said)
    dist.destroy_process_group()
"""


def unrecorded(rank, program):
    """What the program would print if nothing recorded it."""
    return runpy.run_path(program)["trained"]("compiled")


def said(program, mode, **variables):
    """What the program prints at its end: the loss and the sums of its parameters, to the last bit."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("DTENSOR_RECORD", "RANK", "WORLD_SIZE"))}
    done = subprocess.run(
        [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program), mode],
        env=environment | {"PYTHONPATH": str(ROOT), "PYTHON_EXEC": python()} | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return re.findall("said .*", done.stdout)


@pytest.mark.nightly
def test_eager_and_compiled_programs(tmp_path):
    """Two steps of three, of which activations are kept."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    told = {"alone": run_ranks(unrecorded, 2, str(program))[:1]}
    for mode in ("eager", "compiled"):
        given = {"DTENSOR_RECORD": str(tmp_path / mode), "DTENSOR_RECORD_STEPS": "2", "DTENSOR_RECORD_VALUES": "*/gelu"}
        told[mode] = said(program, mode, **given)
    assert len(told["alone"]) == 1
    assert told["compiled"] == told["alone"]

    found = programs.compared(tmp_path / "eager", tmp_path / "compiled")
    assert (found.a.world, found.a.steps, found.b.world, found.b.steps) == (2, 2, 2, 2)
    assert "The runs agree" in report(found)
    compared = {(p.b.phase, p.b.op, p.b.module) for p in found.pairs}
    assert {("forward", "gelu", "act"), ("backward", "gelu_backward", "act")} <= compared
    assert ("gradient", "gradient", "up.weight") in compared
    alone = [v for v in (*found.only_a, *found.only_b) if v.phase in ("forward", "backward")]
    assert len(alone) < len(found.pairs) / 10, [str(v) for v in alone]

    gelu, after = [v for v in found.b.values.values() if v.op == "gelu"]
    assert (gelu.module, gelu.step, after.step, str(gelu.spec)) == ("act", 0, 1, "tp: S(1)")
    assert re.fullmatch(r"(program\.py:\d+)?", gelu.line)
    kept = [(run, v.first["v"]) for run in (found.a, found.b) for v in run.values.values() if v.first.get("v")]
    assert len(kept) == 4
    assert all((run.folder / name).exists() for run, name in kept)
