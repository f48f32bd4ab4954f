"""The file of measured links: what it holds, what it refuses, and that ranks and plans follow one file."""

import json
import os
import warnings

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import dtensor
from dtensor import Partial, Replicate, init_device_mesh
from dtensor.layout.layout import Layout
from dtensor.layout.planner import plan
from dtensor.mesh.mesh import facts
from dtensor.prices.calibrated import Measured, links_here, links_path, machine_key, read_links
from dtensor.prices.links import INTER, INTRA, Link
from dtensor.testing import with_ranks
from dtensor.tools.calibration import save_links

ONE = Link(alpha=1e-5, bandwidth=2e9, memory=3e9, launch=4e-6, start=5e-5)
OTHER = Link(alpha=2e-5, bandwidth=1e9, memory=3e9, launch=4e-6, start=5e-5)


def test_what_is_saved_is_read_beside_what_was_there(tmp_path):
    path = tmp_path / "cache" / "dtensor" / "links.json"
    assert read_links(path) == {}
    save_links(path, "a gloo cpu", Measured(intra=ONE))
    save_links(path, "b nccl cuda", Measured(inter=OTHER, intra=ONE))
    save_links(path, "a gloo cpu", Measured(inter=OTHER))
    save_links(path, "a gloo cpu", Measured(intra=OTHER))
    assert read_links(path) == {"a gloo cpu": Measured(OTHER, OTHER), "b nccl cuda": Measured(OTHER, ONE)}
    assert [p.name for p in path.parent.iterdir()] == ["links.json"]
    assert json.loads(path.read_text())["units"]["alpha"] == "seconds per round"


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DTENSOR_LINKS")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert links_path() == tmp_path / ".cache" / "dtensor" / "links.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert links_path() == tmp_path / ".cache" / "dtensor" / "links.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert links_path() == tmp_path / "x" / "dtensor" / "links.json"
    monkeypatch.setenv("DTENSOR_LINKS", "here.json")
    assert str(links_path()) == "here.json"
    monkeypatch.setenv("DTENSOR_LINKS", "")
    assert links_path() is None


def entry(**changes):
    constants = {"alpha": 1e-5, "bandwidth": 1e9, "memory": 1e9, "launch": 1e-6, "start": 1e-5} | changes
    return json.dumps({"format": "dtensor links 1", "links": {machine_key("fake", "cpu"): {"intra": constants}}})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        (entry()[:60], "Unterminated string|Expecting"),
        ("[1, 2]", "indices"),
        ('{"format": "dtensor links 2", "links": {}}', "format is 'dtensor links 2'"),
        ('{"name": "a package"}', "'format'"),
        (entry(bandwidth=0), "bandwidth cannot be 0.0 bytes per second"),
        (entry(alpha=-1e-6), "alpha cannot be -1e-06 seconds per round"),
        (entry(start=float("nan")), "start cannot be nan"),
        (entry(memory="fast"), "could not convert"),
        (entry().replace("intra", "sideways"), "sideways"),
        ("\xff", "decode"),
    ],
)
def test_damaged_and_foreign_files(tmp_path, monkeypatch, text, reason):
    path = tmp_path / "links.json"
    path.write_bytes(text.encode("latin-1"))
    for use in (read_links, lambda p: save_links(p, "a", Measured(ONE))):
        with pytest.raises(ValueError, match=rf"links.json is not a file of measured links \(.*({reason})") as caught:
            use(path)
        assert str(path) in str(caught.value)
    assert path.read_bytes() == text.encode("latin-1")
    monkeypatch.setenv("DTENSOR_LINKS", str(path))
    with pytest.warns(UserWarning, match="plans use default links: .*links.json is not a file of measured links"):
        assert links_here("fake", "cpu") == Measured()


def test_a_file_that_is_named_and_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("DTENSOR_LINKS", str(tmp_path / "none.json"))
    with pytest.warns(UserWarning, match="none.json, which does not exist"):
        assert links_here("fake", "cpu") == Measured()
    monkeypatch.delenv("DTENSOR_LINKS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert links_here("fake", "cpu") == Measured()


def test_what_was_not_measured_is_estimated():
    assert Measured().links == (INTER, INTRA)
    assert Measured(inter=ONE).links == (ONE, INTRA)
    assert Measured(OTHER, ONE).links == (OTHER, ONE)
    inter, intra = Measured(intra=ONE).links
    assert intra == ONE
    assert inter == Link(alpha=1e-5, bandwidth=2e9, memory=3e9, launch=4e-6, start=5e-5)
    assert Measured(intra=Link(bandwidth=1e12)).links[0].bandwidth == INTER.bandwidth


def test_plans_follow_measured_links(fake_mesh, tmp_path, monkeypatch):
    """A sum over a slow and a quick axis is cut along the quick one first; over axes alike it is one collective."""
    path = tmp_path / "links.json"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("DTENSOR_LINKS", str(path))
    key = machine_key("fake", "cpu")
    src, dst = (Layout.of((p, p), 1) for p in (Partial(), Replicate()))

    def steps(inter):
        save_links(path, key, Measured(inter, ONE))
        dtensor.prepare(mesh)
        assert facts(mesh).network.links == (inter, ONE)
        return [s.op for s in plan(src, dst, (1 << 20,), facts(mesh).network).steps]

    save_links(path, key, Measured(ONE, ONE))
    mesh = fake_mesh(2, 2)
    assert steps(ONE) == ["all_reduce"]
    assert steps(Link(bandwidth=1e7)) == ["reduce_scatter", "all_reduce", "all_gather"]
    dtensor.prepare(mesh, links=[INTRA, INTER])
    assert facts(mesh).network.links == (INTRA, INTER)


def test_measured_links_are_of_one_backend_and_device(fake_mesh, tmp_path, monkeypatch):
    path = tmp_path / "links.json"
    monkeypatch.setenv("DTENSOR_LINKS", str(path))
    save_links(path, machine_key("gloo", "cpu"), Measured(ONE, ONE))
    save_links(path, machine_key("fake", "cuda"), Measured(ONE, ONE))
    assert facts(fake_mesh(2)).network.links == (INTRA,)


@with_ranks(2)
def test_ranks_with_different_files_agree(rank, tmp_path):
    mine = tmp_path / f"{rank}.json"
    save_links(mine, machine_key("gloo", "cpu"), Measured(intra=(ONE, OTHER)[rank]))
    os.environ["DTENSOR_LINKS"] = str(mine)
    networks = [None, None]

    def agreed(mesh):
        torch.distributed.all_gather_object(networks, facts(mesh).network.links)
        assert networks[0] == networks[1]
        return networks[0]

    mesh = init_device_mesh("cpu", (2,))
    assert agreed(mesh) == (ONE,)
    turned = DeviceMesh("cpu", torch.tensor([1, 0]))
    dtensor.prepare(turned)
    assert agreed(turned) == (OTHER,)
    unprepared = DeviceMesh("cpu", torch.tensor([0, 1]))
    assert agreed(unprepared) == (INTRA,)
    if rank == 0:
        os.environ["DTENSOR_LINKS"] = ""
    dtensor.prepare(mesh)
    assert agreed(mesh) == (INTRA,)
    if rank == 0:
        mine.write_text("{")
        os.environ["DTENSOR_LINKS"] = str(mine)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        dtensor.prepare(mesh)
    assert agreed(mesh) == (INTRA,)
    assert len(warned) == 1 - rank
