"""Runs a program to inspect it: as it is, or as one rank of a simulated mesh.

The program runs in this process as if Python had been started with it, and everything it compiles is dumped. It need
not use this library. For a simulated mesh see `recording.imagined`.
"""

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from dtensor.errors import ArgumentError
from dtensor.program.files import write_whole
from dtensor.torch_private.compiling import symbolic_sizes

from ..recording.folder import rank_folder
from ..recording.imagined import run_script
from ..recording.watch_compiles import dump
from .measuring import MeasuredSteps, measuring

DONE = "finished.txt"
"""The file that a rank writes when its program has finished."""

PATIENCE = 30.0
"""How many seconds the first rank waits for the files of the others."""


def inspect(
    script: Path, arguments: Sequence[str], folder: Path, dynamic: bool = False, measure: int = 0
) -> MeasuredSteps | None:
    """Run a program and dump what it compiles.

    Args:
        script: path of the program.
        arguments: its command line arguments.
        folder: folder of the dump.
        dynamic: whether to make sizes symbolic, so that costs are formulas in them.
        measure: number of steps to measure (`dtensor.compile.reports.measuring`).

    Returns:
        What was measured; None if nothing was to be.

    Raises:
        SystemExit: the program exits with an error.
    """
    with dump(folder) as root, symbolic_sizes(dynamic):
        try:
            with measuring(measure, root) as steps:
                run_script(script, arguments)
        finally:
            own = rank_folder(root)
            own.mkdir(parents=True, exist_ok=True)
            write_whole(own / DONE, "")
    return steps


def clear(folder: Path, rank: int) -> None:
    """Remove what an earlier run of this rank left; the first rank also removes the page and the folders of ranks
    beyond the current number.

    Raises:
        ValueError: the folder holds something that is not part of a dump.
    """
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"{folder} is a file; write the folder of a dump")
    kinds = list(folder.iterdir()) if folder.exists() else []
    strange = [p.name for p in kinds if not p.name.startswith("rank") and p.name != "index.html"]
    if strange:
        raise ArgumentError(
            f"{folder} holds {strange[0]}, which is not part of a dump; write another or an empty folder"
        )
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


__all__ = ["clear", "inspect", "wait_for_others"]
