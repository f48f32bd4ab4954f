"""The commands `dtensor record` and `dtensor compare`."""

import os
import runpy
import sys
from pathlib import Path

import click

from ..errors import RecordError
from ..runs.comparing.comparison import compare as compared
from ..runs.comparing.report import report
from ..runs.comparing.values import load


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
    from ..runs.records.recorder import record_from_now_on

    record_from_now_on(folder, steps=steps, values=values)
    sys.argv = [script, *args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


@click.command()
@click.argument("a", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("b", type=click.Path(exists=True, file_okay=False, path_type=Path))
def compare(a: Path, b: Path) -> None:
    """Compare two records, and name the first operator whose difference rounding does not explain.

    A is the reference, such as the run on one device. The exit code is 0 if the runs agree, 1 if they do not, and 2 if
    a record cannot be read.
    """
    try:
        found = compared(load(a), load(b))
    except RecordError as error:
        raise click.UsageError(str(error)) from error
    click.echo(report(found))
    if found.findings:
        raise SystemExit(1)


COMMANDS = (record, compare)

__all__ = ["COMMANDS"]
