"""The command `dtensor plan`."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import click
import torch

from dtensor.compile.recording.mesh_option import MeshOption
from dtensor.compile.reports.plan_page import write_page

from ..errors import PlacementError
from ..parallel.search.search import PER_HOST, search
from ..prices.links import INTER, INTRA, Link

EXAMPLE = "example"
"""The function of a script that returns a model and its inputs."""

_UNITS = {"": 1.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


class Bytes(click.ParamType):
    """An amount of bytes: `80GB`."""

    name = "bytes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"([\d.]+)\s*(|B|kB|MB|GB|TB)", str(value).strip())
        try:
            return float(found[1]) * _UNITS[found[2]] if found else self.fail(f"{value!r} is no size", param, ctx)
        except ValueError:
            self.fail(f"{value!r} is no size; write, for example, 80GB", param, ctx)


class Bandwidth(click.ParamType):
    """Bandwidths of links by axis: `dp=50GB,tp=300GB`, in bytes per second."""

    name = "axis=bytes,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, float]:
        if isinstance(value, dict):
            return value
        found: dict[str, float] = {}
        for word in str(value).split(","):
            axis, _, size = word.strip().partition("=")
            if not axis or not size:
                self.fail(f"{word!r} gives no bandwidth to an axis; write, for example, dp=50GB,tp=300GB", param, ctx)
            found[axis] = Bytes().convert(size, param, ctx)
        return found


@click.command("plan")
@click.option("--mesh", type=MeshOption(), required=True, help="Axis sizes of the mesh, which need not be there.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="Of the ranks.")
@click.option("--link", "links", type=Bandwidth(), default={}, help="Bytes per second that a rank sends along an axis.")
@click.option("--memory", type=Bytes(), help="Bytes that a rank may hold, such as 80GB.")
@click.option("--forward", is_flag=True, help="Only the forward, without gradients and optimizer.")
@click.option(
    "--gradients",
    type=click.Choice(["bfloat16", "float16"]),
    help="A dtype to which gradients of parameters may be rounded, to be sent in.",
)
@click.option("--what-if", is_flag=True, help="Also for faster links, twice the memory, and a batch that is not cut.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan there, as JSON.")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="Write the explanation there, as HTML.")
@click.argument("script", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def plan_command(
    mesh: dict[str, int],
    device: str,
    links: dict[str, float],
    memory: float | None,
    forward: bool,
    gradients: str | None,
    what_if: bool,
    out: Path | None,
    page: Path | None,
    script: Path,
) -> None:
    """Find the placements with which a step takes least time, and print why.

    SCRIPT defines a function example() that returns a model, as written for one device, and the inputs of its forward
    for a whole batch: a tensor, a tuple or a dict. A third value, if there is one, is a function that computes the loss
    from what the model returns. Build the model under torch.device("meta") if it is large. No process group is made.
    """
    sys.path.insert(0, str(script.resolve().parent))
    found = runpy.run_path(str(script), run_name="__dtensor_plan__").get(EXAMPLE)
    if not callable(found):
        raise click.ClickException(
            f"{script} defines no function {EXAMPLE}(); write one that returns a model and the inputs of its forward"
        )
    model, inputs, *rest = _pair(script, found())
    if unknown := [axis for axis in links if axis not in mesh]:
        raise click.UsageError(f"--link names the axis {unknown[0]!r}, and --mesh has {', '.join(mesh)}")
    given = {axis: _link(axis, mesh, amount) for axis, amount in links.items()}
    try:
        plan = search(
            model,
            mesh,
            inputs,
            device_type=device,
            memory=memory,
            links=given,
            loss=rest[0] if rest else None,
            mode="forward" if forward else "training",
            gradients=None if gradients is None else getattr(torch, gradients),
            what_if=what_if,
        )
    except (PlacementError, ImportError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(plan.explain())
    for path, option, write in (
        (out, "--out", plan.save),
        (page, "--page", lambda path: write_page(plan, path, f"{type(model).__name__} on {_words(mesh)}")),
    ):
        if path is not None:
            try:
                write(path)
            except OSError as error:
                raise click.BadParameter(f"{path} cannot be written: {error.strerror}", param_hint=option) from error


def _words(mesh: dict[str, int]) -> str:
    return ", ".join([f"{axis}={n}" for axis, n in mesh.items()])


def _pair(script: Path, given: Any) -> tuple[Any, ...]:
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        raise click.ClickException(f"{EXAMPLE}() of {script} returns a model and inputs, and a loss if one is needed")
    return given


def _link(axis: str, mesh: dict[str, int], bandwidth: float) -> Link:
    """The usual link of an axis, with another bandwidth."""
    inside = 1
    for name in reversed(mesh):
        inside *= mesh[name]
        if name == axis:
            break
    usual = INTRA if inside <= PER_HOST else INTER
    return Link(usual.alpha, bandwidth, usual.memory, usual.launch, usual.start)


__all__ = ["plan_command"]
