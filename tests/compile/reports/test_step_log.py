"""The log of steps: each number is what it says, and is written where it was asked to go."""

import pytest
import torch
from torch import nn

from dtensor import init_device_mesh
from dtensor.compile import StepLog, report
from dtensor.compile.recording import frames
from dtensor.compile.reports import step_log
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dtensor.testing import with_ranks


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Scalars:
    def __init__(self):
        self.seen = []

    def add_scalar(self, tag, scalar_value, global_step):
        self.seen.append((tag, scalar_value, global_step))


class Dicts:
    def __init__(self):
        self.seen = []

    def log(self, data, step):
        self.seen.append((data, step))


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by a quarter of a second each time it is read, and 1 GB of memory."""
    now = [0.0]

    def read():
        now[0] += 0.25
        return now[0]

    monkeypatch.setattr(step_log.time, "perf_counter", read)
    monkeypatch.setattr(step_log, "memory", lambda device: 10**9)


def test_values_and_where_they_go(clock):
    scalars, dicts, lines = Scalars(), Dicts(), []
    log = StepLog(every=2, flops=1e9, exposed=0.01, peak=4e10, to=[scalars, dicts], echo=lines.append)
    assert log.step(tokens=30, loss=torch.tensor(9.0)) is None
    made = log.step(tokens=70, loss=torch.tensor(3.5))  # a quarter of a second for two steps
    assert made == {
        "seconds": 0.125,
        "tokens_per_second": 400.0,
        "mfu": 1e9 / 0.125 / 4e10,
        "exposed_seconds": 0.01,
        "memory_bytes": 1e9,
        "recompiles": 0.0,
        "loss": 3.5,
    }
    assert log.step() is None
    assert log.step() == {"seconds": 0.125, "mfu": 0.2, "exposed_seconds": 0.01, "memory_bytes": 1e9, "recompiles": 0}
    assert dicts.seen == [(made, 2), (log_values(scalars, 4), 4)]
    assert log_values(scalars, 2) == made
    assert lines == [
        "rank 0. MFU: 1e+09 FLOP a step, given, of 4e+10 FLOP/s, given. exposed communication: given. "
        "memory: what of the process is in RAM",
        "step 2: 125 ms, 400 tokens/s, MFU 20.0 %, exposed 10 ms, memory 1.00 GB, 0 recompiles, loss 3.5",
        "step 4: 125 ms, MFU 20.0 %, exposed 10 ms, memory 1.00 GB, 0 recompiles",
    ]


def log_values(scalars, step):
    return {tag: value for tag, value, at in scalars.seen if at == step}


def test_nothing_is_guessed(clock):
    lines = []
    log = StepLog(lambda x: x, every=1, echo=lines.append, peak=1.0)
    assert set(log.step()) == {"seconds", "memory_bytes", "recompiles"}
    assert "MFU: unknown, as nothing was compiled by the passes; give flops=" in lines[0]
    assert "exposed communication: unknown; give exposed=" in lines[0]


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"to=3 has neither add_scalar\(name, value, step\) nor log\(dict, step=\)"):
        StepLog(to=3, peak=1.0)
    with pytest.raises(ValueError, match="every is 0; write a number greater than 0"):
        StepLog(every=0, peak=1.0)


def test_peak_and_memory_are_measured():
    assert 1e8 < step_log.measured_peak("cpu", torch.float32) < 1e14
    before = step_log.memory("cpu")
    held = torch.ones(50_000_000)
    assert 190e6 < step_log.memory("cpu") - before < 260e6, held.shape


@with_ranks(2)
def test_estimates_of_what_was_compiled(rank):
    torch.compiler.reset()
    frames._recent.clear()  # in a process that ran other tests: theirs of nn.Linear count as parts of the model
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(MLP(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    compiled = torch.compile(model, backend="dtensor", options={"inner": "aot_eager"})
    lines = []
    log = StepLog(compiled, every=1, calls=3, peak=1e9, echo=lines.append)
    compiled(torch.ones(32, 64)).sum().backward()
    made = log.step()
    product = 2 * 32 * 64 * 128  # each rank has half of the 256; two in the forward, three in the backward
    assert made["mfu"] * made["seconds"] * 1e9 == pytest.approx(3 * 5 * product)
    exposed = sum(c["exposed"] for c in report(compiled).collectives)
    assert made["exposed_seconds"] == pytest.approx(3 * exposed)
    assert exposed > 0
    assert made["recompiles"] == 0
    compiled(torch.ones(16, 64)).sum().backward()
    made = log.step()
    assert made["recompiles"] == 1
    assert made["mfu"] * made["seconds"] * 1e9 == pytest.approx(3 * 5 * product / 2)
    assert len(lines) == (3 if rank == 0 else 0)
    if rank == 0:
        assert "estimated from 1 compiled function" in lines[0]
