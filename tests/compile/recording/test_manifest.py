"""The manifest and what is made of it: the timeline, the lock, the diff, the summary, the formula, the report."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dtensor.compile
from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from dtensor.comm.collectives import ops
from dtensor.compile.estimates.timeline import timeline
from dtensor.compile.estimates.traffic import sent, traffic
from dtensor.compile.recording import frames
from dtensor.compile.recording.logs import LOG
from dtensor.compile.reports import lockfile
from dtensor.compile.reports.differences import differences
from dtensor.compile.reports.reading import Dumped, read
from dtensor.compile.reports.summary import changed, most_exposed, seconds, summary, what, who
from dtensor.mesh.mesh import facts
from dtensor.parallel.fsdp.sharded_module import sharded_class
from dtensor.passes.graph import estimate
from dtensor.passes.graph.source import module, module_class, place, source
from dtensor.prices.links import DEFAULT, terms
from dtensor.torch_private.compiling import TRACE_LOG
from dtensor.torch_private.core import c10d, make_fx

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


@pytest.fixture
def mesh(fake_mesh):
    return fake_mesh(2, names=("tp",))


@pytest.fixture
def group(mesh):
    return facts(mesh).groups[0,]


def traced(f, *shapes):
    return make_fx(f, tracing_mode="fake")(*[torch.zeros(s) for s in shapes]).graph


def compiled(f, **options):
    return torch.compile(f, backend="dtensor", fullgraph=True, options={"inner": "aot_eager", **options})


class Net(torch.nn.Module):
    """An implicit gather, and a redistribution that is asked for."""

    def __init__(self, mesh):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8, bias=False)
        self.inner.weight = torch.nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [S0]))

    def forward(self, x):
        h = self.inner(x)
        h = h.softmax(-1)
        return h.redistribute(placements=[S0]).redistribute(placements=[R])


class Moves(torch.nn.Module):
    def forward(self, x):
        return x.redistribute(placements=[S0]) * 2


def dumped(model, x, folder):
    torch.compiler.reset()
    with dtensor.compile.dump(folder):
        out = compiled(model)(x)
        if out.requires_grad:
            out.sum().backward()
    return read(folder)[-1].manifest


def test_entries(mesh, tmp_path):
    """Operator, group, bytes, placements, who asked and where, for forward and backward."""
    model, x = Net(mesh), distribute_tensor(torch.ones(4, 8), mesh, [R])
    made = dumped(model, x, tmp_path)
    (implicit, explicit), rest = made["collectives"][:2], made["collectives"][2:]
    assert [implicit[k] for k in ("op", "axis", "ranks", "dtype", "direction")] == [
        "all_to_all",
        "tp",
        [0, 1],
        "float32",
        "forward",
    ]
    assert (implicit["how"], implicit["move"], implicit["bytes"], implicit["sent"]) == (
        "implicit",
        "S(1)->S(0)",
        32,
        64,
    )
    assert implicit["code"] == "h = h.softmax(-1)"
    assert implicit["file"].endswith("test_manifest.py")
    assert (explicit["op"], explicit["how"], explicit["move"]) == ("all_gather", "explicit", "S(0)->R")
    assert explicit["code"].startswith("return h.redistribute")
    assert explicit["bytes"] == 64
    assert rest == []
    assert made["totals"]["forward"]["bytes"] == 96
    assert made["totals"]["forward"]["count"] == {"all_to_all": 1, "all_gather": 1}


def test_the_backward_knows_its_forward(mesh, tmp_path):
    """The gradient of what was asked for was asked for, at the same line, in the same module."""
    model = torch.nn.Sequential(Moves())
    made = dumped(model, distribute_tensor(torch.ones(4, 4), mesh, [S1]).requires_grad_(), tmp_path)
    there, back = made["collectives"]
    assert [(c["direction"], c["op"], c["move"]) for c in (there, back)] == [
        ("forward", "all_to_all", "S(1)->S(0)"),
        ("backward", "all_to_all", "S(0)->S(1)"),
    ]
    assert there["module"] == back["module"] == "0"
    assert there["line"] == back["line"] > 0
    assert (there["how"], back["how"]) == ("explicit", "explicit")


def test_what_a_pass_removed_is_told(mesh, tmp_path):
    def f(x):
        return x.redistribute(placements=[R]).redistribute(placements=[S0]).redistribute(placements=[R]) * 2

    made = dumped(f, distribute_tensor(torch.ones(4), mesh, [S0]), tmp_path)
    (gone,) = made["removed"]
    assert (gone["pass"], gone["op"], gone["bytes"], gone["how"], gone["move"]) == (
        "cancel_gather_shard",
        "all_gather",
        8,
        "explicit",
        "S(0)->R",
    )
    (left,) = made["collectives"]
    assert (left["bytes"], left["passes"]) == (8, ["lower"])
    assert [(p["bytes_saved"], p["removed"]) for p in made["passes"] if p["pass"] == "cancel_gather_shard"] == [
        (8, [gone["asked"]])
    ]


def test_a_collective_knows_the_passes_that_made_it(mesh, tmp_path):
    def f(x):
        return x.redistribute(placements=[R]).redistribute(placements=[S0])

    made = dumped(f, DTensor.from_local(torch.ones(4), mesh, [P]), tmp_path)
    (c,) = made["collectives"]
    assert (c["op"], c["passes"], c["move"]) == ("reduce_scatter", ["fuse_reduce_scatter", "lower"], "P->R")


def test_buckets_stand_for_all_that_is_in_them(mesh, tmp_path):
    def f(x, y):
        return x.redistribute(placements=[R]), y.redistribute(placements=[R])

    x, y = (distribute_tensor(torch.ones(n, 4), mesh, [S0]) for n in (4, 8))
    torch.compiler.reset()
    with dtensor.compile.dump(tmp_path):
        compiled(f)(x, y)
    (c,) = read(tmp_path)[0].manifest["collectives"]
    assert (c["asked"], c["passes"], c["bytes"]) == ([0, 1], ["lower", "bucket"], 96)
    assert c["formula"]["bytes"] == "192*(tp - 1)/tp"


def test_formulas_in_symbolic_sizes(mesh):
    torch.compiler.reset()
    f = torch.compile(
        lambda x: x.redistribute(placements=[R]) * 2, backend="dtensor", options={"inner": "aot_eager"}, dynamic=True
    )
    f(distribute_tensor(torch.ones(6, 10), mesh, [S0]))
    (c,) = dtensor.compile.report(f).collectives
    assert c["formula"]["bytes"] == "4*x.size(0)*x.size(1)*(tp - 1)/tp"
    assert c["bytes"] == 4 * 6 * 10 // 2


def test_estimates_add_no_guards(mesh):
    """A symbolic size stays one, though the operations of a product are counted by it."""
    torch.compiler.reset()
    w = distribute_tensor(torch.ones(8, 8), mesh, [R])
    f = torch.compile(lambda x: (x @ w).redistribute(placements=[R]), backend="dtensor", options={"inner": "aot_eager"})
    with dtensor.compile.statistics() as s:
        for n in (6, 10, 14, 22):
            x = distribute_tensor(torch.ones(n, 8), mesh, [S0])
            torch._dynamo.mark_dynamic(x, 0)
            f(x)
    assert s.graphs == 1
    frame = frames.recent_frames()[-1]
    (mm,) = [span for span in frame.stories["inference"].timeline.spans if span.name == "aten.mm"]
    assert mm.end > mm.start


def test_products_are_counted(group):
    graph = traced(lambda x, y: x @ y, (4, 8), (8, 2))
    (mm,) = [node for node in graph.nodes if node.op == "call_function"]
    assert estimate.flops_of(mm) == 2 * 4 * 8 * 2


def test_timeline_of_a_start_and_a_wait(group, monkeypatch):
    """What is computed in between is not exposed, where sending leaves the processor alone."""
    monkeypatch.setitem(estimate.MACHINES, "cpu", replace(estimate.MACHINES["cpu"], overlap=1.0))

    def f(x, y, n=1):
        started = c10d.all_reduce(x, "sum", group)
        for _ in range(n):
            y = y @ y
        return c10d.wait_tensor(started) + 1, y

    took = sum(terms("all_reduce", 2)[k] * (1, 4096)[k] for k in range(2))
    assert took == pytest.approx(DEFAULT.start + 2 * DEFAULT.alpha + 4096 / DEFAULT.bandwidth)
    short = timeline(traced(lambda x, y: f(x, y), (1024,), (4, 4)))
    (c,) = [s for s in short.spans if s.communicates]
    (mm,) = [s for s in short.spans if s.name == "aten.mm"]
    assert c.end - c.start == pytest.approx(took)
    assert c.exposed == pytest.approx(took - (mm.end - mm.start))
    assert short.exposed == pytest.approx(c.exposed)
    machine = estimate.MACHINES["cpu"]
    assert mm.end - mm.start == pytest.approx(machine.launch + 3 * 64 / machine.memory, rel=0.5)
    long = timeline(traced(lambda x, y: f(x, y, 3), (1024,), (256, 256)))
    assert long.exposed == 0
    assert long.seconds == pytest.approx(long.computing)


def test_sending_over_gloo_takes_the_processor(group):
    """On a CPU a collective is exposed although something is computed beside it; less of it, the slower the link is."""

    def f(x, y):
        started = c10d.all_reduce(x, "sum", group)
        return c10d.wait_tensor(started) + 1, y @ y

    graph = traced(f, (1024,), (256, 256))
    (mm,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    (wait,) = graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)
    wait.prepend(mm)
    (c,) = [s for s in timeline(graph).spans if s.communicates]
    assert c.exposed == pytest.approx(c.end - c.start)
    machine = estimate.MACHINES["cpu"]
    assert machine.taken(replace(DEFAULT, bandwidth=machine.sending / 10), True) == pytest.approx(0.1)


def test_a_part_of_a_tensor_is_read_in_part(group):
    """Products with two slices of one buffer read the buffer once together, not each."""
    graph = traced(lambda x, y: (x[:8] @ y, x[8:] @ y), (64, 64), (64, 64))
    first, second = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    moved = estimate.moved(graph)
    assert [moved[n].moved for n in (first, second)] == [4 * 64 * (8 + 64 + 8), 4 * 64 * (56 + 64 + 56)]


def test_two_collectives_queue(group, monkeypatch):
    monkeypatch.setitem(estimate.MACHINES, "cpu", replace(estimate.MACHINES["cpu"], overlap=1.0))

    def f(x, y):
        first, second = (c10d.all_reduce(z, "sum", group) for z in (x, y))
        return c10d.wait_tensor(second), c10d.wait_tensor(first)

    a, b = [s for s in timeline(traced(f, (1024,), (1024,))).spans if s.communicates]
    assert (a.start, b.start) == (0, a.end)
    assert (a.exposed, b.exposed) == (0, pytest.approx(b.end))


def test_memory_of_a_timeline(group):
    """Inputs stay; an intermediate goes after its last use; a view holds nothing of its own."""
    graph = traced(lambda x: (x * 2).view(2, 2).sum(), (4,))
    (output,) = graph.find_nodes(op="output")
    output.meta["val"] = (torch.zeros(100),)  # as AOTAutograd leaves it
    t = timeline(graph)
    assert [held for _, held in t.memory] == [16, 32, 32, 36, 20]
    assert t.peak == 36


def test_traffic_of_others(group):
    """Torch's variants, in place and into buffers, and what Inductor wraps."""

    def f(x):
        out = x.new_empty(8)
        gathered = c10d.all_gather_into_tensor_out(x, 2, group, out=out)
        return c10d.wait_tensor(gathered), c10d.wait_tensor(c10d.broadcast(x, 0, group))

    found = [s for _, s in traffic(traced(f, (4,)))]
    assert [(s.op, s.buffer, s.bytes) for s in found] == [("all_gather", 16, 16), ("broadcast", 16, 16)]
    graph = traced(lambda x: ops.shard(x, 0, group), (4,))
    assert [sent(node) for node in graph.nodes] == [None] * 3


def extra(x):
    return x.redistribute(placements=[R]) * 2


def there_and_back(x):
    return extra(x.redistribute(placements=[R]).redistribute(placements=[S0]))


def test_lock(mesh, tmp_path):
    """What is added is named with its line; moved lines and other files' order break nothing."""
    x = distribute_tensor(torch.ones(4, 8), mesh, [R])
    dumped(Net(mesh), x, tmp_path / "a")
    path = tmp_path / "manifest.lock"
    path.write_text(lockfile.locked(tmp_path / "a"))
    dumped(Net(mesh), x, tmp_path / "b")
    assert lockfile.check(path, tmp_path / "b") == lockfile.Checked((), ())
    torch.compiler.reset()
    with dtensor.compile.dump(tmp_path / "b"):
        compiled(extra)(distribute_tensor(torch.ones(16, 4), mesh, [S0]))
    found = lockfile.check(path, tmp_path / "b")
    assert found.gone == ()
    (added,) = found.added
    assert added.startswith(
        "inference all_gather over tp, float32 [[8, 4]], 128 bytes, explicit S(0)->R (1 instead of 0)\n"
    )
    assert "test_manifest.py" in added
    assert added.endswith("return x.redistribute(placements=[R]) * 2")
    path.write_text("something else")
    with pytest.raises(ValueError, match="is not a communication lock; write one with `dtensor check"):
        lockfile.check(path, tmp_path / "b")
    with pytest.raises(ValueError, match="holds no dump; write one with `dtensor inspect SCRIPT`"):
        lockfile.locked(tmp_path / "c")


def test_differences(mesh, tmp_path):
    x = distribute_tensor(torch.ones(4), mesh, [S0])
    for name, options in (("a", {}), ("b", {}), ("c", {"disable": ["cancel_gather_shard"]})):
        torch.compiler.reset()
        with dtensor.compile.dump(tmp_path / name):
            compiled(there_and_back, **options)(x)
    assert list(differences(tmp_path / "a", tmp_path / "b")) == []
    found = list(differences(tmp_path / "a", tmp_path / "c"))
    assert any(line.startswith("only in ") and "cancel_gather_shard.txt" in line for line in found)
    assert any(line.startswith("+") and "dtensor.shard" in line for line in found)
    assert any(line.startswith("+direction=inference, op=all_gather") for line in found)
    with pytest.raises(ValueError, match=r"there is no .*; give two files or two folders of dumps"):
        list(differences(tmp_path / "a", tmp_path / "d"))


@pytest.mark.parametrize("text", ["{", "[]", '{"collectives": 1}'])
def test_a_damaged_manifest_is_named(tmp_path, text):
    for name, content in {"a": text, "b": '{"collectives": []}'}.items():
        (tmp_path / name / "rank0" / "000_forward").mkdir(parents=True)
        (tmp_path / name / "rank0" / "000_forward" / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"a/rank0/000_forward/manifest\.json is .*; dump again"):
        list(differences(tmp_path / "a", tmp_path / "b"))
    with pytest.raises(ValueError, match=r"rank0/000_forward/manifest\.json is .*; dump again"):
        read(tmp_path / "a")


def test_summary_and_report(mesh, tmp_path):
    x, model = distribute_tensor(torch.ones(4, 8), mesh, [R]), Net(mesh)
    dumped(model, x, tmp_path)
    said = summary(tmp_path)
    assert said.startswith("1 rank, 1 compiled frame, 0 graph breaks")
    assert "exposed: all_to_all over tp in forward, 32 bytes, S(1)->S(0)\n     not requested (implicit) at " in said
    assert "h = h.softmax(-1)\n     split into start and wait\n" in said
    torch.compiler.reset()
    frames._recent.clear()
    run = compiled(model)
    with pytest.raises(ValueError, match=r"no graph of OptimizedModule went through the passes .* these did: nothing"):
        dtensor.compile.report(run)
    run(x)
    made = dtensor.compile.report(run)
    assert (made.bytes, len(made.collectives), made.names) == (96, 2, ("000_forward",))
    assert made.most_exposed(1)[0]["exposed"] == max(c["exposed"] for c in made.collectives)
    assert str(made).startswith("1 rank, 1 compiled frame")
    assert dtensor.compile.report().names == made.names
    with pytest.raises(ValueError, match=r"no graph of extra .* these did: forward \(test_manifest.py"):
        dtensor.compile.report(extra)


def test_logs_and_trace(mesh, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger(TRACE_LOG), "handlers", [caplog.handler])
    x = distribute_tensor(torch.ones(4), mesh, [S0])
    torch.compiler.reset()
    with caplog.at_level("DEBUG", LOG.name):
        compiled(there_and_back)(x)
    said = [r.message for r in caplog.records if r.name == LOG.name]
    assert any(
        "inference graph of" in m and ": cancel_gather_shard: 1 rewrites" in m and "all_gather 2 -> 1" in m
        for m in said
    )
    artefacts = [r.metadata["artifact"]["name"] for r in caplog.records if "artifact" in getattr(r, "metadata", {})]
    assert {"dtensor_inference_passes", "dtensor_manifest"} <= set(artefacts)


@pytest.mark.parametrize(
    ("s", "text"), [(0, "0 µs"), (1.5e-6, "1.5 µs"), (2.5e-3, "2.5 ms"), (3.25, "3.25 s"), (1e-9, "0.001 µs")]
)
def test_times_have_units(s, text):
    assert seconds(s) == text


def test_source_and_module():
    """The user's line, not that of a library; a path of modules however Dynamo writes it."""
    node = torch.fx.Graph().placeholder("x")
    assert (source(node), module(node)) == (None, "")
    inner = torch.nn.__file__
    node.meta["stack_trace"] = (
        '  File "/home/u/train.py", line 7, in forward\n    h = self.layer(x)\n'
        f'  File "{inner}", line 3, in forward\n    return y\n'
    )
    node.meta["nn_module_stack"] = {"1": ("L['self']", torch.nn.Module), "2": ("L['self']._modules['a'].b.0", int)}
    found = source(node)
    assert (found.file, found.line, found.code, str(found)) == (
        "/home/u/train.py",
        7,
        "h = self.layer(x)",
        "train.py:7",
    )
    assert module(node) == "a.b.0"
    node.meta["nn_module_stack"] = {"1": ("L['self'].a", torch.nn.Linear)}
    node.meta["stack_trace"] = f'  File "{inner}", line 3, in forward\n    return y\n'
    assert (source(node), module_class(node), place(node)) == (None, "nn.Linear", "nn.Linear in a")
    for kind in ("torch.nn.modules.linear.Linear", sharded_class(torch.nn.Linear, ("weight",))):
        node.meta["nn_module_stack"] = {"1": ("L['self'].a", kind)}
        assert module_class(node) == "nn.Linear"


def test_manifests_are_json_and_name_their_frame(mesh, tmp_path):
    dumped(extra, distribute_tensor(torch.ones(4), mesh, [S0]), tmp_path)
    made = json.loads((tmp_path / "rank0" / "000_extra" / "manifest.json").read_text())
    assert made["format"] == "dtensor manifest 1"
    assert made["frame"]["name"] == "extra"
    trace = json.loads((tmp_path / "rank0" / "000_extra" / "trace.json").read_text())["traceEvents"]
    (c,) = made["collectives"]
    (event,) = [e for e in trace if e["ph"] == "X" and e["name"] == "all_gather"]
    assert event["dur"] == pytest.approx(c["seconds"] * 1e6)
    assert event["args"]["bytes"] == c["bytes"]


def test_collectives_of_alike_layers_are_told_together():
    def collective(module, exposed, **others):
        same = {"op": "all_gather", "axis": "tp", "direction": "forward", "bytes": 64, "move": "S(0)->R", "fixed": 0.0}
        same |= {"class": "", "dtype": "int64", "shapes": [[4]], "readers": ["mm"]}
        code = {"how": "explicit", "file": "m.py", "line": 3, "code": "x", "asked": [0], "passes": ["lower"]}
        return same | code | {"module": module, "exposed": exposed, "seconds": 2 * exposed} | others

    layers = [collective(f"layers.{k}.attention.wo", 1e-6 * (k + 1)) for k in range(3)]
    alone = collective("output", 4e-6, passes=["bucket", "lower"], asked=[1, 2])
    other = collective("layers.0.attention.wo", 5e-6, bytes=128)
    manifest = {"graphs": {}, "collectives": [*layers, alone, other]}
    frame = Dumped(0, "000_f", Path(), manifest)
    first, second, third = most_exposed([frame], 3)
    assert what(first) == "6 µs of 12 µs exposed: 3 all_gather over tp in forward, 64 bytes each, S(0)->R"
    assert who(first) == "requested at m.py:3 in layers.*.attention.wo: x"
    assert changed(first) == "split into start and wait"
    assert what(second) == "5 µs of 10 µs exposed: all_gather over tp in forward, 128 bytes, S(0)->R"
    assert " in layers.0.attention.wo" in who(second)
    assert changed(third) == ("changed by bucket (replaces 2 that the program requested); split into start and wait")
