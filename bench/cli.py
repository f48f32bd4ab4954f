"""The command line: `python -m bench [CASE…]` runs cases, `python -m bench table FILE…` shows their results."""

import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import click
import torch

from . import plots, record, table
from .caches import cold_caches
from .cases import BY_DEFAULT, CASES
from .effort import LEVELS, Effort
from .sides import reason


class Runs(click.Group):
    """A group whose command is `run` if none is given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=Runs, help=__doc__)
def main() -> None:
    pass


def _listed() -> str:
    return "\n".join(f"  {name:<13}{case.words}" for name, case in CASES.items())


@main.command(help="Run the given cases, or all but the long ones.\n\n\b\n" + _listed())
@click.argument("cases", nargs=-1, type=click.Choice(list(CASES)))
@click.option("--quick", "level", flag_value="quick", default="quick", help="The default; up to an hour in all.")
@click.option("--full", "level", flag_value="full", help="All models and sizes, and the long cases.")
@click.option("--tiny", "level", flag_value="tiny", help="Only tests that cases run; figures mean nothing.")
@click.option("--only", multiple=True, help="Run only jobs with this text in their name; may be repeated.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Append the records, as JSON lines.")
@click.option("--quiet", is_flag=True, help="No progress bars.")
def run(cases: tuple[str, ...], level: str, only: tuple[str, ...], out: Path | None, quiet: bool) -> None:
    assert level in LEVELS
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    effort, found = Effort(level, quiet=quiet, only=only), []
    with cold_caches():
        failed = [n for n in cases or _chosen(level) if not _run(n, effort, out, found)]
    click.echo(table.markdown(found))
    if failed:
        raise click.ClickException(f"cases that failed: {', '.join(failed)}; see their notes above")


def _chosen(level: str) -> list[str]:
    return [n for n in CASES if n in BY_DEFAULT or level == "full"]


def _run(name: str, effort: Effort, out: Path | None, found: list[record.Record]) -> bool:
    """Run a case, and keep and write its records as they come. If it fails, add a record of that and return False."""

    def keep(made: record.Record) -> None:
        found.append(record.stamped(made))
        if out is not None:
            with out.open("a") as file:
                file.write(record.line(found[-1]) + "\n")

    try:
        for made in CASES[name].run(effort):
            keep(made)
    except Exception as error:  # the other cases run nevertheless
        click.echo(traceback.format_exc(), err=True)
        keep(record.Setting(name).missing("all", reason(record.OURS, error)))
        return False
    return True


@main.command("table", help="Show the records in FILES as markdown tables and plots; the last of a figure counts.")
@click.argument("files", nargs=-1, required=True, type=click.File())
@click.option("--plots", "folder", type=click.Path(file_okay=False, path_type=Path), help="Write a plot for each case.")
def show(files: tuple[Any, ...], folder: Path | None) -> None:
    try:
        records = [r for file in files for r in record.read(file)]
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    pictures = plots.draw(records, folder) if folder is not None else {}
    sys.stdout.write(table.markdown(records, pictures))


__all__ = ["main"]
