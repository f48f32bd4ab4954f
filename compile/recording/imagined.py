"""Runs a program as if Python had been started with it; and as rank 0 of a mesh of which no other rank exists.

The process group of such a mesh is a fake. Whatever the program passes to `init_process_group` and `init_device_mesh`,
named axes get the given sizes. Values are then meaningless; what is compiled, its bytes and its estimates are not.
"""

import math
import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from dtensor.errors import ArgumentError
from dtensor.mesh import mesh as meshes
from dtensor.torch_private.core import fake_store, played_by_fakes

PER_HOST = 8
"""Ranks per host of a simulated mesh."""


def run_script(script: Path, arguments: Sequence[str]) -> None:
    """Run a program in this process.

    Raises:
        SystemExit: it exits with an error.
    """
    argv, path = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.argv, sys.path[:] = argv, path


@contextmanager
def imagined(sizes: Mapping[str, int], *, as_backend: bool = False) -> Iterator[None]:
    """Make this process rank 0 of a simulated mesh whose axes have these sizes; other axes keep theirs.

    Args:
        sizes: axis -> number of ranks.
        as_backend: whether to compile as for a rank of a job: collectives for the backend that the program names, such
            as "gloo" or "nccl", whose place the fake takes; and kernels for as many threads as torchrun gives a rank,
            OMP_NUM_THREADS or else one.

    Raises:
        ValueError: in `init_device_mesh`, if the mesh has none of the named axes or more ranks than `sizes` gives.
    """
    world = math.prod(sizes.values())
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(min(world, PER_HOST))}
    init, make = dist.init_process_group, device_mesh.init_device_mesh

    def init_process_group(backend: Any = None, *_: Any, **__: Any) -> None:
        if as_backend:
            played_by_fakes(str(backend or ""))
        init("fake", rank=0, world_size=world, store=fake_store())

    def init_device_mesh(device_type: str, mesh_shape: tuple[int, ...], **options: Any) -> Any:
        names = options.get("mesh_dim_names") or ()
        shape = tuple([sizes.get(name, n) for name, n in zip(names, mesh_shape)]) if names else tuple(mesh_shape)
        if not set(names) & set(sizes) or math.prod(shape) > world:
            raise ArgumentError(
                f"the program makes a mesh {dict(zip(names, shape)) or shape}, which does not fit {dict(sizes)}; "
                "write mesh_dim_names with the names that --mesh gives sizes to"
            )
        return make(device_type, shape, **options)

    places = [(m, "init_process_group", init_process_group) for m in (dist, dist.distributed_c10d)]
    places += [(m, "init_device_mesh", init_device_mesh) for m in (dist, device_mesh)]
    places.append((meshes, "torch_init_device_mesh", init_device_mesh))
    before = [(m, name, getattr(m, name)) for m, name, _ in places]
    environment, threads = {name: os.environ.get(name) for name in ranks}, torch.get_num_threads()
    if as_backend:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    os.environ.update(ranks)
    for m, name, new in places:
        setattr(m, name, new)
    try:
        yield
    finally:
        for m, name, old in before:
            setattr(m, name, old)
        played_by_fakes(None)
        torch.set_num_threads(threads)
        for name, value in environment.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


__all__ = ["imagined", "run_script"]
