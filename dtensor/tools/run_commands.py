"""The commands `dtensor record`, `dtensor compare` and `dtensor trace`."""

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

import click

from dtensor.compile.bisect import RunFailed, bisect
from dtensor.compile.reports.comparison_page import write_comparison

from ..errors import RecordError
from ..runs.comparing.comparison import check
from ..runs.comparing.comparison import compare as compared
from ..runs.comparing.report import first, report, report_of_one
from ..runs.comparing.values import load
from ..runs.records.recorder import rank_and_world
from ..runs.records.recording import record_from_now_on
from ..runs.records.storage import path_of, refuse_earlier
from ..runs.traces.trace import merge_traces
from ..runs.traces.trace import trace as traced

SHOWN = 25
"""Lines of a failed run's output that are shown."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--steps", type=click.IntRange(min=1), default=1, show_default=True, help="Steps of the optimizer.")
@click.option("--values", default="", help="Keep whole values of these operators: a pattern of phase/module/operator.")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def record(steps: int, values: str, folder: Path, script: str, args: tuple[str, ...]) -> None:
    """Run SCRIPT with ARGS, and record in FOLDER what every operator of its first steps computes.

    Recording begins with the first call of a model. Under torchrun each rank writes a file of its own:
    torchrun --nproc-per-node 2 -m dtensor record FOLDER script.py
    """
    try:
        refuse_earlier(folder, path_of, *rank_and_world())
    except RecordError as error:
        raise click.ClickException(str(error)) from error
    record_from_now_on(folder, steps=steps, values=values)
    _run(script, args)


def _run(script: str, args: Sequence[str]) -> None:
    sys.argv = [script, *args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--skip", type=click.IntRange(min=0), default=2, show_default=True, help="Steps that pass before.")
@click.option("--steps", type=click.IntRange(min=1), default=1, show_default=True, help="Steps of the optimizer.")
@click.option("--merge", "merges", is_flag=True, help="Write one trace of those that ranks have left in FOLDER.")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.argument("script", type=click.Path(exists=True, dir_okay=False), required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def trace(skip: int, steps: int, merges: bool, folder: Path, script: str | None, args: tuple[str, ...]) -> None:
    """Run SCRIPT with ARGS, and leave a trace of some of its steps in FOLDER, for Perfetto.

    Collectives have names in it: placements, mesh axis, module or parameter, and the line of the program. Under
    torchrun each rank writes a file, and the last one trace.json, with all of them:
    torchrun --nproc-per-node 2 -m dtensor trace FOLDER script.py
    """
    if merges == (script is not None):
        raise click.UsageError("give a SCRIPT to run, or --merge and the FOLDER of the ranks' traces")
    try:
        if script is None:
            click.echo(f"The trace: {merge_traces(folder)}")
            return
        tracing = traced(folder, skip=skip, steps=steps)
        tracing.__enter__()
    except (RecordError, OSError) as error:
        raise click.ClickException(str(error)) from error
    try:
        _run(script, args)
    finally:
        tracing.__exit__(*sys.exc_info())
    if tracing.path is not None:
        click.echo(f"The trace: {tracing.path}, for https://ui.perfetto.dev")
    elif not tracing.is_written:
        raise click.ClickException(f"the program took no more than {skip} steps, which were skipped; write --skip 0")


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--bisect", "bisects", is_flag=True, help="Find out which pass makes a compiled run differ.")
@click.option("--nproc", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks to bisect on.")
@click.option("--steps", type=click.IntRange(min=1), default=1, show_default=True, help="Steps to bisect.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default="bisect", help="What it leaves.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page of the comparison there.")
@click.argument("given", nargs=-1, type=click.UNPROCESSED, metavar="A [B] | --bisect SCRIPT [ARGS]")
def compare(bisects: bool, nproc: int, steps: int, out: Path, html: Path | None, given: tuple[str, ...]) -> None:
    """Compare two records, and name the first operator whose difference rounding does not explain.

    A is the reference, such as the run on one device. Of one record alone, name the first redistribution that changed a
    tensor, ranks that should hold the same and do not, and the first operator that made a NaN. The exit code is 0 if
    nothing was found, 1 if something was, and 2 if a record cannot be read. With --html, all values of two records,
    their differences and bounds are in one file for a browser.

    With --bisect, run SCRIPT again and again by itself, on --nproc ranks: eager, then with more and more of it compiled
    and with passes left out. The first pass that makes a difference is named, or AOTAutograd, or Inductor; a graph that
    shows it and runs alone is left in the folder --out.
    """
    if bisects:
        if html is not None:
            raise click.UsageError("--html shows two records; write dtensor compare A B --html FILE")
        _bisect(given, nproc, steps, out)
        return
    if len(given) not in (1, 2):
        raise click.UsageError(
            f"compare takes the folders of two records, or of one, and got {len(given)} names; write dtensor compare A "
            "B, or dtensor compare --bisect script.py"
        )
    try:
        runs = [load(folder) for folder in given]
    except RecordError as error:
        raise click.UsageError(str(error)) from error
    found = check(*runs) if len(runs) == 1 else compared(*runs)
    click.echo(report_of_one(found) if len(runs) == 1 else report(found))
    if html is not None and len(runs) == 2:
        try:
            write_comparison(html, found)
        except OSError as error:
            raise click.BadParameter(f"{html} cannot be written: {error.strerror}", param_hint="--html") from error
    if found.findings:
        raise SystemExit(1)


def _bisect(given: Sequence[str], nproc: int, steps: int, out: Path) -> None:
    if not given or not Path(given[0]).is_file():
        raise click.UsageError(f"--bisect takes a script, got {given[0] if given else 'nothing'}; write its path")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="runs_", dir=out) as folder:
        runs = _Runs(nproc, steps, Path(folder).absolute())
        try:
            blame = bisect(Path(given[0]), given[1:], out, run=runs.run, differs=runs.differs)
        except RunFailed as error:
            raise click.ClickException(f"the eager run fails, so there is nothing to compare with: {error}") from error
    click.echo(str(blame))
    if blame.who != "nobody":
        raise SystemExit(1)


class _Runs:
    """Runs a script in processes of its own and compares the records. Each run is told to the terminal."""

    def __init__(self, nproc: int, steps: int, folder: Path) -> None:
        self.nproc, self.steps, self.folder, self.numbers = nproc, steps, folder, count()

    def run(self, script: Path, arguments: Sequence[str], variables: Mapping[str, str]) -> Path:
        """As `dtensor.compile.bisect.BisectRun`."""
        record_to = self.folder / f"run{next(self.numbers)}"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.nproc)]
        command = [*(launcher if self.nproc > 1 else []), "-m", "dtensor", "record", "--steps", str(self.steps)]
        said = ", ".join([f"{name}={value}" for name, value in variables.items()])
        click.echo(f"running with {said}", err=True)
        done = subprocess.run(
            [sys.executable, *command, str(record_to), str(script), *arguments],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RunFailed("\n".join((done.stdout + done.stderr).splitlines()[-SHOWN:]))
        return record_to

    def differs(self, reference: Path, run: Path) -> str | None:
        """As `dtensor.compile.bisect.Comparison`."""
        found = compared(load(reference), load(run))
        return first(found) if found.findings else None


COMMANDS = (record, compare, trace)

__all__ = ["COMMANDS"]
