"""Runs a program to inspect it: as it is, or as one rank of a simulated mesh.

The program runs in this process as if Python had been started with it, and everything it compiles is dumped. It need
not use this library. For a simulated mesh, the process group is a fake in which only rank 0 exists. Whatever the
program passes to `init_process_group` and `init_device_mesh`, named axes get the given sizes. Values are then
meaningless; graphs, bytes and estimates are those of that mesh.
"""

import math
import os
import runpy
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh

from dtensor.mesh import mesh as meshes
from dtensor.torch_private.compiling import symbolic_sizes
from dtensor.torch_private.core import fake_store

from ..recording.folder import rank_folder, write_whole
from ..recording.watch_compiles import dump

DONE = "finished.txt"
"""The file that a rank writes when its program has finished."""

PATIENCE = 30.0
"""How many seconds the first rank waits for the files of the others."""

PER_HOST = 8
"""Ranks per host of a simulated mesh."""


def inspect(script: Path, arguments: Sequence[str], folder: Path, dynamic: bool = False) -> None:
    """Run a program and dump what it compiles.

    Args:
        script: path of the program.
        arguments: its command line arguments.
        folder: folder of the dump.
        dynamic: whether to make sizes symbolic, so that costs are formulas in them.

    Raises:
        SystemExit: the program exits with an error.
    """
    with dump(folder) as root, symbolic_sizes(dynamic):
        try:
            _run(script, arguments)
        finally:
            own = rank_folder(root)
            own.mkdir(parents=True, exist_ok=True)
            write_whole(own / DONE, "")


def _run(script: Path, arguments: Sequence[str]) -> None:
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
def imagined(sizes: Mapping[str, int]) -> Iterator[None]:
    """Make this process rank 0 of a simulated mesh whose axes have these sizes; other axes keep theirs.

    Raises:
        ValueError: in `init_device_mesh`, if the mesh has none of the named axes or more ranks than `sizes` gives.
    """
    world = math.prod(sizes.values())
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(min(world, PER_HOST))}
    init, make = dist.init_process_group, device_mesh.init_device_mesh

    def init_process_group(*_: Any, **__: Any) -> None:
        init("fake", rank=0, world_size=world, store=fake_store())

    def init_device_mesh(device_type: str, mesh_shape: tuple[int, ...], **options: Any) -> Any:
        names = options.get("mesh_dim_names") or ()
        shape = tuple([sizes.get(name, n) for name, n in zip(names, mesh_shape)]) if names else tuple(mesh_shape)
        if not set(names) & set(sizes) or math.prod(shape) > world:
            raise ValueError(
                f"the program makes a mesh {dict(zip(names, shape)) or shape}, which does not fit {dict(sizes)}; "
                "write mesh_dim_names with the names that --mesh gives sizes to"
            )
        return make(device_type, shape, **options)

    places = [(m, "init_process_group", init_process_group) for m in (dist, dist.distributed_c10d)]
    places += [(m, "init_device_mesh", init_device_mesh) for m in (dist, device_mesh)]
    places.append((meshes, "torch_init_device_mesh", init_device_mesh))
    before = [(m, name, getattr(m, name)) for m, name, _ in places]
    environment = {name: os.environ.get(name) for name in ranks}
    os.environ.update(ranks)
    for m, name, new in places:
        setattr(m, name, new)
    try:
        yield
    finally:
        for m, name, old in before:
            setattr(m, name, old)
        for name, value in environment.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def clear(folder: Path, rank: int) -> None:
    """Remove what an earlier run of this rank left; the first rank also removes the page and the folders of ranks
    beyond the current number.

    Raises:
        ValueError: the folder holds something that is not part of a dump.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; write the folder of a dump")
    kinds = list(folder.iterdir()) if folder.exists() else []
    strange = [p.name for p in kinds if not p.name.startswith("rank") and p.name != "index.html"]
    if strange:
        raise ValueError(f"{folder} holds {strange[0]}, which is not part of a dump; write another or an empty folder")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    for path in kinds:
        if path.name == f"rank{rank}" or (rank == 0 and not path.is_dir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif rank == 0 and path.name.removeprefix("rank").isdecimal() and int(path.name[4:]) >= world:
            shutil.rmtree(path)


def wait_for_others(folder: Path, world: int) -> bool:
    """Wait until all ranks have written their files; return whether they have."""
    end = time.monotonic() + PATIENCE
    while not all((folder / f"rank{r}" / DONE).exists() for r in range(world)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


__all__ = ["clear", "imagined", "inspect", "wait_for_others"]
