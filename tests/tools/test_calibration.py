"""The `calibrate` command: the fit, what it refuses, what it says, and one real run."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from dtensor import init_device_mesh, search
from dtensor.mesh.mesh import facts
from dtensor.prices.calibrated import Measured, machine_key, read_links
from dtensor.prices.links import WORK, Link, seconds
from dtensor.prices.machine import Machine
from dtensor.testing import with_ranks
from dtensor.tools import calibration, cli
from dtensor.tools.calibration import CalibrationOptions, CalibrationOutcome, Fit, Timing, fit, save_links

LINK = Link(alpha=3e-5, bandwidth=1.5e9, memory=8e9, launch=2e-6, start=7e-5)
OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shard")


def timings(link, n=2, noise=lambda i: 1.0, ops=OPS, sizes=(1024, 65536, 4 << 20)):
    cases = [(op, size) for op in ops for size in sizes]
    return [Timing(op, n, size, seconds(op, size, n, link) * noise(i)) for i, (op, size) in enumerate(cases)]


def constants(link):
    return [getattr(link, name) for name in ("alpha", "bandwidth", "memory", "launch", "start")]


@pytest.mark.parametrize("n", [2, 4, 5])
def test_the_fit_recovers_constants(n):
    assert constants(fit(timings(LINK, n))) == pytest.approx(constants(LINK), rel=1e-6)


def test_the_fit_of_noisy_times_is_near():
    found = fit(timings(LINK, noise=lambda i: 1.1 if i % 2 else 0.9, sizes=tuple(4**k for k in range(5, 13))))
    assert constants(found) == pytest.approx(constants(LINK), rel=0.2)


def test_no_constant_is_negative():
    """All-reduces that take less time than gathers ask for a negative alpha; start then takes all of it."""
    quick = [Timing(t.op, t.n, t.size, t.seconds * (0.5 if t.op == "all_reduce" else 1)) for t in timings(LINK)]
    found = fit(quick)
    assert found.alpha == 0
    assert found.start == pytest.approx(1e-4, rel=0.2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "0 timings do not determine"),
        (timings(LINK, sizes=(1024,)), "do not determine the constants"),
        (timings(LINK, ops=("all_gather", "all_to_all", "shard")), "do not determine the constants"),
        ([Timing(t.op, t.n, t.size, 1e-4) for t in timings(LINK)], "times of collectives do not grow"),
    ],
)
def test_times_that_do_not_tell(given, message):
    with pytest.raises(ValueError, match=message):
        fit(given)


def test_every_collective_that_is_priced_alike_is_measured():
    assert set(calibration.WORKED) == set(WORK) - {"collective_permute"}


def run(*arguments):
    return CliRunner().invoke(cli.main, ["calibrate", *map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "1"], "1 is not in the range"),
        (["--sizes", "1024"], "is not two or more numbers of bytes; write e.g. 1024,65536,1048576"),
        (["--sizes", "1024,1MB"], "is not two or more numbers of bytes"),
        (["--sizes", "1024,0"], "is not two or more numbers of bytes"),
        (["--device", "cuda", "--nproc", "100"], "--device cuda takes a GPU for each process"),
        (["--plot", "no/such/folder/fits.png"], "there is no folder"),
    ],
)
def test_wrong_arguments(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_foreign_file_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "calibrate", None)
    path = tmp_path / "package.json"
    path.write_text("{}")
    monkeypatch.setenv("DTENSOR_LINKS", str(path))
    result = run()
    assert result.exit_code == 1
    assert f"Error: {path} is not a file of measured links" in result.output
    assert path.read_text() == "{}"


@pytest.mark.nightly
@with_ranks(2)
def test_ranks_on_two_hosts_measure_the_link_between_them(rank, tmp_path):
    os.environ.update(LOCAL_WORLD_SIZE="1", DTENSOR_LINKS=str(tmp_path / "links.json"))
    options = CalibrationOptions(sizes=(1000, 1 << 23), rounds=2)
    outcome = calibration.on_rank(rank, options)
    assert (outcome is None) == (rank == 1)
    (found,) = read_links(tmp_path / "links.json").values()
    assert found.intra is None
    if outcome is not None:
        assert [(f.kind, f.link) for f in outcome.fits] == [("inter", found.inter)]
    assert facts(init_device_mesh("cpu", (2,))).network.links == (found.inter,)
    timings: list = [None, None]
    dist.all_gather_object(timings, calibration.measure(dist.group.WORLD.group_name, options))
    assert timings[0] == timings[1]
    assert [(t.op, t.n, t.size) for t in timings[0]] == [(op, 2, size) for op in OPS for size in options.sizes]


def test_a_processor_is_kept_beside_its_links(tmp_path):
    path, machine = tmp_path / "links.json", Machine(1e11, 2e11, 2e10, 1e-6, overlap=0.0, efficiency=0.8)
    save_links(path, "here gloo cpu", Measured(machine=machine))
    save_links(path, "here gloo cpu", Measured(intra=LINK))
    assert read_links(path) == {"here gloo cpu": Measured(intra=LINK, machine=machine)}
    path.write_text(path.read_text().replace("0.8", "-1"))
    with pytest.raises(ValueError, match=r"efficiency of a machine cannot be -1\.0"):
        read_links(path)


@with_ranks(2)
def test_a_search_takes_the_measured_processor(rank, tmp_path):
    model, x = torch.nn.Linear(64, 64), torch.ones(64, 64)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    usual = search(model, mesh, x).prediction.seconds
    os.environ["DTENSOR_LINKS"] = str(tmp_path / "links.json")
    slow = Machine(1e6, 1e6, 1e6, 1e-6, overlap=0.0)
    if rank == 0:
        save_links(tmp_path / "links.json", machine_key("gloo", "cpu"), Measured(machine=slow))
    dist.barrier()
    assert search(model, mesh, x).prediction.seconds > 100 * usual


def test_report():
    slower = Timing("all_reduce", 2, 1 << 20, 2e-3)
    outcome = CalibrationOutcome("box gloo cpu", (Fit("intra", (slower,), LINK),), None)
    assert cli.calibrated(CalibrationOptions(rounds=3), outcome).splitlines() == [
        "box gloo cpu, 2 ranks, within a host; 3 rounds on the slowest rank",
        "",
        "                bytes    measured    fitted  error",
        "all_reduce  1,048,576  2,000.0 µs  829.1 µs  -59 %",
        "",
        "start          70 µs  to start a collective",
        "alpha          30 µs  a round",
        "bandwidth   1.5 GB/s  on the wire",
        "launch          2 µs  to start a local copy",
        "memory        8 GB/s  of a local copy",
        "",
        "The constants are not saved, because DTENSOR_LINKS is empty.",
    ]


@pytest.mark.nightly
def test_a_real_run(tmp_path, monkeypatch):
    path, plot = tmp_path / "deep" / "links.json", tmp_path / "fits.svg"
    monkeypatch.setenv("DTENSOR_LINKS", str(path))
    command = [sys.executable, "-m", "dtensor", "calibrate", "--sizes", "1000,8388608", "--rounds", "3"]
    result = subprocess.run([*command, "--plot", plot], capture_output=True, text=True, timeout=580)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # no terminal, no progress bar
    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines[3:13]] == [[op, size] for op in OPS for size in ("1,000", "8,388,608")]
    assert lines[-2:] == [f"The constants are saved in {path}.", f"The fits are in {plot}."]
    assert b"<svg" in plot.read_bytes()
    link = read_links(path)[machine_key("gloo", "cpu")].intra
    assert 1e6 < link.bandwidth < 1e12
    assert 1e-7 < link.start + link.alpha < 1
    assert list(json.loads(path.read_text())["links"]) == [machine_key("gloo", "cpu")]
