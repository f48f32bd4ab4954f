"""The file of a package, and where it may be used.

A zip archive:

    manifest.json       what it was made by and for, what its graphs communicate, and the hash of every other file
    frames/0000.pickle  an `Entry`, without its kernels
    kernels/{hash}.so   a kernel's library

A package is code, and its frames are pickled. So a file is read only from where nobody else can write, and once: what
is checked is what is used.
"""

import hashlib
import io
import json
import os
import pickle
import platform
import stat
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import dtensor
from dtensor.errors import PackageError
from dtensor.mesh.mesh import known_groups, look_up_prepared
from dtensor.torch_private.core import backend_of, resolve_process_group

from ..backends.inductor import source_hash
from .entries import Entry

FORMAT = 3
"""The version of the file's layout."""

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class World:
    """What compiled code depends on besides the program.

    Attributes:
        torch, python, dtensor, source: versions, and the hash of this library's source.
        machine: kind of processor.
        processor: names of what it can do, where the system tells.
        gpu: name of the GPU; "" without one.
        meshes: name of a group -> the ranks of all groups over the same axes, and what sends over it.
    """

    torch: str
    python: str
    dtensor: str
    source: str
    machine: str
    processor: tuple[str, ...]
    gpu: str
    meshes: dict[str, str]

    @classmethod
    def here(cls) -> "World":
        """This process, with the meshes that exist in it by now."""
        look_up_prepared()
        return cls(
            str(torch.__version__),
            platform.python_version(),
            dtensor.__version__,
            source_hash().hex()[:16],
            platform.machine(),
            _flags(),
            torch.cuda.get_device_name() if torch.cuda.is_available() else "",
            {name: f"{rows} over {_backend(name, kind)}" for name, (kind, rows) in known_groups().items()},
        )

    def difference(self, here: "World", *, meshes: bool = True) -> str:
        """The first thing that is another one here than where the package was made, in words; "" if there is none.

        Args:
            here: this process.
            meshes: whether its meshes exist by now, so that they can be compared.
        """
        for name, said in WORDS.items():
            before, now = getattr(self, name), getattr(here, name)
            if before != now:
                return f"{said} was {before or 'none'}, and is {now or 'none'}"
        if missing := [flag for flag in self.processor if flag not in here.processor]:
            return f"this processor cannot do {', '.join(missing[:4])}"
        if not meshes:
            return ""
        name = next((n for n, rows in self.meshes.items() if here.meshes.get(n) != rows), None)
        if name is None:
            return ""
        there = f"is of ranks {here.meshes[name]}" if name in here.meshes else "does not exist"
        return f"the group {name} was of ranks {self.meshes[name]}, and {there}"


WORDS = {
    "torch": "torch",
    "python": "Python",
    "dtensor": "dtensor",
    "source": "the source of dtensor",
    "machine": "the machine",
    "gpu": "the GPU",
}
"""Fields of a `World` that must be the same, and what they are called."""


def _backend(name: str, device_type: str) -> str:
    """What sends over a group. A wrapper of gloo counts as gloo, as everywhere."""
    found = backend_of(resolve_process_group(name), device_type)
    return "gloo" if found.endswith("gloo") else found


def _flags() -> tuple[str, ...]:
    """What the processor can do, as the system lists it; code is built for all of it."""
    try:
        text = CPUINFO.read_text()
    except OSError:
        return ()
    line = next((x for x in text.splitlines() if x.startswith(("flags", "Features"))), "")
    return tuple(sorted(line.partition(":")[2].split()))


def write(
    path: Path, entries: Sequence[Entry], world: World, plain: Iterable[str] = (), collectives: Sequence[Any] = ()
) -> str:
    """Write a package, whole or not at all.

    Args:
        path: the file.
        entries: the frames.
        world: where they were compiled.
        plain: digests of frames that are not compiled.
        collectives: what the graphs communicate.

    Returns:
        The SHA-256 of the file.

    Raises:
        OSError: it cannot be written.
    """
    files: dict[str, bytes] = {}
    for k, entry in enumerate(entries):
        files |= {f"kernels/{key}.so": library for key, library in entry.kernels.items()}
        bare = replace(entry, kernels=dict.fromkeys(entry.kernels, b""))
        files[f"frames/{k:04}.pickle"] = pickle.dumps(bare)
    manifest = {
        "format": FORMAT,
        "world": asdict(world),
        "frames": [f"{entry.module}.{entry.function}" for entry in entries],
        "plain": sorted(plain),
        "collectives": list(collectives),
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())},
    }
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_member("manifest.json"), json.dumps(manifest, indent=1))
        for name, data in sorted(files.items()):
            archive.writestr(_member(name), data)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(made.getvalue())
    partial.chmod(0o644)
    partial.replace(path)
    return hashlib.sha256(made.getvalue()).hexdigest()


def _member(name: str) -> zipfile.ZipInfo:
    """A member with a fixed date, so that the same package is the same file."""
    found = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    found.compress_type = zipfile.ZIP_DEFLATED
    return found


def read(path: Path, sha256: str = "") -> tuple[World, list[Entry], set[str]]:
    """Read a package.

    Args:
        path: the file.
        sha256: what the SHA-256 of the file must be, in hexadecimal; "" if it may be any.

    Returns:
        Where it was made, its frames, and the digests of frames that are not compiled.

    Raises:
        PackageError: there is no such file, others can write to it, it is damaged, or it is another one than stated.
    """
    check_place(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PackageError(f"the package {path} cannot be read: {error.strerror}") from error
    found = hashlib.sha256(data).hexdigest()
    if sha256 and found != sha256.strip().lower():
        raise PackageError(f"the package {path} has the SHA-256 {found}, and {sha256} was asked for")
    try:
        return _opened(data)
    except PackageError as error:
        raise PackageError(f"the package {path} {error}; make it again") from None
    except Exception as error:  # whatever zipfile, json and pickle raise on what somebody altered
        raise PackageError(f"the package {path} is damaged: {type(error).__name__}: {error}; make it again") from error


def _opened(data: bytes) -> tuple[World, list[Entry], set[str]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        manifest = json.loads(archive.read("manifest.json"))
        if manifest["format"] != FORMAT:
            raise PackageError(f"has the format {manifest['format']}, and this version reads {FORMAT}")
        if sorted(archive.namelist()) != sorted(["manifest.json", *manifest["files"]]):
            raise PackageError("is damaged: it does not hold the files that it lists")
        files = {name: archive.read(name) for name in manifest["files"]}
    for name, digest in manifest["files"].items():
        if hashlib.sha256(files[name]).hexdigest() != digest:
            raise PackageError(f"is damaged: {name} was altered")
    world = manifest["world"]
    world["processor"] = tuple(world["processor"])
    entries = []
    for name, content in files.items():
        if name.startswith("frames/"):
            entry: Entry = pickle.loads(content)
            entries.append(replace(entry, kernels={key: files[f"kernels/{key}.so"] for key in entry.kernels}))
    return World(**world), entries, set(manifest["plain"])


def check_place(path: Path) -> None:
    """Check that nobody else can write to a file or exchange it."""
    for place, what in ((path, "file"), (path.resolve().parent, "folder")):
        try:
            found = place.stat()
        except OSError as error:
            raise PackageError(f"there is no package {path}: {error.strerror}") from error
        if found.st_mode & stat.S_IWOTH:
            raise PackageError(
                f"everybody can write to the {what} {place}, and a package is code; move it to where only you can write"
            )
        if hasattr(os, "getuid") and found.st_uid not in (0, os.getuid()):
            raise PackageError(
                f"the {what} {place} belongs to another user, and a package is code; copy it to your own"
            )


__all__ = ["World", "check_place", "read", "write"]
