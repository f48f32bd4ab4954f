"""The `demo` command: what it refuses, what it says when a rank fails, and one real run."""

import os
import re
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch
from click.testing import CliRunner

import dtensor
from dtensor import init_device_mesh
from dtensor.testing import RankError, with_threads
from dtensor.tools import cli
from dtensor.tools.demo import DemoOptions, DemoOutcome, DemoRun, Traffic, default_text, largest_difference
from dtensor.tools.demo_plans import PLANS


def run(*arguments):
    return CliRunner().invoke(cli.main, ["demo", *map(str, arguments)])


def outcome(**changes):
    run = DemoRun(
        "sharded", (5.5, 5.25), 1234.5, Traffic((Counter(all_reduce=6, all_gather=1), 1_000), (Counter(), 2_000))
    )
    return DemoOutcome(
        **({"runs": (run,), "difference": 0.0, "graphs": 1, "graph_breaks": 0, "parameters": 1} | changes)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "3"], "3 processes cannot share 4 attention heads and 8 sequences evenly under plan tp"),
        (["--nproc", "3"], "write --nproc 1, 2 or 4"),
        (["--nproc", "3", "--plan", "fsdp"], "write --nproc 1, 2, 4 or 8"),
        (["--nproc", "5", "--plan", "3d"], "write --nproc 1, 2, 4, 8 or 16"),
        (["--dtype", "fp16"], "'fp16' is not one of 'fp32', 'bf16'"),
        (["--nproc", "0"], "0 is not in the range"),
        (["--plan", "pp"], "'pp' is not one of 'tp', 'sp'"),
        (["--backend", "tvm"], "'tvm' is not one of"),
        (["--steps", "0"], "0 is not in the range"),
        (["--data", "no/such/file"], "cannot read no/such/file: No such file or directory"),
        (["--plot", "no/such/folder/curves.png"], "there is no folder"),
    ],
)
def test_wrong_arguments(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_text_that_is_too_short(tmp_path):
    text = tmp_path / "short.txt"
    text.write_bytes(b"x" * 64)
    result = run("--data", text)
    assert result.exit_code == 2
    assert "has 64 bytes, but a sequence and its next byte take 65" in result.output


def test_plot_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    result = run("--plot", "curves.png", "--data", __file__)
    assert result.exit_code == 2
    assert "pip install 'dtensor-compile[plot]'" in result.output


def test_torchrun_has_the_say_on_processes(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = run("--nproc", 4)
    assert result.exit_code == 2
    assert "torchrun has started 2" in result.output


@pytest.mark.parametrize(
    ("error", "shown"), [(RankError(1, "rank 1 of 2 failed:\nBoom"), "Boom"), (TimeoutError("60 s"), "60 s")]
)
def test_a_failure_is_shown_and_exits_with_1(monkeypatch, error, shown):
    def demonstrate(options):
        raise error

    monkeypatch.setattr(cli, "demonstrate", demonstrate)
    result = run()
    assert result.exit_code == 1
    assert shown in result.output


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({}, 0, "losses agree"),
        ({"difference": 2e-4}, 1, "losses DISAGREE: at most 2.0e-04 apart"),
        ({"difference": float("inf")}, 1, "losses DISAGREE"),
        ({"graph_breaks": 1}, 1, "graph breaks: 1"),
    ],
)
def test_exit_code(monkeypatch, changes, code, text):
    monkeypatch.setattr(cli, "demonstrate", lambda options: outcome(**changes))
    result = run()
    assert result.exit_code == code
    assert text in result.output


def test_report():
    text = cli.report(DemoOptions(data=b"x" * 1000, steps=2), outcome())
    assert text.splitlines()[2:5] == [
        "           loss          tokens/s  collectives            bytes sent",
        "          first    last                forward  backward     forward  backward",
        "sharded  5.5000  5.2500     1,234  1 AG + 6 AR      none       1,000     2,000",
    ]


def test_largest_difference():
    assert largest_difference([(1.0, 2.0), (1.0, 2.5), (0.75, 2.25)]) == 0.5
    assert largest_difference([(1.0, float("nan")), (1.0, 2.0)]) == float("inf")


def test_the_default_text_is_there():
    assert len(default_text().read_bytes()) > 10_000


@pytest.mark.parametrize(
    ("plan", "nproc", "shape", "parts"),
    [
        ("tp", 4, (4,), (1, 4)),
        ("ddp", 4, (4, 1), (4, 1)),
        ("fsdp", 8, (8,), (8, 1)),
        ("hsdp", 4, (2, 2), (4, 1)),
        ("hsdp", 8, (4, 2), (8, 1)),
        ("2d", 4, (2, 2), (2, 2)),
        ("2d", 3, (3, 1), (3, 1)),
        ("3d", 8, (2, 2, 2), (4, 2)),
        ("3d", 4, (1, 2, 2), (2, 2)),
    ],
)
def test_meshes_of_plans(plan, nproc, shape, parts):
    assert PLANS[plan].mesh_shape(nproc) == shape
    assert PLANS[plan].parts(nproc) == parts


@with_threads(8)
def test_each_rank_takes_its_part_of_a_batch(rank):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=PLANS["3d"].axes)
    batch = torch.arange(8).view(8, 1)
    assert PLANS["3d"].own_part(batch, mesh).flatten().tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]


PAIRS = [(p, 4) for p in PLANS] + [(p, 8) for p in ("ddp", "fsdp", "hsdp", "2d", "3d")]
FULL = [pytest.param(p, n, "dtensor", d, 30, marks=pytest.mark.nightly) for p, n in PAIRS for d in ("fp32", "bf16")]


@pytest.mark.parametrize(
    ("plan", "nproc", "backend", "dtype", "steps"),
    [pytest.param("fsdp", 2, "eager", "bf16", 2, marks=pytest.mark.nightly), *FULL],
)
def test_a_real_run_of_each_plan(plan, nproc, backend, dtype, steps):
    options = ["--nproc", nproc, "--steps", steps, "--plan", plan, "--backend", backend, "--dtype", dtype]
    command = [sys.executable, "-m", "dtensor", "demo", "--timeout", "850", *map(str, options)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=880)
    assert result.returncode == 0, result.stderr
    assert "The losses agree" in result.stdout
    assert "Graphs of the compiled step: 1; graph breaks: 0." in result.stdout
    assert ("computed in bfloat16" in result.stdout) == (dtype == "bf16")


def test_a_short_run():
    """Eager, on ranks that are there; at night the command of the README, in all plans."""
    done = run("--nproc", 2, "--steps", 2, "--layers", 1, "--backend", "eager")
    assert done.exit_code == 0, done.output
    assert "The losses agree" in done.output
    assert "Graphs of the compiled step: 1; graph breaks: 0." in done.output


@pytest.mark.nightly
@pytest.mark.parametrize("layers", [1, 2])
def test_a_real_run(tmp_path, layers):
    plot = tmp_path / "curves.svg"
    command = [sys.executable, "-m", "dtensor", "demo", "--nproc", "2", "--steps", "3", "--layers", str(layers)]
    result = subprocess.run([*command, "--plot", plot], capture_output=True, text=True, timeout=580)
    assert result.returncode == 0, result.stderr
    lines = {line.split("  ")[0]: line for line in result.stdout.splitlines()}
    # Forward: an all-reduce for each embedding, two a layer, the gather of the logits. Backward, eager: one for each of
    # four column-wise layers, and one for the logits.
    eager, compiled = 2 * layers + 2, 2 * layers + 1
    assert re.search(rf"  1 AG \+ {eager} AR      {4 * layers + 1} AR  ", lines["sharded, eager"])
    assert re.search(rf"  1 AG \+ {compiled} AR      {compiled} AR  ", lines["sharded, compiled"])
    assert lines["one process"].split()[5:] == ["none", "none", "0", "0"]
    assert "The losses agree" in result.stdout
    assert "Graphs of the compiled step: 1; graph breaks: 0." in result.stdout
    assert b"<svg" in plot.read_bytes()


@pytest.mark.nightly
@pytest.mark.parametrize(("plan", "nproc"), [("tp", 2), ("2d", 4)])
def test_no_rank_is_silent(plan, nproc, tmp_path):
    """Each rank writes a line at least every ten seconds, from the start of the processes on, with nothing cached."""
    command = [sys.executable, "-m", "dtensor", "demo", "--nproc", str(nproc), "--steps", "3", "--plan", plan]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    lines: list[tuple[float, str]] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            lines.append((time.monotonic(), line))
        ended = time.monotonic()
        assert running.wait(60) == 0, lines
    for rank in range(nproc):
        own = [at for at, line in lines if f"dtensor, rank {rank}: " in line or "dtensor: starting" in line]
        gaps = [later - before for before, later in zip([lines[0][0], *own], [*own, ended])]
        print(f"{plan}, rank {rank}: {len(own)} lines in {ended - lines[0][0]:.0f} s, at most {max(gaps):.1f} s apart")
        assert max(gaps) <= 10.0, "".join(line for _, line in lines)
    said = "".join(line for _, line in lines)
    # A line every four seconds is a sample, so which graph and rank it finds at work is chance.
    assert re.search(
        r"rank \d: demo.*: sharded, compiled, step 1 of 3.*: compiling .*: (for|back)ward graph: Inductor", said
    )
    assert re.search(r"rank \d: demo.*: sharded, compiled, step 1 of 3.*: kernel \d+ of \d+", said)


def test_the_version_names_the_distribution_that_is_installed_by_name():
    said = CliRunner().invoke(cli.main, ["--version"]).output
    assert said == f"dtensor {dtensor.__version__} (distribution dtensor-compile), torch {torch.__version__}\n"
