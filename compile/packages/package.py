"""Makes packages of compiled code, and loads them: `dtensor.compile.package`, `packaging` and `load`."""

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dtensor.errors import CallOrderError, PackageError
from dtensor.mesh.mesh import init_device_mesh
from dtensor.program import environment
from dtensor.program.stages import Stage
from dtensor.torch_private.dynamo import forget_compiled
from dtensor.torch_private.frames import intercept, intercept_from_now_on

from ..recording.imagined import imagined
from .archive import World, write
from .keeping import Keeper, Kept
from .loading import Package, opened

log: logging.Logger = logging.getLogger("dtensor")


@contextmanager
def packaging(path: str | os.PathLike[str]) -> Iterator[Kept]:
    """Write what torch.compile compiles inside the context to a package.

    What was compiled before is forgotten, and compiled anew inside. Where several ranks run, rank 0 writes the package.
    If the context ends with an error, nothing is written.

    Args:
        path: the file to write.

    Returns:
        A context manager that gives what was kept, and why the rest was left out.

    Raises:
        PackageError: nothing was compiled, or nothing of it can be taken to another process.
        OSError: the file cannot be written.
    """
    keeper = Keeper()
    forget_compiled()
    with intercept(keeper):
        yield keeper.kept
    made = keeper.kept
    if not made.entries:
        reasons = "; ".join([f"{name}: {why}" for name, why in made.left_out])
        raise PackageError(f"there is nothing to package: {reasons or 'torch.compile compiled nothing'}")
    if not dist.is_initialized() or dist.get_rank() == 0:
        with Stage("writing a package"):
            said = [[[list(ranks), text] for ranks, text in graph] for graph in made.collectives]
            digest = write(Path(path), made.entries, World.here(), made.plain, said)
        log.info("wrote %d frames to the package %s, SHA-256 %s", len(made.entries), path, digest)


def package(
    function: Callable[..., Any],
    mesh_shape: Mapping[str, int],
    example_inputs: Sequence[Any],
    path: str | os.PathLike[str],
    *,
    device_type: str = "cpu",
    backend: str | None = None,
) -> Kept:
    """Compile a program for ranks that are not there, and write a package.

    `function` is called in this process as rank 0 of a mesh of that shape: it shards a model, compiles it, and takes a
    step or more, so that all that a job will run is compiled. Its collectives do nothing, and its values mean nothing.

    Args:
        function: takes the mesh and the example inputs.
        mesh_shape: axis -> number of ranks.
        example_inputs: passed on to `function`.
        path: the file to write.
        device_type: "cpu" or "cuda".
        backend: the backend that the job will use, as `init_process_group` takes it; by default gloo on CPUs and NCCL
            on GPUs.

    Returns:
        What was kept, and why the rest was left out.

    Raises:
        RuntimeError: this process has process groups already.
        PackageError: nothing was compiled, or nothing of it can be taken to another process.
        OSError: the file cannot be written.
    """
    if dist.is_initialized():
        raise CallOrderError(
            "package makes process groups of its own, and this process has some already; call it before "
            "init_process_group, or write with dtensor.compile.packaging(path) in the job"
        )
    backend = backend or ("gloo" if device_type == "cpu" else "nccl")
    with imagined(mesh_shape, as_backend=True):
        dist.init_process_group(backend, world_size=math.prod(mesh_shape.values()))
        try:
            mesh = init_device_mesh(device_type, tuple(mesh_shape.values()), mesh_dim_names=tuple(mesh_shape))
            with packaging(path) as found:
                function(mesh, *example_inputs)
        finally:
            dist.destroy_process_group()
    return found


@Stage("reading a package")
def load(path: str | os.PathLike[str], *, strict: bool = False, sha256: str = "") -> Package | None:
    """Take compiled frames from a package, from now on, in place of compiling them.

    A frame is taken if all its guards hold, its source and that of all it calls is the same, and torch.compile is given
    the same options. What does not fit is compiled as usual, and a warning names the first difference.

    Args:
        path: the file. A package is code: load none that you would not run.
        strict: whether it is an error if something does not fit.
        sha256: what the SHA-256 of the file must be, in hexadecimal.

    Returns:
        The package, which says what was taken from it; None if it cannot be read.

    Raises:
        PackageError: with `strict`, the file cannot be read, is damaged or not safe to load, or was made for another
            version, machine or setting; and later, a frame is not in it.
    """
    try:
        found = opened(Path(path), sha256, strict)
    except PackageError as error:
        if strict:
            raise
        log.warning("%s; everything is compiled as usual", error)
        return None
    if found.refused and strict:
        raise PackageError(f"the package {path} does not fit: {found.refused}; make it again")
    intercept_from_now_on(found)
    return found


def load_if_asked() -> None:
    """Load the package that the environment names, if it does.

    Raises:
        PackageError: the environment asks to be strict, and it does not fit.
    """
    path = environment.setting("DTENSOR_PACKAGE")
    if path:
        strict = environment.setting("DTENSOR_PACKAGE_STRICT") == "1"
        load(path, strict=strict, sha256=environment.setting("DTENSOR_PACKAGE_SHA256"))


__all__ = ["load", "load_if_asked", "package", "packaging"]
