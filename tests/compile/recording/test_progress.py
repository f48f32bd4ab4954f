"""What a user who waits is told: phases whose seconds add up, a line for each frame, and what it is in meanwhile."""

import logging
import re
import threading
import time

import pytest
import torch
import torch._dynamo
from torch import nn

import dtensor.compile
from dtensor import distribute_tensor
from dtensor.compile.recording import progress
from dtensor.layout.placements import Replicate, Shard
from dtensor.program import stages
from dtensor.torch_private import phases

TRACED = {"tracing", "passes", "generating code", "compiling kernels"}


class Net(nn.Module):
    def forward(self, x):
        return (x.sin() * 3 + x.cos()).redistribute(placements=[Replicate()]) @ x


@pytest.fixture
def given(fake_mesh, tmp_path, monkeypatch):
    """A compiled model, and an input for it; Inductor's caches are empty."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    x = distribute_tensor(torch.ones(8, 8), fake_mesh(2, names=("tp",)), [Shard(0)])
    return torch.compile(Net()), x.requires_grad_()


def test_the_parts_add_up_to_the_time_of_the_first_call(given):
    run, x = given
    with dtensor.compile.statistics() as found:
        began = time.perf_counter()
        loss = run(x).sum()
        wall = time.perf_counter() - began
        first = dict(found.seconds)
        loss.backward()
    assert set(first) == TRACED
    assert min(first.values()) > 0
    assert 0.7 * wall < sum(first.values()) <= wall
    assert found.seconds["compiling kernels"] > first["compiling kernels"]  # the backward's


def test_later_calls_are_no_compilations(given):
    run, x = given
    run(x)
    with dtensor.compile.statistics() as found:
        run(x)
    assert found.seconds == {}


def test_what_is_not_by_inductor(fake_mesh):
    x = distribute_tensor(torch.ones(8, 8), fake_mesh(2, names=("tp",)), [Shard(0)])
    with dtensor.compile.statistics() as found:
        torch.compile(Net(), backend="dtensor", options={"inner": "aot_eager"})(x)
    assert set(found.seconds) == {"tracing", "passes"}


def test_a_line_for_each_frame(given, caplog):
    run, x = given
    with caplog.at_level(logging.INFO, "dtensor"):
        run(x).sum().backward()
    forward, backward = [m for m in caplog.messages if "is compiled after" in m]
    assert forward.startswith("rank 0: Net.forward is compiled after ")
    assert all(f"{name} " in forward for name in TRACED)
    assert backward.startswith("rank 0: Net.forward (backward) is compiled after ")


def test_a_frame_that_fails_is_not_told(fake_mesh, caplog):
    x = distribute_tensor(torch.ones(8, 8), fake_mesh(2, names=("tp",)), [Shard(0)])

    def broken(x):
        torch._dynamo.graph_break()
        return x

    with caplog.at_level(logging.INFO, "dtensor"), pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(broken, fullgraph=True)(x)
    assert caplog.messages == []
    with phases.phase("waiting", "rank 1"):
        assert phases._here.compilation is None


def test_whom_a_rank_waits_for():
    with phases.compilation("f") as made, phases.phase(phases.WAITING, "rank 3"):
        assert [what for what, _ in made.steps()] == ["waiting for rank 3"]
    assert (made.whom, made.phase, made.steps()) == ("", "tracing", [])


def test_steps_that_are_named_take_no_phase():
    with phases.compilation("f") as made:
        made.enter("aot_trace_joint_graph", made.phase, "joint graph")
        with phases.phase(phases.PASSES):
            assert [what for what, _ in made.steps()] == ["joint graph", "passes"]
        made.leave("aot_trace_joint_graph")
    assert set(made.seconds) == {"tracing", "passes"}


def test_nothing_is_written_elsewhere(given, capfd):
    run, x = given
    run(x)
    assert capfd.readouterr() == ("", "")


def test_only_programs_with_a_mesh_are_told(monkeypatch, caplog):
    @torch.compile(backend=lambda gm, _: seen.append(stages.now(threading.get_ident())) or gm.forward)
    def double(x):
        return x * 2

    seen, x, meshes = [], torch.ones(3), []
    monkeypatch.setattr(progress, "known_meshes", lambda: meshes)
    double(x)
    meshes.append(None)
    torch.compiler.reset()
    double(x)
    double(x.double())
    without, first, again = seen
    assert without == ""
    name = r"test_only_programs_with_a_mesh_are_told\.<locals>\.double"
    assert re.fullmatch(rf"compiling {name}.*: backend.*", first)
    assert re.fullmatch(rf"compiling {name} again.*: backend.*", again)
    (said,) = [m for m in caplog.messages if "compiled again" in m]
    assert re.fullmatch(f"{name} is compiled again: x is float64, and was float32", said.removeprefix("rank 0: "))


def test_a_phase_interrupts_another():
    """The seconds of one do not count for the other, also where torch leaves several steps at once."""
    with phases.compilation("f") as made:
        made.enter("outer", "generating code")
        time.sleep(0.02)
        made.enter("inner", "compiling kernels")
        time.sleep(0.05)
        made.leave("outer")
        assert made.phase == "tracing"
        made.leave("unknown")
    assert 0.02 <= made.seconds["generating code"] < 0.05 <= made.seconds["compiling kernels"]


def test_torch_loads_a_frame_from_data_while_it_is_loaded():
    with phases.compilation("f") as made, phases.phase(phases.LOADING):
        made.enter("PyCodeCache.load_by_key_path", "compiling kernels")
        made.leave("PyCodeCache.load_by_key_path")
    assert set(made.seconds) == {"tracing", "loading"}
