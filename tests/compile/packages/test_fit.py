"""What a package does not fit is refused, with the first difference; a damaged one is not read."""

import hashlib
import importlib
import json
import logging
import os
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import dtensor.compile
from dtensor import PackageError, init_device_mesh
from dtensor.compile.packages import archive
from dtensor.compile.recording.imagined import imagined
from dtensor.dispatch import registration
from dtensor.testing import run_ranks
from tests.interpreter import python

from . import programs


@pytest.fixture(scope="module")
def made(safe_folder):
    """The package of a function of one line."""
    path = safe_folder / "scaled.package"
    dtensor.compile.package(scaled, {"tp": 2}, (), path)
    return path


SAID = "failed to map segment from shared object"


class Settings:
    scale = 2.0


def scaled(mesh, size=4, **options):
    """Compile and run a function of a DTensor."""
    x = dtensor.distribute_tensor(torch.ones(size, 2), mesh, [dtensor.Shard(0)])
    model = Scaled()
    model.activation, model.scale = Settings.activation, Settings.scale
    return torch.compile(model, **options)(x)


class Scaled(torch.nn.Module):
    def forward(self, x):
        return self.activation(x) * self.scale


Settings.activation = staticmethod(torch.nn.functional.relu)


@contextmanager
def job(sizes=None, backend="gloo"):
    torch._dynamo.reset()
    sizes = sizes or {"tp": 2}
    with imagined(sizes, as_backend=True):
        dist.init_process_group(backend)
        try:
            yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        finally:
            dist.destroy_process_group()


def used(path, sizes=None, strict=True, backend="gloo", **options):
    """Run the program with a package, as rank 0 of ranks that are not there; return what the package says then."""
    with job(sizes, backend) as mesh:
        package = dtensor.compile.load(path, strict=strict)
        try:
            scaled(mesh, **options)
        finally:
            if package is not None:
                package.unload()
    return package


def test_it_fits(made):
    assert used(made).taken == ["Scaled.forward"]


WORLDS = {
    "torch": ("2.0.0", "torch was 2.0.0, and is "),
    "python": ("3.9.0", "Python was 3.9.0, and is "),
    "dtensor": ("0.0.1", "dtensor was 0.0.1, and is "),
    "source": ("abc", "the source of dtensor was abc, and is "),
    "machine": ("vax", "the machine was vax, and is "),
    "gpu": ("NVIDIA A100", "the GPU was NVIDIA A100, and is none"),
    "processor": (("avx9000",), "this processor cannot do avx9000"),
}


@pytest.mark.parametrize("name", WORLDS)
def test_another_version_or_machine(name, made, monkeypatch):
    value, said = WORLDS[name]
    own = archive.World.here
    world, *rest = archive.read(made)
    monkeypatch.setattr(dtensor.compile.packages.loading, "read", lambda *_: (replace(world, **{name: value}), *rest))
    with pytest.raises(PackageError, match=f"does not fit: {said}.*; make it again"):
        used(made)
    assert own() is not None


def test_another_environment(made, monkeypatch):
    monkeypatch.setenv("DTENSOR_DISABLE", "bucket")
    with pytest.raises(PackageError, match="the setting dtensor environment was"):
        used(made)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sizes": {"tp": 4}}, r"the group mesh.tp was of ranks \(\(0, 1\),\) over gloo"),
        ({"sizes": {"dp": 2}}, "the group mesh.tp was of ranks .*, and does not exist"),
        ({"backend": "mpi"}, r"over gloo, and is of ranks \(\(0, 1\),\) over mpi"),
        (
            {"size": 8},
            r"the argument x was a DTensor of float32\[4, 2\] S\(0\), and is a DTensor of float32\[8, 2\] S\(0\)",
        ),
        ({"backend": "gloo", "dynamic": True}, r"torch.compile was given inductor \[\] dynamic=None, and is given"),
        ({"mode": "max-autotune-no-cudagraphs"}, "torch.compile was given inductor"),
    ],
    ids=["ranks", "axes", "backend", "size", "dynamic", "mode"],
)
def test_another_call(options, said, made):
    with pytest.raises(PackageError, match=said):
        used(made, **options)


def test_another_setting(made):
    with (
        torch._inductor.config.patch(epilogue_fusion=False),
        pytest.raises(PackageError, match=r"the setting torch._inductor.config.epilogue_fusion was True, and is False"),
    ):
        used(made)


def test_other_rules_of_the_user(made, monkeypatch):
    """They are registered after the package was loaded, as it is at import."""
    with job() as mesh:
        package = dtensor.compile.load(made)
        monkeypatch.setattr(registration, "_registered", {"mylib.f.default": "* -> *"})
        scaled(mesh)
        package.unload()
    assert package.refused == ""
    assert "the setting dtensor rules was ()" in package.missed[0][1]


def test_a_strict_trace_is_traced(made):
    with dtensor.strict(), pytest.raises(PackageError, match="the setting dtensor strict was"):
        used(made)


def test_another_object(made, monkeypatch):
    monkeypatch.setattr(Settings, "activation", staticmethod(torch.nn.functional.silu))
    with pytest.raises(PackageError, match=r"activation.* was .*relu.*, and is .*silu"):
        used(made)


def test_another_number(made, monkeypatch):
    monkeypatch.setattr(Settings, "scale", 3.0)
    with pytest.raises(PackageError, match=r"scale of the model was 2\.0, and is 3\.0; make the package again"):
        used(made)


def test_an_object_that_is_exchanged_later(made, monkeypatch):
    """What is guarded by identity is so in this process, too."""
    with job() as mesh:
        package = dtensor.compile.load(made)
        x = dtensor.distribute_tensor(torch.full((4, 2), -1.0), mesh, [dtensor.Shard(0)])
        model = Scaled()
        model.activation, model.scale = torch.nn.functional.relu, 2.0
        run = torch.compile(model)
        assert torch.equal(run(x).to_local(), torch.zeros(2, 2))
        model.activation = torch.abs
        assert torch.equal(run(x).to_local(), torch.full((2, 2), 2.0))
        package.unload()
    assert (len(package.taken), len(package.missed)) == (1, 1)


def in_new_process(rank, folder, path, makes):
    """Make the package of a function of a module that only this process has imported, or load it."""
    sys.path.insert(0, folder)
    f = importlib.import_module("a_model").f
    if makes:
        with dtensor.compile.packaging(path):
            torch.compile(f)(torch.ones(3))
        return None
    package = dtensor.compile.load(path)
    torch.compile(f)(torch.ones(3))
    return package.taken, package.missed


def test_changed_source(safe_folder, tmp_path):
    path, source = str(safe_folder / "source.package"), tmp_path / "a_model.py"

    def run(makes):
        return run_ranks(in_new_process, 1, str(tmp_path), path, makes, fresh=True)[0]

    source.write_text("def f(x):\n    return inner(x)\n\n\ndef inner(x):\n    return x.sin() + 1\n")
    run(True)
    assert run(False) == (["f"], [])
    source.write_text("def f(x):\n    return inner(x)\n\n\ndef inner(x):\n    return x.cos() + 1\n")
    taken, missed = run(False)
    assert "the source of inner in a_model, lines 5 to 6 has changed (a_model.py)" in str(missed)
    assert taken == []


def test_what_is_typed_in_is_left_out(safe_folder):
    program = (
        "import torch, dtensor.compile\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x): return x.sin() + 1\n"
        f"with dtensor.compile.packaging({str(safe_folder / 'typed.package')!r}): torch.compile(Net())(torch.ones(3))\n"
    )
    done = subprocess.run([python(), "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=300)
    assert "Net.forward is written in a shell or notebook" in done.stderr
    assert "put it into a file" in done.stderr


def test_what_does_not_fit_is_compiled(made, caplog):
    with caplog.at_level(logging.INFO, "dtensor"):
        package = used(made, strict=False, size=8)
    assert package.taken == []
    assert [name for name, _ in package.missed] == ["Scaled.forward"]
    assert "Scaled.forward is compiled, not taken from the package" in caplog.text


def test_libraries_that_cannot_be_loaded(made, monkeypatch):
    """As where the folder for temporary files may not hold code."""

    def fails(content):
        raise OSError(SAID)

    monkeypatch.setattr(dtensor.compile.packages.entries.frame_data, "runnable", fails)
    package = used(made, strict=False)
    assert package.missed == [
        ("Scaled.forward", f"its graphs cannot be loaded: OSError: {SAID}; make the package again")
    ]


def test_what_dynamo_leaves_to_python_is_not_missed(safe_folder):
    path = safe_folder / "plain.package"

    def given(x):
        return x

    def run(mesh):
        scaled(mesh)
        torch.compile(given)(torch.ones(2))

    dtensor.compile.package(run, {"tp": 2}, (), path)
    with job() as mesh:
        package = dtensor.compile.load(path, strict=True)
        run(mesh)
        package.unload()
    assert package.taken == ["Scaled.forward"]


def test_two_packages(safe_folder):
    """Each gives what it holds; what was loaded last is asked first."""
    paths = {size: safe_folder / f"{size}.package" for size in (4, 8)}
    for size, path in paths.items():
        dtensor.compile.package(lambda mesh, size=size: scaled(mesh, size, dynamic=False), {"tp": 2}, (), path)
    with job() as mesh:
        packages = [dtensor.compile.load(path) for path in paths.values()]
        for size in paths:
            scaled(mesh, size, dynamic=False)
        for package in packages:
            package.unload()
    assert [len(package.taken) for package in packages] == [1, 1]
    assert [len(package.missed) for package in packages] == [0, 1]


def altered(path, target, name, change):
    """Copy a package with one of its members changed."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for member in old.namelist():
            data = old.read(member)
            new.writestr(member, change(data) if member.startswith(name) else data)


DAMAGES = {
    "truncated": lambda path, target: target.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path, target: target.write_bytes(b""),
    "a frame": lambda path, target: altered(path, target, "frames/", lambda data: data[:-1] + b"x"),
    "a kernel": lambda path, target: altered(path, target, "kernels/", lambda data: b"x" + data[1:]),
    "the manifest": lambda path, target: altered(path, target, "manifest", lambda data: data[:50]),
    "a hash": lambda path, target: altered(path, target, "manifest", swapped),
    "the format": lambda path, target: altered(
        path, target, "manifest", lambda data: data.replace(b'"format": 3', b'"format": 9')
    ),
}


def swapped(data):
    manifest = json.loads(data)
    manifest["files"] = dict.fromkeys(manifest["files"], "0" * 64)
    return json.dumps(manifest).encode()


@pytest.mark.parametrize("what", DAMAGES)
def test_damaged(what, made, safe_folder, caplog):
    target = safe_folder / "damaged.package"
    DAMAGES[what](made, target)
    with pytest.raises(PackageError, match=r"(is damaged|has the format 9).*; make it again"):
        dtensor.compile.load(target, strict=True)
    assert dtensor.compile.load(target) is None
    assert "everything is compiled as usual" in caplog.text


def test_a_flipped_bit(made, safe_folder):
    data = bytearray(made.read_bytes())
    data[len(data) // 2] ^= 1
    (safe_folder / "flipped.package").write_bytes(data)
    with pytest.raises(PackageError, match="is damaged"):
        dtensor.compile.load(safe_folder / "flipped.package", strict=True)


def test_its_hash_can_be_stated(made, monkeypatch):
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    package = dtensor.compile.load(made, strict=True, sha256=digest.upper())
    package.unload()
    with pytest.raises(PackageError, match=f"has the SHA-256 {digest}, and {'0' * 64} was asked for"):
        dtensor.compile.load(made, strict=True, sha256="0" * 64)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_others_must_not_write(what, made, tmp_path):
    place = tmp_path / "open"
    place.mkdir()
    path = place / "x.package"
    path.write_bytes(made.read_bytes())
    os.chmod(path if what == "file" else place, 0o777)
    with pytest.raises(PackageError, match=f"everybody can write to the {what} .* is code; move it"):
        dtensor.compile.load(path, strict=True)


def test_no_file(tmp_path):
    with pytest.raises(PackageError, match=r"there is no package .*: No such file"):
        dtensor.compile.load(tmp_path / "none", strict=True)


def test_by_the_environment(made, monkeypatch):
    from dtensor.compile.packages.package import load_if_asked

    monkeypatch.setenv("DTENSOR_PACKAGE", str(made))
    monkeypatch.setenv("DTENSOR_PACKAGE_STRICT", "1")
    monkeypatch.setenv("DTENSOR_PACKAGE_SHA256", "0" * 64)
    with pytest.raises(PackageError, match="was asked for"):
        load_if_asked()


@pytest.mark.nightly
def test_what_does_not_fit_is_compiled_where_the_environment_names_the_package(made, monkeypatch):
    """Which `import dtensor` loads, before anything else stands before Dynamo."""
    monkeypatch.setenv("DTENSOR_PACKAGE", str(made))
    script = "import torch, dtensor; assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)) == 2"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_it_is_written_whole_or_not_at_all(safe_folder, monkeypatch):
    path = safe_folder / "there.package"
    path.write_bytes(b"before")

    def fails():
        with dtensor.compile.packaging(path):
            torch.compile(programs.Small())(programs.batch())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert path.read_bytes() == b"before"
