"""The `dtensor` command: parses arguments, runs the work, prints the results, and sets the exit code.

`dtensor demo` trains a small model sharded and compiled, and compares it with one process (see `demo`). It exits with 0
if all losses agree, 1 if they do not or a rank fails, and 2 on wrong arguments. `dtensor calibrate` measures the links
of this machine (see `calibration`), with the same exit codes. `dtensor operators` prints `docs/operators.md` (see
`dtensor.testing.rules.operators_page`). `dtensor checkpoint` is defined in `checkpoint_commands`, and the remaining
commands, such as `inspect`, `diff` and `check`, in `dtensor.compile.reports.commands`.
"""

import importlib.util
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import torch

from dtensor.compile.packages.commands import package_command
from dtensor.compile.reports.commands import COMMANDS

from .. import __version__
from ..prices.calibrated import links_path, read_links
from ..prices.links import Link
from ..testing import RankError
from ..testing.rules.operators_page import operators_page
from .calibration import BACKENDS as DEVICES
from .calibration import SIZES, CalibrationOptions, CalibrationOutcome, Fit, calibrate
from .checkpoint_commands import checkpoint
from .demo import (
    BACKENDS,
    BATCH,
    HEADS,
    SEQ,
    DemoOptions,
    DemoOutcome,
    DemoRun,
    default_text,
    demonstrate,
    under_torchrun,
)
from .demo_plans import PLANS
from .plan_command import plan_command
from .run_commands import COMMANDS as RUNS

if TYPE_CHECKING:
    pass

T = TypeVar("T")

SHORT = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS", "all_to_all": "A2A"}
"""Short names of the collectives, for the table."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Short names of the dtypes to compute in."""

BETWEEN = {"inter": "between hosts", "intra": "within a host"}
"""Kind of link -> its description."""

CONSTANTS = {
    "start": ("{:.3g} µs", 1e6, "to start a collective"),
    "alpha": ("{:.3g} µs", 1e6, "a round"),
    "bandwidth": ("{:.3g} GB/s", 1e-9, "on the wire"),
    "launch": ("{:.3g} µs", 1e6, "to start a local copy"),
    "memory": ("{:.3g} GB/s", 1e-9, "of a local copy"),
}
"""Constant of a link -> its format, the factor to the unit shown, and its description."""


PLAN_HELP = "; ".join(f"{name}: {plan.title}" for name, plan in PLANS.items()) + "."


@click.group()
@click.version_option(
    __version__, message=f"dtensor %(version)s (distribution dtensor-compile), torch {torch.__version__}"
)
def main() -> None:
    """A distributed tensor made for torch.compile."""


for _command in (*COMMANDS, *RUNS, checkpoint, package_command, plan_command):
    main.add_command(_command)


@main.command()
@click.option("--nproc", type=click.IntRange(min=1), help="Processes to start. Default: 2, or torchrun's.")
@click.option("--plan", type=click.Choice(tuple(PLANS)), default="tp", show_default=True, help=PLAN_HELP)
@click.option("--data", type=click.Path(path_type=Path), help="Text to train on. Default: Python's help topics.")
@click.option("--steps", type=click.IntRange(min=1), default=30, show_default=True, help="Training steps.")
@click.option("--backend", type=click.Choice(BACKENDS), default="dtensor", show_default=True, help="For torch.compile.")
@click.option("--dtype", type=click.Choice(tuple(DTYPES)), default="fp32", show_default=True, help="For computation.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Image file for the loss curves.")
@click.option("--layers", type=click.IntRange(min=1), default=2, show_default=True, help="Layers of the model.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the model and the batches.")
@click.option("--timeout", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Seconds in total.")
def demo(
    nproc: int | None,
    plan: str,
    data: Path | None,
    steps: int,
    backend: str,
    dtype: str,
    plot: Path | None,
    layers: int,
    seed: int,
    timeout: float,
) -> None:
    """Train a byte-level Transformer on one process, sharded, and sharded and compiled, and compare the three.

    The command starts the processes itself. Under torchrun it joins the existing ones:
    torchrun --nproc-per-node 2 -m dtensor demo
    """
    text = _text(data)
    _check_plot(plot)
    options = DemoOptions(_processes(nproc, plan), plan, text, steps, backend, layers, seed, timeout, DTYPES[dtype])
    outcome = _carried_out(lambda: demonstrate(options))
    if outcome is None:
        return
    click.echo(report(options, outcome))
    if plot is not None:
        _draw(outcome.runs, plot)
    if not outcome.good:
        raise SystemExit(1)


class Sizes(click.ParamType):
    """Numbers of bytes, separated by commas."""

    name = "bytes,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        words = str(value).split(",")
        if len(words) < 2 or not all(word.strip().isdecimal() and int(word) > 0 for word in words):
            self.fail(f"{value!r} is not two or more numbers of bytes; write e.g. 1024,65536,1048576", param, ctx)
        return tuple(int(word) for word in words)


@main.command("calibrate")
@click.option("--nproc", type=click.IntRange(min=2), help="Processes to start. Default: 2, or torchrun's.")
@click.option("--device", type=click.Choice(tuple(DEVICES)), default="cpu", show_default=True, help="Device type.")
@click.option("--sizes", type=Sizes(), default=",".join(map(str, SIZES)), show_default=True, help="Buffers in bytes.")
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True, help="Measurements of each call.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Image file: measured and fitted times.")
@click.option("--timeout", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Seconds in total.")
def calibrate_command(
    nproc: int | None, device: str, sizes: tuple[int, ...], rounds: int, plot: Path | None, timeout: float
) -> None:
    """Measure the cost of collectives and of computing on this machine, and save it for planning.

    The constants are saved in ~/.cache/dtensor/links.json (DTENSOR_LINKS names another file). dtensor.prepare and
    dtensor.init_device_mesh read that file on the first rank of a mesh, and all ranks plan with its constants. The
    command starts the processes itself. Under torchrun, for example on several hosts, it joins the existing ones:
    torchrun --nnodes 2 --nproc-per-node 8 ... -m dtensor calibrate --device cuda
    """
    _check_plot(plot)
    nproc = _world(nproc)
    if device == "cuda" and torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", nproc)):
        raise click.UsageError(
            f"--device cuda takes a GPU for each process, but this machine has {torch.cuda.device_count()}; "
            "write a lower --nproc, or --device cpu"
        )
    _check_links_file()
    options = CalibrationOptions(nproc, device, sizes, rounds, timeout)
    outcome = _carried_out(lambda: calibrate(options))
    if outcome is None:
        return
    click.echo(calibrated(options, outcome))
    if plot is not None:
        _draw_fits(outcome.fits, plot)


@main.command()
def operators() -> None:
    """Print, as Markdown, how each operator of aten runs on DTensors."""
    click.echo(operators_page(), nl=False)


def _carried_out(work: Callable[..., Any]) -> Any:
    """Return the result of `work`; turn the failure of a rank and a timeout into errors of the command."""
    try:
        return work()
    except RankError as error:
        raise click.ClickException(str(error)) from error
    except TimeoutError as error:  # the stacks in its message have been printed already
        raise click.ClickException(f"{str(error).splitlines()[0]}; --timeout SECONDS gives more time") from error


def _check_links_file() -> None:
    """Raise if the results could not be saved, before the measurement, which takes long."""
    path = links_path()
    if path is None:
        return
    try:
        read_links(path)
        path.parent.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _world(nproc: int | None) -> int:
    """Return the number of ranks: torchrun's, else `nproc`, else 2."""
    if under_torchrun():
        world = int(os.environ["WORLD_SIZE"])
        if nproc not in (None, world):
            raise click.UsageError(f"--nproc {nproc} given, but torchrun has started {world}; leave --nproc out")
        nproc = world
    return 2 if nproc is None else nproc


def _processes(nproc: int | None, plan: str) -> int:
    nproc = _world(nproc)
    if not _divides(plan, nproc):
        least = [n for n in range(1, 17) if _divides(plan, n)]
        raise click.UsageError(
            f"{nproc} processes cannot share {HEADS} attention heads and {BATCH} sequences evenly under plan {plan}; "
            f"write --nproc {', '.join(map(str, least[:-1]))} or {least[-1]}"
        )
    return nproc


def _divides(plan: str, nproc: int) -> bool:
    batch, layers = PLANS[plan].parts(nproc)
    return HEADS % layers == 0 and BATCH % batch == 0


def _text(path: Path | None) -> bytes:
    """Return the bytes to train on: those of `path`, or the default text."""
    given = path or default_text()
    if given is None:
        raise click.UsageError("this Python ships no help topics to train on; write --data FILE with your own text")
    try:
        text = given.read_bytes()
    except OSError as error:
        raise click.BadParameter(f"cannot read {given}: {error.strerror}", param_hint="--data") from error
    if len(text) < SEQ + 1:
        raise click.BadParameter(
            f"{given} has {len(text)} bytes, but a sequence and its next byte take {SEQ + 1}; give a longer text",
            param_hint="--data",
        )
    return text


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib; write: pip install 'dtensor-compile[plot]'")
    if not plot.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {plot.absolute().parent} to write to", param_hint="--plot")


def report(options: DemoOptions, outcome: DemoOutcome) -> str:
    """Return the text that `dtensor demo` prints."""
    rows = [
        ("", "loss", "", "tokens/s", "collectives", "", "bytes sent", ""),
        ("", "first", "last", "", "forward", "backward", "forward", "backward"),
        *map(_row, outcome.runs),
    ]
    agree = "agree" if outcome.difference <= outcome.tolerance else "DISAGREE"
    lines = [
        f"{outcome.parameters:,} parameters in {options.layers} layers, {options.steps} steps on {len(options.data):,} "
        f"bytes of text, {options.nproc} processes, plan {options.plan}, backend {options.backend}{_dtype(options)}",
        "",
        *_aligned(rows),
        "",
        "Collectives, and the bytes that a rank sends in them, are counted in one step; "
        + ", ".join(f"{short} {op}" for op, short in SHORT.items())
        + ".",
        f"The losses {agree}: at most {outcome.difference:.1e} apart (tolerance {outcome.tolerance:.0e}).",
        f"Graphs of the compiled step: {outcome.graphs}; graph breaks: {outcome.graph_breaks}.",
    ]
    return "\n".join(lines)


def _dtype(options: DemoOptions) -> str:
    return "" if options.dtype == "float32" else f", computed in {options.dtype}"


def _row(run: DemoRun) -> tuple[str, ...]:
    counts, sent = zip(*[found or (None, None) for found in (run.traffic.forward, run.traffic.backward)])
    figures = [*map(_counted, counts), *("-" if n is None else f"{n:,}" for n in sent)]
    return (run.name, f"{run.losses[0]:.4f}", f"{run.losses[-1]:.4f}", f"{run.speed:,.0f}", *figures)


def _counted(collectives: Counter[str] | None) -> str:
    """Format counts of collectives as, for example, "1 AG + 5 AR"."""
    if collectives is None:
        return "-"
    return " + ".join(f"{n} {SHORT[op]}" for op, n in sorted(collectives.items())) or "none"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Return the rows as lines with aligned columns: the first to the left, the others to the right."""
    first, *others = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join([row[0].ljust(first), *[cell.rjust(n) for cell, n in zip(row[1:], others)]]).rstrip() for row in rows
    ]


def _draw(runs: tuple[DemoRun, ...], path: Path) -> None:
    """Write the loss curves to `path`, in the image format of its suffix."""
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(layout="constrained")
    axes = figure.subplots()
    for run, style in zip(runs, ("-", "--", ":")):
        axes.plot(range(1, len(run.losses) + 1), run.losses, style, label=run.name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.legend()
    _write(figure, path, "loss curves")


def calibrated(options: CalibrationOptions, outcome: CalibrationOutcome) -> str:
    """Return the text that `dtensor calibrate` prints."""
    lines = []
    for fit in outcome.fits:
        rows = [("", "bytes", "measured", "fitted", "error")]
        for t in fit.timings:
            measured, fitted = (f"{x * 1e6:,.1f} µs" for x in (t.seconds, fit.fitted(t)))
            rows.append((t.op, f"{t.size:,}", measured, fitted, f"{100 * fit.error(t):+.0f} %"))
        lines += [
            f"{outcome.key}, {fit.timings[0].n} ranks, {BETWEEN[fit.kind]}; {options.rounds} rounds on the "
            "slowest rank",
            "",
            *_aligned(rows),
            "",
            *_constants(fit.link),
            "",
        ]
    if (m := outcome.machine) is not None:
        lines += [
            f"A rank computes {m.flops / 1e9:.0f} GFLOP/s in float32 and {m.half / 1e9:.0f} in bfloat16, and moves "
            f"{m.memory / 1e9:.1f} GB/s; a Transformer's layer reaches {m.efficiency:.0%} of what follows from that.",
            "",
        ]
    kept = f"saved in {outcome.path}" if outcome.path else "not saved, because DTENSOR_LINKS is empty"
    return "\n".join([*lines, f"The constants are {kept}."])


def _constants(link: Link) -> list[str]:
    return [
        f"{name:<10}{text.format(getattr(link, name) * factor):>10}  {what}"
        for name, (text, factor, what) in CONSTANTS.items()
    ]


def _draw_fits(fits: tuple[Fit, ...], path: Path) -> None:
    """Plot measured (points) and fitted times (lines) over bytes, one plot for each link, and write them to `path`."""
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(layout="constrained", figsize=(7 * len(fits), 5))
    for axes, fit in zip(figure.subplots(1, len(fits), squeeze=False)[0], fits):
        for i, op in enumerate(dict.fromkeys(t.op for t in fit.timings)):
            mine = [t for t in fit.timings if t.op == op]
            at = [t.size for t in mine]
            axes.plot(at, [t.seconds * 1e6 for t in mine], "o", color=f"C{i}")
            axes.plot(at, [fit.fitted(t) * 1e6 for t in mine], "-", color=f"C{i}", label=op)
        axes.set(xscale="log", yscale="log", xlabel="buffer (bytes)", ylabel="time (µs)", title=BETWEEN[fit.kind])
        axes.legend()
    _write(figure, path, "fits")


def _write(figure: Any, path: Path, what: str) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"the {what} cannot be written to {path}: {error}") from error
    click.echo(f"The {what} are in {path}.")


__all__ = ["calibrated", "main", "report"]
