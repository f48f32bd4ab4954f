"""Measured beside estimated: profiles that are made up, of both kinds of devices, and steps of two ranks."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtensor.compile
from dtensor import init_device_mesh
from dtensor.compile.reports.measured import FILE, attach, events_of, measured
from dtensor.compile.reports.measuring import measuring
from dtensor.compile.reports.reading import read
from dtensor.compile.reports.summary import summary
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.testing import with_ranks

SPAN = {"ph": "X", "pid": 1, "tid": 1}


def event(name, start, end, external=None, cat="cpu_op", **others):
    """A span of a trace, with its times in microseconds."""
    return (
        SPAN | {"name": name, "cat": cat, "ts": start, "dur": end - start, "args": {"External id": external}} | others
    )


def region(start, end, direction="forward", number=7):
    """The span of a graph, as torch names it."""
    inner = event("CompiledFunction", start + 1, end - 1) | {"args": {"Sequence number": number}}
    if direction == "forward":
        return [event("Torch-Compiled Region: 0/1", start, end), inner]
    return [inner | {"name": "CompiledFunctionBackward"}]


def manifest(*carried, order=(0, ~0, 1, ~1), direction="forward"):
    collectives = [{"direction": direction, "carried": op, "number": k} for k, op in enumerate(carried)]
    graphs = {direction: {"order": list(order)}}
    return {"frame": {"compile_id": "0/1"}, "graphs": graphs, "collectives": collectives}


def found(folder, events, *manifests):
    path = Path(folder) / "profile.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}))
    names = [f"{k:03}_f" for k in range(len(manifests))]
    made = measured(events_of(path), names, manifests)
    attach(made, names, manifests)
    return made["graphs"]


def near(seconds, exposed):
    return pytest.approx({"seconds": seconds * 1e-6, "exposed": exposed * 1e-6})


GLOO = [
    event("dtensor::agree", 2, 5),
    event("gloo:recv", 2, 4, cat="user_annotation"),
    event("_c10d_functional::all_reduce_", 10, 12),
    event("c10d::allreduce_", 10, 12),
    event("dtensor::all_gather_start", 20, 23),
    event("gloo:all_reduce", 21, 60, cat="user_annotation", tid=2),
    event("gloo:recv", 21, 30, cat="user_annotation"),
    event("gloo:send", 22, 33, cat="user_annotation"),
    event("_c10d_functional::wait_tensor", 50, 62),
    event("_c10d_functional::wait_tensor", 70, 71),
]
"""An all-reduce that is waited for from 50 to 62, and an all-gather that has ended before its wait."""


def test_over_gloo(tmp_path):
    """A collective that was waited for ended with its wait, another with its last message; starts are exposed, too."""
    m = manifest("all_reduce", "all_gather", order=(0, 1, ~0, ~1))
    (g,) = found(tmp_path, region(0, 100) + GLOO, m)
    assert (g["frame"], g["runs"], g["agreeing"]) == ("000_f", 1, pytest.approx(3e-6))
    assert g["collectives"] == [near(52, 14), near(13, 4)]
    assert m["collectives"][0]["measured"] == near(52, 14)
    own = m["graphs"]["forward"]["measured"]
    assert (own["seconds"], own["exposed"]) == (pytest.approx(97e-6), pytest.approx(18e-6))


def test_runs_are_medians_and_other_programs_are_left_out(tmp_path):
    """Only runs whose collectives are those of the graph count; a backward belongs to the forward of its number."""
    forward, backward = (
        manifest("all_reduce", order=(0, ~0)),
        manifest("all_gather", order=(0, ~0), direction="backward"),
    )
    m = forward | {
        "graphs": forward["graphs"] | backward["graphs"],
        "collectives": forward["collectives"] + backward["collectives"],
    }
    events, at = [], 0
    for took in (5, 7, 30):
        start = event("_c10d_functional::all_reduce", at + 10, at + 11)
        events += [*region(at, at + 100), start, event("_c10d_functional::wait_tensor", at + 20, at + 20 + took)]
        at += 1000
    events += [*region(at, at + 50, "backward"), event("dtensor::all_gather", at + 5, at + 25)]
    events += [event("_c10d_functional::all_gather_into_tensor", at + 6, at + 7)]  # a part of the call around it
    events += [event("_c10d_functional::wait_tensor", at + 8, at + 9)]
    other = at + 1000
    events += [*region(other, other + 50), event("_c10d_functional::all_gather_into_tensor", other + 5, other + 6)]
    events += [
        *region(other + 100, other + 150, "backward", number=8),
        event("dtensor::all_gather", other + 105, other + 110),
    ]
    graphs = found(tmp_path, events, m)
    assert [(g["direction"], g["runs"]) for g in graphs] == [("forward", 3), ("backward", 1)]
    assert graphs[0]["collectives"] == [near(17, 8)]
    assert graphs[1]["collectives"] == [near(20, 20)]


def test_on_a_gpu(tmp_path):
    """The time is that of NCCL's kernels; exposed is what no other kernel of the same device covers."""
    stream = {"cat": "kernel", "pid": 0}
    events = [
        *region(0, 40),
        event("_c10d_functional::all_reduce", 10, 12, 3),
        event("record_param_comms", 10, 11, 4),
        event("_c10d_functional::wait_tensor", 14, 15, 5),
        event("aten::mm", 16, 17, 6),
        event("_c10d_functional::all_gather_into_tensor", 20, 22, 8),
        event("_c10d_functional::wait_tensor", 23, 24, 9),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 100, 160, 4, tid=20, **stream),
        event("sm90_gemm", 110, 130, 6, tid=7, **stream),
        event("elementwise", 120, 140, 6, tid=8, **stream),
        event("sm90_gemm", 100, 160, 6, tid=7, cat="kernel", pid=1),
        event("ncclDevKernel_AllGather_RING_LL", 170, 180, 8, tid=20, **stream),
    ]
    (g,) = found(tmp_path, events, manifest("all_reduce", "all_gather"))
    assert g["collectives"] == [near(60, 30), near(10, 10)]


def test_what_is_no_profile(tmp_path):
    (tmp_path / "profile.json").write_text('{"traces": []}')
    with pytest.raises(ValueError, match=r"is not a profile in Chrome's trace format .*export_chrome_trace"):
        events_of(tmp_path / "profile.json")
    with pytest.raises(TypeError, match=r"write measure\(lambda: train\(batch\)\)"):
        dtensor.compile.measure(torch.ones(1))  # pyright: ignore
    with pytest.raises(ValueError, match="0 steps measure nothing; write steps=1"):
        dtensor.compile.measure(print, steps=0)


def checked(report):
    """Earlier tests of this process have left frames of the same code, which did not run."""
    ran = [m for m in report.manifests if any("measured" in g for g in m["graphs"].values())]
    assert ran
    assert all(m["collectives"] for m in ran)
    for m in ran:
        for c in m["collectives"]:
            assert 0 < c["measured"]["seconds"] < 30, c
            assert 0 < c["measured"]["exposed"] < 30, c
        for g in m["graphs"].values():
            assert g["measured"]["runs"] == 2
            assert g["measured"]["seconds"] > g["measured"]["exposed"] > 0


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path)


@with_ranks(2)
def test_each_collective_of_a_step_is_found(rank, folder):
    """Tensor parallel and fully sharded; `measure` in the program, and `dtensor inspect --measure` around it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)]
    tp = parallelize_module(nn.Sequential(*layers), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    sharded = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh)
    x = torch.ones(4, 8)
    for model in (tp, sharded):
        run = torch.compile(model, backend="dtensor", options={"inner": "aot_eager"})
        report = dtensor.compile.measure(lambda run=run: run(x).sum().backward(), model, steps=2)
        checked(report)
        assert "measured: " in str(report)
        torch.compiler.reset()
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    run = torch.compile(sharded, backend="dtensor", options={"inner": "aot_eager"})
    with dtensor.compile.dump(folder) as root, measuring(2, root) as steps:
        for _ in range(5):
            run(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (steps.seen, steps.done) == (2, True)
    dist.barrier()
    assert (root / f"rank{rank}" / FILE).exists()
    frame = next(f for f in read(root) if f.rank == rank and f.manifest)
    assert {c["op"] for c in frame.manifest["collectives"] if "measured" in c} == {"all_gather", "reduce_scatter"}
    assert "waiting to begin" in summary(root)
