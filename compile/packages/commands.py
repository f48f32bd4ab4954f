"""The command `dtensor package`."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import click
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from dtensor.errors import PackageError

from ..recording.imagined import imagined, run_script
from ..recording.mesh_option import MeshOption
from .package import packaging

OURS = -1
"""The number of the hook that counts steps."""


class _Enough(SystemExit):
    """Ends the program, which took the steps that were asked for."""


@contextmanager
def _after_each_step(call: Callable[..., None]) -> Iterator[None]:
    """A context in which `call` follows each step of an optimizer.

    Hooks are numbered, and compiled steps guard the numbers: the program's hooks have those that they have without it.
    """
    own = RemovableHandle.next_id
    handle = register_optimizer_step_post_hook(call)
    RemovableHandle.next_id = own
    hooks = handle.hooks_dict_ref()
    assert hooks is not None, "torch holds the hooks of all optimizers"
    hooks[OURS] = hooks.pop(handle.id)
    try:
        yield
    finally:
        hooks.pop(OURS)


@click.command("package", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--mesh", type=MeshOption(), help="Axis sizes of a mesh that is not there; this process runs as its rank 0."
)
@click.option("--steps", type=click.IntRange(min=1), default=2, show_default=True, help="Steps of the optimizer.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("script", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def package_command(
    mesh: dict[str, int] | None, steps: int, file: Path, script: Path, arguments: tuple[str, ...]
) -> None:
    """Run SCRIPT with its arguments for a few steps, and write all that it compiles to the package FILE.

    With --mesh no other rank exists: collectives do nothing, and losses mean nothing. The job loads the package with
    DTENSOR_PACKAGE=FILE, and then compiles nothing.
    """
    left = steps

    def stepped(*_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise _Enough(0)

    try:
        with (
            imagined(mesh, as_backend=True) if mesh else nullcontext(),
            _after_each_step(stepped),
            packaging(file) as made,
            suppress(_Enough),
        ):
            run_script(script, arguments)
    except (PackageError, OSError) as error:
        raise click.ClickException(str(error)) from error
    for name, why in made.left_out:
        click.echo(f"left out: {name}: {why}", err=True)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    click.echo(f"{len(made.entries)} frames, {file.stat().st_size:,} bytes, SHA-256 {digest}")


__all__ = ["package_command"]
