"""The commands that look into compiled programs: `dtensor inspect`, `report`, `diff` and `check`.

They run the program or read a dump, print, and set the exit code: 0 where all is well, 1 where a program fails,
dumps differ or communicate more than the lock says, 2 on wrong arguments.
"""

import os
import re
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import click

from . import lockfile
from .differences import differences
from .inspection import clear, imagined, inspect, wait_for_others
from .page import write_page
from .summary import MOST, step_line, summary

OUTPUT = "dtensor-dump"
"""The folder that `inspect` writes to where none is named."""

RUNS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""What follows the program's name is the program's."""


class Mesh(click.ParamType):
    """Sizes of axes: `dp=128,tp=8`."""

    name = "axis=size,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        if isinstance(value, dict):
            return value
        found = [re.fullmatch(r"(\w+)=([1-9]\d*)", word.strip()) for word in str(value).split(",")]
        if not all(found) or len({m[1] for m in found if m}) < len(found):
            self.fail(f"{value!r} does not give sizes to axes; write such as dp=128,tp=8", param, ctx)
        return {m[1]: int(m[2]) for m in found if m}


@click.command("inspect", context_settings=RUNS)
@click.option("--output", "-o", type=click.Path(path_type=Path), default=OUTPUT, show_default=True, help="Folder.")
@click.option("--nproc", type=click.IntRange(min=1), help="Start so many processes, with torchrun.")
@click.option("--mesh", type=Mesh(), help="Sizes of a mesh that is not there; one process stands for all.")
@click.option("--dynamic", is_flag=True, help="Symbolic sizes, so that costs are formulas in them.")
@click.option("--most", type=click.IntRange(min=1), default=MOST, show_default=True, help="Collectives to name.")
@click.argument("script", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def inspect_command(
    output: Path,
    nproc: int | None,
    mesh: dict[str, int] | None,
    dynamic: bool,
    most: int,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT with its arguments, and show what its compiled code communicates.

    Any program that calls torch.compile. Under torchrun: torchrun --nproc-per-node 2 -m dtensor inspect SCRIPT.
    Graphs, guards, breaks and an index.html are in the folder afterwards.
    """
    if nproc is not None and (mesh is not None or "RANK" in os.environ):
        raise click.UsageError("--nproc starts processes, which --mesh and torchrun do without; leave it out")
    rank = int(os.environ.get("RANK", "0"))
    try:
        clear(output, rank)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--output") from error
    if nproc is not None:
        options = ["-o", str(output), *(["--dynamic"] if dynamic else []), "--most", str(most)]
        _start(nproc, ["inspect", *options, str(script), *arguments])
        return
    with imagined(mesh) if mesh else nullcontext():
        inspect(script, arguments, output, dynamic)
    if rank == 0:
        show(output, most, mesh)


def show(folder: Path, most: int, mesh: dict[str, int] | None = None) -> None:
    """Write the page of a dump, and print its summary."""
    if mesh is None and not wait_for_others(folder, int(os.environ.get("WORLD_SIZE", "1"))):
        click.echo("Some ranks have not ended; the page lacks them.", err=True)
    _reported(folder, most, step_line(folder, mesh) if mesh is not None else "")


def _reported(folder: Path, most: int, more: str = "") -> None:
    try:
        click.echo(summary(folder, most) + more)
        click.echo(f"\nThe page with all of it: {write_page(folder)}")
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _start(nproc: int, arguments: list[str]) -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    done = subprocess.run([*run, "-m", "dtensor", *arguments], check=False)
    if done.returncode:
        raise SystemExit(1)


@click.command("report")
@click.option("--most", type=click.IntRange(min=1), default=MOST, show_default=True, help="Collectives to name.")
@click.argument("folder", type=click.Path(path_type=Path))
def report_command(folder: Path, most: int) -> None:
    """Show what is in a dump that options={"dump": FOLDER} or DTENSOR_DUMP=FOLDER left, and write its page."""
    _reported(folder, most)


@click.command("diff")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
def diff_command(a: Path, b: Path) -> None:
    """Show what differs between two dumps, or two files or folders of dumps: versions, ranks, passes."""
    try:
        lines = list(differences(a, b))
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    for line in lines:
        click.echo(line)
    if lines:
        raise SystemExit(1)


@click.command("check", context_settings=RUNS)
@click.option("--dump", "folder", type=click.Path(path_type=Path), help="A dump to check, in place of a run.")
@click.option("--write", is_flag=True, help="Write the lock anew.")
@click.argument("lock", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("script", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def check_command(
    folder: Path | None, write: bool, lock: Path, script: Path | None, arguments: tuple[str, ...]
) -> None:
    """Fail if SCRIPT, or a dump of it, sends collectives that LOCK does not have; print them.

    For a user's CI: `dtensor check --write manifest.lock SCRIPT` once, and without --write from then on. Under torchrun
    the first rank compares.
    """
    if (folder is None) == (script is None):
        raise click.UsageError("give a SCRIPT to run, or --dump FOLDER with a dump of it")
    with tempfile.TemporaryDirectory() as scratch:
        root = folder or Path(scratch)
        if script is not None:
            inspect(script, arguments, root)
        if int(os.environ.get("RANK", "0")) == 0:
            _compare(lock, root, write)


def _compare(lock: Path, root: Path, write: bool) -> None:
    try:
        if write:
            lock.write_text(lockfile.locked(root), encoding="utf-8")
            click.echo(f"{lock} is written.")
            return
        found = lockfile.check(lock, root)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    for text in found.gone:
        click.echo(f"less than in the lock: {text}")
    for text in found.added:
        click.echo(f"MORE than in the lock: {text}")
    if found.added:
        click.echo(f"If that is meant: dtensor check --write {lock} ...")
        raise SystemExit(1)
    click.echo(f"Nothing is sent that {lock} does not have.")


COMMANDS = (inspect_command, report_command, diff_command, check_command)
"""What the `dtensor` command takes in."""

__all__ = ["COMMANDS", "show"]
