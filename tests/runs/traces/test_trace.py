"""Traces of real steps on two ranks: each collective by its name, in eager and compiled code, in one file."""

import gc
import json
import linecache
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import dtensor
from dtensor import init_device_mesh
from dtensor.comm import profiled
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.runs.traces.events import nested
from dtensor.testing import with_ranks

NEEDS = {"X": ("ts", "dur", "tid", "cat", "args"), "M": ("args",), "s": ("ts", "id"), "f": ("ts", "id"), "C": ("ts",)}
"""What Chrome's format asks of an event of each kind, beside a name and a process."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = self.up(x).relu()  # the line of up
        return self.down(x)  # the line of down


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(steps):
        model(torch.ones(4, 8, requires_grad=True)).sum().backward()
        optimizer.step()


def read(path, ranks=2):
    """The events of a trace, after checking that they are what a viewer takes."""
    made = json.loads(Path(path).read_text())
    assert set(made) == {"traceEvents", "displayTimeUnit"}
    rows = {}
    for e in made["traceEvents"]:
        assert {"name", "ph", "pid", *NEEDS[e["ph"]]} <= set(e), e
        assert isinstance(e["pid"], int), e
        assert e["ph"] == "M" or e["ts"] >= 0, e
        if e["ph"] == "X":
            assert isinstance(e["tid"], int), e
            assert e["dur"] >= 0, e
            rows.setdefault((e["pid"], e["tid"]), []).append(dict(e))
    assert not any(nested(row)[1] for row in rows.values()), "slices of a row do not nest"
    processes = [e["args"]["name"] for e in made["traceEvents"] if e["name"] == "process_name"]
    assert sorted(processes) == [f"rank {r}" for r in range(ranks)]
    return made["traceEvents"]


def sent(events, rank=0):
    """(name without the line, stage, graph, the text of the line) of what was on its way, in order."""
    made = []
    for e in sorted(events, key=lambda e: e.get("ts", 0)):
        if e["pid"] == 64 * rank and "waited_us" in e.get("args", {}):
            file, _, number = e["args"].get("line", "").partition(":")
            assert file == "test_trace.py", e
            assert e["name"].endswith(f" ({file}:{number})"), e
            code = linecache.getline(__file__, int(number)).split("# the line of ")[1].strip()
            made.append((e["name"].split(" (")[0], e["args"]["stage"], e["args"].get("graph", ""), code))
    return made


@with_ranks(2)
def test_each_collective_has_its_name(rank, tmp_path):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

    def folder(name):
        return tmp_path / f"{name}"

    def last(tracing):
        torch.distributed.barrier()
        return tracing.folder / "trace.json"

    model = fully_shard(Block(), mesh)
    with dtensor.trace(folder("eager"), skip=1, steps=1) as tracing:
        train(model, 3)
    gathered = [
        (f"all_gather S(0)->R over dp: {part}.{name}", "forward", "", part)
        for part in ("up", "down")
        for name in ("weight", "bias")
    ]
    reduced = Counter(
        (f"reduce_scatter P(avg)->S(0) over dp: gradient of {part}.{name}", "backward", "", part)
        for part in ("up", "down")
        for name in ("weight", "bias")
    )
    events = read(last(tracing))
    for r in range(2):
        found = sent(events, r)
        assert (found[:4], Counter(found[4:])) == (gathered, reduced)
    assert [e["name"] for e in events if e.get("cat") == "step" and e["pid"] == 0] == ["step 1"]

    compiled = torch.compile(model, backend="dtensor", options={"inner": "aot_eager"})
    with dtensor.trace(folder("compiled"), skip=1) as tracing:
        train(compiled, 2)
    events = read(last(tracing))
    both = "4 tensors of up, down"
    found = sent(events, 1)
    assert found == [
        (f"all_gather S(0)->R over dp: {both}", "forward", "Block.forward", "up"),
        (f"reduce_scatter P(avg)->S(0) over dp: {both}", "backward", "Block.forward", "up"),
    ], found
    graphs = [e["name"] for e in sorted(events, key=lambda e: e.get("ts", 0)) if e.get("cat") == "graph"]
    assert Counter(graphs) == {"forward of Block.forward": 2, "backward of Block.forward": 2}

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(Block(), mesh, plan)
    with dtensor.trace(folder("tp")) as tracing:
        train(model, 1)
    found = sent(read(last(tracing)))
    assert found == [
        ("all_reduce P->R over dp: down", "forward", "", "down"),
        ("all_reduce P->R over dp: up", "backward", "", "up"),
    ], found

    # A profiler of the user's: what has no place is named by the operator whose gradient it is.
    with torch.profiler.profile(record_shapes=True, on_trace_ready=dtensor.trace_handler(folder("own"))):
        train(model, 1)
    torch.distributed.barrier()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None, "a trace keeps a model alive"
    events = read(folder("own") / "trace.json")
    found = sorted(e["name"].split(" (")[0] for e in events if e["pid"] == 0 and "waited_us" in e.get("args", {}))
    assert found == [
        "all_reduce P->R over dp: backward of FromLocalBackward",
        "all_reduce P->R over dp: down",
    ], found
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))  # of which no line is the user's
    parallelize_module(layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with dtensor.trace(folder("layers")) as tracing:
        train(torch.compile(layers, backend="dtensor", options={"inner": "aot_eager"}), 1)
    names = {e["name"] for e in read(last(tracing)) if e["pid"] == 0 and "waited_us" in e.get("args", {})}
    assert names == {f"all_reduce P->R over dp: {k} (nn.Linear)" for k in (0, 2)}, names

    with pytest.raises(dtensor.RecordError, match=r"eager holds the files of an earlier run \(rank0000"):
        dtensor.trace(folder("eager")).__enter__()


@with_ranks(2)
def test_without_a_profiler_nothing_is_named(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    profiled.NAMES.clear()
    train(fully_shard(Block(), mesh), 1)
    assert not profiled.NAMES
    assert "dispatched" not in dtensor.DTensor.__torch_dispatch__.__qualname__


def test_traces_that_are_missing_or_damaged(tmp_path):
    with pytest.raises(dtensor.RecordError, match="holds no traces; name the folder"):
        dtensor.merge_traces(tmp_path)
    with dtensor.trace(tmp_path / "one") as tracing:
        torch.ones(2).sum()
    assert tracing.path == tmp_path / "one" / "trace.json"
    assert len(read(tracing.path, 1)) > 2
    file = tmp_path / "one" / "rank00000.json"
    made = json.loads(file.read_text())
    file.write_text(json.dumps(made | {"dtensor": {"rank": 0, "world": 3}}))
    with pytest.raises(dtensor.RecordError, match=r"lacks the traces of ranks \[1, 2\] of 3"):
        dtensor.merge_traces(tmp_path / "one")
    file.write_text(file.read_text()[:100])
    with pytest.raises(dtensor.RecordError, match=r"rank00000.json is damaged"):
        dtensor.merge_traces(tmp_path / "one")
    with pytest.raises(dtensor.RecordError, match="not written over; name another folder, or remove it first: rm -r"):
        dtensor.trace(tmp_path / "one").__enter__()
    for wrong, said in (({"steps": 0}, "steps is 0; write 1 or more"), ({"skip": -1}, "skip is -1; write 0 or more")):
        with pytest.raises(ValueError, match=said):
            dtensor.trace(tmp_path, **wrong)
    with pytest.raises(TypeError, match="folder is the path of a folder, got None"):
        dtensor.trace(None)
