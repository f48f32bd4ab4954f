"""Explains size errors of operators in terms of the parallelization plan that causes them.

Under a plan the code of a module sees this rank's shards. An operator then fails if, for example, the code views as
three heads a projection of which each rank has half, or a column-wise layer follows another one, and its error does not
mention the plan. In eager mode the module passed to `parallelize_module` catches the error and finds in the traceback
whose code ran; while Dynamo traces, its own frames show that.
"""

from collections.abc import Callable, Iterable, Iterator
from dis import opmap
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from ...errors import MisfitError
from ...program.source_lines import is_users
from ...tensor.tensor import DTensor
from ...torch_private.core import traced_with_caller
from ...torch_private.dynamo import explain_traced_errors
from ..modules.forward_wrapping import CALL, wrap_call

COMM: Path = Path(__file__).parents[2] / "comm"
"""Where collectives are."""

PLANNED = "_dtensor_planned"
"""The attribute that holds the `Planned` of a module with an entry in a plan."""


MOST = 4
"""How many entries an error lists."""


class Planned(NamedTuple):
    """The name of a module within the parallelized one, and the pattern and style of its entry in the plan."""

    name: str
    pattern: str
    style: str


def tell_of_misfits(root: nn.Module, planned: Iterable[tuple[nn.Module, Planned]]) -> None:
    """Make operator errors in the forward of `root` name the plan entries that cause them."""
    for module, entry in planned:
        vars(module)[PLANNED] = entry
    if CALL not in vars(root):
        wrap_call(root, _told)
    explain_traced_errors(_explained)


@traced_with_caller
def _told(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    try:
        return forward(*args, **kwargs)
    except RuntimeError as error:
        found = None if _is_of_its_own(error) else _explained(_modules(error.__traceback__), str(error))
        if found is None:
            raise
        raise found.with_traceback(_down_to_users(error.__traceback__)) from None


def _is_of_its_own(error: RuntimeError) -> bool:
    """Whether an error is not one of sizes: it has a specific class, or the model's code or a collective raised it."""
    if type(error) is not RuntimeError:
        return True
    *before, last = _chain(error.__traceback__)
    if any(Path(t.tb_frame.f_code.co_filename).is_relative_to(COMM) for t in (*before, last)):
        return True  # another rank has failed, for example
    raises = last.tb_frame.f_code.co_code[last.tb_lasti] == opmap["RAISE_VARARGS"]
    return raises and not Path(last.tb_frame.f_code.co_filename).is_relative_to(Path(torch.__file__).parent)


def _chain(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _modules(traceback: TracebackType | None) -> list[nn.Module]:
    """The modules in whose code an error was raised, innermost first."""
    frames = [t.tb_frame for t in _chain(traceback)]
    found = [f.f_locals.get(name) for f in reversed(frames) for name in f.f_code.co_varnames[:1]]
    return [m for m in found if isinstance(m, nn.Module)]


def _down_to_users(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames below the last line of the user's, those of torch and of this library."""
    frames = list(_chain(traceback))
    while frames and not is_users(frames[-1].tb_frame.f_code.co_filename):
        frames.pop()
    found = None
    for t in reversed(frames):
        found = TracebackType(found, t.tb_frame, t.tb_lasti, t.tb_lineno)
    return found


def _explained(modules: Iterable[nn.Module], what: str) -> MisfitError | None:
    """The error, given the modules whose code ran, innermost first; None if no plan covers any of them."""
    if "dtype" in what:
        return None
    concerned = [(m, inside) for m in modules if (inside := _planned(m))]
    if not concerned:
        return None
    # For a module that has an entry itself, the code around it is what matters.
    around = [found for found in concerned if PLANNED not in vars(found[0])]
    module, inside = around[0] if around else concerned[-1]
    path, first = inside[0]
    name = vars(first)[PLANNED].name.removesuffix(path).rstrip(".")
    where = f"{name} ({type(module).__name__})" if name else type(module).__name__
    return MisfitError(
        f"the plan of parallelize_module does not fit {where}: {what.rstrip('.')}. Its code sees this rank's shards: "
        f"{'; '.join(_entry(m) for _, m in inside[:MOST])}. Let a row-wise layer take the output of a column-wise one, "
        "and use local sizes in the code between them (such as the number of heads on one rank); or shard the model "
        "with distribute_model, where every size is global. If one device refuses this input, too, it is the input "
        "that does not fit"
    )


def _planned(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(path, m) for path, m in module.named_modules() if PLANNED in vars(m)]


def _entry(module: nn.Module) -> str:
    planned: Planned = vars(module)[PLANNED]
    told = f"{planned.name or 'the module itself'} is {planned.style}"
    told += f" by {planned.pattern!r}" if planned.pattern != planned.name else ""
    for name, p in module.named_parameters(recurse=False):
        if isinstance(p, DTensor):
            return f"{told}, with {list(p._local_tensor.shape)} of a {name} {list(p.shape)}"
    return told


__all__ = ["Planned", "tell_of_misfits"]
