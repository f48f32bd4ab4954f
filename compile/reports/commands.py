"""The commands that inspect compiled programs: `dtensor inspect`, `report`, `diff` and `check`.

They run a program or read a dump, print what they find, and set the exit code: 0 on success; 1 if the program fails,
dumps differ, or a dump communicates more than the lock allows; 2 for wrong arguments.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import click

from dtensor.program.files import write_whole

from ..recording.imagined import imagined
from ..recording.mesh_option import MeshOption
from . import lockfile
from .differences import differences
from .inspection import clear, inspect, wait_for_others
from .page import write_page
from .summary import MOST, step_line, summary

OUTPUT = "dtensor-dump"
"""The default folder that `inspect` writes to."""

RUNS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Click settings: everything after the name of the program belongs to the program."""


@click.command("inspect", context_settings=RUNS)
@click.option("--output", "-o", type=click.Path(path_type=Path), default=OUTPUT, show_default=True, help="Dump folder.")
@click.option("--nproc", type=click.IntRange(min=1), help="Number of processes to start with torchrun.")
@click.option("--mesh", type=MeshOption(), help="Axis sizes of a simulated mesh; one process runs as its rank 0.")
@click.option("--dynamic", is_flag=True, help="Make sizes symbolic, so that costs are formulas in them.")
@click.option("--most", type=click.IntRange(min=1), default=MOST, show_default=True, help="Collectives to name.")
@click.option("--measure", type=click.IntRange(min=0), default=0, help="Steps to measure, with torch.profiler.")
@click.argument("script", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def inspect_command(
    output: Path,
    nproc: int | None,
    mesh: dict[str, int] | None,
    dynamic: bool,
    most: int,
    measure: int,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT with its arguments, and show what its compiled code communicates.

    SCRIPT is any program that calls torch.compile. Under torchrun: torchrun --nproc-per-node 2 -m dtensor inspect
    SCRIPT. Graphs, guards, breaks and an index.html are in the output folder afterwards.

    With --measure, some steps run under torch.profiler, and what collectives took stands beside the estimates. A step
    ends where the program calls optimizer.step(); measured are those that follow one in which nothing was compiled.
    """
    if measure and mesh is not None:
        raise click.UsageError("--measure needs ranks that run, and --mesh simulates them; leave one of them out")
    if nproc is not None and (mesh is not None or "RANK" in os.environ):
        raise click.UsageError("--nproc starts processes, so it cannot be used with --mesh or torchrun; leave it out")
    rank = int(os.environ.get("RANK", "0"))
    try:
        clear(output, rank)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--output") from error
    if nproc is not None:
        options = ["-o", str(output), *(["--dynamic"] if dynamic else []), "--most", str(most)]
        options += ["--measure", str(measure)]
        _start(nproc, ["inspect", *options, str(script), *arguments])
        return
    with imagined(mesh) if mesh else nullcontext():
        steps = inspect(script, arguments, output, dynamic, measure)
    if rank == 0:
        show(output, most, mesh)
    if rank == 0 and steps is not None and steps.seen < measure:
        click.echo(
            f"{steps.seen} of {measure} steps were measured: a step is measured if it ends with optimizer.step() and "
            "nothing was compiled in the one before. Run more of them, or call dtensor.compile.measure(step).",
            err=True,
        )


def show(folder: Path, most: int, mesh: dict[str, int] | None = None) -> None:
    """Write the page of a dump and print its summary."""
    if mesh is None and not wait_for_others(folder, int(os.environ.get("WORLD_SIZE", "1"))):
        click.echo("Some ranks have not finished; the page does not include them.", err=True)
    _reported(folder, most, step_line(folder, mesh) if mesh is not None else "")


def _reported(folder: Path, most: int, more: str = "") -> None:
    try:
        click.echo(summary(folder, most) + more)
        click.echo(f"\nThe full report: {write_page(folder)}")
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
    """Summarize a dump written by options={"dump": FOLDER} or DTENSOR_DUMP=FOLDER, and write its page."""
    _reported(folder, most)


@click.command("diff")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
def diff_command(a: Path, b: Path) -> None:
    """Show the differences between two dumps, or between two files or folders of dumps: versions, ranks, passes."""
    try:
        lines = list(differences(a, b))
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    for line in lines:
        click.echo(line)
    if lines:
        raise SystemExit(1)


@click.command("check", context_settings=RUNS)
@click.option("--dump", "folder", type=click.Path(path_type=Path), help="Check this dump instead of running SCRIPT.")
@click.option("--write", is_flag=True, help="Write the lock.")
@click.argument("lock", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("script", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def check_command(
    folder: Path | None, write: bool, lock: Path, script: Path | None, arguments: tuple[str, ...]
) -> None:
    """Fail if SCRIPT, or a dump of it, sends collectives that are not in LOCK, and print them.

    For use in CI: run `dtensor check --write manifest.lock SCRIPT` once, and without --write from then on. Under
    torchrun the first rank compares.
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
            write_whole(lock, lockfile.locked(root))
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
        click.echo(f"If this is intended: dtensor check --write {lock} ...")
        raise SystemExit(1)
    click.echo(f"Nothing is sent that is not in {lock}.")


COMMANDS = (inspect_command, report_command, diff_command, check_command)
"""The commands that are added to `dtensor`."""

__all__ = ["COMMANDS", "show"]
