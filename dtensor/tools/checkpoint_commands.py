"""`dtensor checkpoint verify`, which checks that every byte of a checkpoint is as it was written."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ..state.checkpoints import checkpoints_in
from ..state.index import INDEX
from ..state.verify import verify


@click.group()
def checkpoint() -> None:
    """Inspect checkpoints that dtensor.Checkpoints has written."""


@checkpoint.command("verify")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def verify_command(folder: Path) -> None:
    """Read a checkpoint, or all checkpoints in FOLDER, and verify the checksums of all bytes.

    Exits with 0 if all checkpoints are complete and undamaged, with 1 if one is not, and with 2 if there is none.
    """
    found = {folder.name: folder} if (folder / INDEX).exists() else _by_step(folder)
    if not found:
        raise click.UsageError(f"{folder} is not a checkpoint and contains none; give a folder of checkpoints")
    damaged = 0
    for name, path in found.items():
        torn = verify(path, shown=lambda parts, name=name: _shown(parts, name))
        size = sum(p.stat().st_size for p in path.iterdir())
        click.echo(f"{name}: damaged: {torn}" if torn else f"{name}: whole, {size:,} bytes")
        damaged += bool(torn)
    if damaged:
        raise SystemExit(1)


def _by_step(folder: Path) -> dict[str, Path]:
    return {path.name: path for _, path in sorted(checkpoints_in(folder).items())}


def _shown(parts: list[Any], name: str) -> Iterator[Any]:
    with click.progressbar(parts, label=name, file=sys.stderr) as bar:
        yield from bar


__all__ = ["checkpoint"]
