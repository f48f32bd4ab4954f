"""What a dump holds, for the option, the environment and the block; and that it changes nothing."""

import json
import os
import subprocess
import warnings

import pytest
import torch
from functorch.compile import aot_function, nop
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import fresh_cache

import dtensor.compile
from dtensor import Replicate, Shard, distribute_tensor
from dtensor.compile import statistics
from dtensor.compile.recording import bytecode
from dtensor.compile.recording.bytecode import decompiled
from dtensor.torch_private.compiling import dynamo_counters
from tests.interpreter import python

R, S0 = Replicate(), Shard(0)
ALWAYS = {"01_dynamo.txt", "bytecode.py", "guards.txt", "manifest.json", "trace.json"}
TRAINED = {
    "02_joint.00_input.txt",
    "02_joint.01_cancel_gather_shard.txt",
    "03_forward.00_input.txt",
    "03_forward.01_lower.txt",
    "03_forward.02_agree.txt",
    "03_forward.inner.txt",
    "04_backward.00_input.txt",
    "04_backward.inner.txt",
}


@pytest.fixture
def mesh(fake_mesh):
    return fake_mesh(2, names=("tp",))


def whole(x):
    return x.redistribute(placements=[R])


def there_and_back(x):
    return whole(whole(x).redistribute(placements=[S0]) * 2)


def compiled(f, inner="aot_eager", **options):
    return torch.compile(f, backend="dtensor", fullgraph=True, options={"inner": inner, **options})


def frames(folder):
    return {path.name: {file.name for file in path.iterdir()} for path in sorted((folder / "rank0").iterdir())}


def calls(path):
    return [line for line in path.read_text().splitlines() if " = placeholder" not in line]


def test_option(mesh, tmp_path):
    """One folder for each frame; counting goes on."""
    x = distribute_tensor(torch.ones(4), mesh, [S0]).requires_grad_()
    for _ in range(2):
        torch.compiler.reset()
        compiled(there_and_back, dump=tmp_path)(x).sum().backward()
    with torch.no_grad():
        compiled(there_and_back, dump=str(tmp_path), disable=["cancel_gather_shard"])(x)
    found = frames(tmp_path)
    assert list(found) == ["000_there_and_back", "001_there_and_back", "002_there_and_back"]
    assert found["000_there_and_back"] == found["001_there_and_back"] == ALWAYS | TRAINED
    inference = {f"03_inference.{stage}.txt" for stage in ("00_input", "01_lower", "02_agree", "inner")}
    assert found["002_there_and_back"] == ALWAYS | inference | {"recompiled.txt"}
    first = tmp_path / "rank0" / "000_there_and_back"
    lines = calls(first / "02_joint.00_input.txt")
    here = "test_dump.py:"
    assert lines[0].startswith(
        "%all_gather: f32[4]{R} = dtensor.all_gather(%primals_1, 0, 4, tp)  # 8 bytes over tp, S(0)->R, explicit; "
        + here
    )
    assert lines[1].startswith("%shard: f32[2]{S(0)} = dtensor.shard(%all_gather, 0, tp)  # " + here)
    assert calls(first / "02_joint.01_cancel_gather_shard.txt")[0].startswith(
        "%mul: f32[2]{S(0)} = aten.mul.Tensor(%primals_1, 2)"
    )
    assert "f32[2]{S(0)} = placeholder" in (first / "01_dynamo.txt").read_text()
    assert "grad_mode" in (tmp_path / "rank0" / "002_there_and_back" / "recompiled.txt").read_text().lower()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_dump_changes_neither_results_nor_caches(mesh, tmp_path, inner):
    x = distribute_tensor(torch.arange(4.0), mesh, [S0])
    with fresh_cache():
        plain = compiled(there_and_back, inner)(x).to_local()
        before = dict(dynamo_counters()["inductor"])
        for _ in range(2):
            torch.compiler.reset()
            with dtensor.compile.dump(tmp_path):
                dumped = compiled(there_and_back, inner)(x).to_local()
            assert dumped.equal(plain)
        hits = "fxgraph_cache_hit"
        assert dynamo_counters()["inductor"].get(hits, 0) == before.get(hits, 0)
        torch.compiler.reset()
        assert compiled(there_and_back, inner)(x).to_local().equal(plain)
        if inner == "inductor":
            assert dynamo_counters()["inductor"][hits] > before.get(hits, 0)
    assert list(frames(tmp_path)) == ["000_there_and_back", "001_there_and_back"]


def test_any_backend_and_graph_breaks(tmp_path):
    """Nothing of this library in the program: plain tensors, a break, another size."""

    def f(x):
        y = x.sin()
        print("break")
        return (y * 2).sum()

    torch.compiler.reset()
    with dtensor.compile.dump(tmp_path):
        run = torch.compile(f, backend="aot_eager")
        for n in (3, 4):
            run(torch.ones(n, requires_grad=True)).backward()
    names = sorted(frames(tmp_path))
    assert [n[4:] for n in names if "resume" not in n] == ["f", "f"]
    assert len(names) == 4
    first = tmp_path / "rank0" / names[0]
    text = (first / "graph_breaks.txt").read_text()
    assert "test_dump.py" in text
    assert 'print("break")' in text
    assert "expected 3, actual 4" in (tmp_path / "rank0" / names[2] / "recompiled.txt").read_text()
    assert "%sin: f32[3] = aten.sin(%primals_1)  # test_dump.py:" in (first / "03_forward.inner.txt").read_text()
    assert json.loads((first / "manifest.json").read_text())["totals"] == {}


def test_environment(tmp_path):
    """Read at import: the first frame is written as a whole, plain tensors too."""
    code = "import torch, dtensor; torch.compile(lambda x: x + 1, backend='aot_eager')(torch.ones(2))"
    env = dict(os.environ, DTENSOR_DUMP=str(tmp_path))
    subprocess.run([python(), "-c", code], env=env, check=True, capture_output=True)
    (files,) = frames(tmp_path).values()
    assert files == ALWAYS | {"03_inference.00_input.txt", "03_inference.inner.txt"}


def test_an_unwritable_folder_is_one_warning(mesh, tmp_path):
    (tmp_path / "rank0").write_text("in the way")
    x = distribute_tensor(torch.ones(4), mesh, [S0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with dtensor.compile.dump(tmp_path):
            assert compiled(there_and_back)(x).to_local().tolist() == [2.0] * 4
    assert [str(w.message).split(":")[0] for w in caught if "dumped" in str(w.message)] == [
        f"nothing more is dumped to {tmp_path}"
    ]


FULL = """
import json, resource, signal, sys, warnings
from pathlib import Path
import torch, dtensor.compile
from dtensor import Shard, distribute_tensor, init_device_mesh
from dtensor.testing import fake_ranks

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that grows too large is an OSError, as on a full disk
with fake_ranks(2), warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
    f = torch.compile(lambda x: (x * 2).sin().cos().sum(), backend="dtensor", options={"inner": "aot_eager"})
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
    with dtensor.compile.dump(sys.argv[1]):
        f(x).backward()
    text = [str(w.message) for w in caught if "dumped" in str(w.message)]
    sizes = {p.name: p.stat().st_size for p in Path(sys.argv[1]).rglob("*") if p.is_file()}
    print(json.dumps([x.grad.to_local().tolist(), text, sizes]))
"""


@pytest.mark.nightly
def test_a_full_disk_is_one_warning(tmp_path):
    """Files of at most 300 bytes: what fits is there, what does not has left nothing, and the program goes on."""
    done = subprocess.run([python(), "-c", FULL, tmp_path], check=True, capture_output=True, text=True)
    grad, text, sizes = json.loads(done.stdout)
    expected = torch.ones(2, requires_grad=True)
    (expected * 2).sin().cos().sum().backward()
    assert expected.grad is not None
    assert grad == pytest.approx(expected.grad.tolist())
    assert [line.split(":")[0] for line in text] == [f"nothing more is dumped to {tmp_path}"]
    assert "File too large" in text[0]
    assert 0 < len(sizes) < 5
    assert all(0 < n <= 300 and not name.startswith(".") for name, n in sizes.items())


def test_bytecode_that_cannot_be_decompiled_is_disassembled(monkeypatch):
    def f(x):
        return x + 1

    name, text = decompiled(f.__code__, f.__code__)
    assert name == "bytecode.py"
    assert "return x + 1" in text

    def fails(_):
        raise RuntimeError("no")

    monkeypatch.setattr(bytecode, "_decompiler", lambda: fails)
    name, text = decompiled(f.__code__, f.__code__)
    assert name == "bytecode.txt"
    assert "RuntimeError: no" in text
    assert "BINARY_OP" in text


def test_statistics_count_as_before(mesh, tmp_path):
    x = distribute_tensor(torch.ones(4), mesh, [S0])
    with dtensor.compile.dump(tmp_path), statistics() as s:
        compiled(there_and_back)(x)
    assert [c.op for c in s.forward] == ["all_gather"]


def test_what_a_compiler_compiles_for_itself_is_not_shown(tmp_path):
    """Inductor traces patterns while it compiles: their graphs are not the program's."""

    def compiler(gm, _):
        aot_function(lambda x: x.sin(), nop)(torch.ones(5))
        return gm.forward

    x = torch.ones(3, requires_grad=True)
    with dtensor.compile.dump(tmp_path):
        torch.compile(lambda x: x.exp().sum(), backend=aot_autograd(fw_compiler=compiler))(x).backward()
    texts = {path.name: path.read_text() for path in tmp_path.glob("rank0/000_*/0[2-9]_*.txt")}
    assert {name.split(".")[0] for name in texts} == {"02_joint", "03_forward", "04_backward"}
    assert all("f32[3]" in text and "f32[5]" not in text for text in texts.values())
