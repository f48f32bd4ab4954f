"""Checks that parameters that a plan left plain, which every rank of the axis holds in full, get the same gradient.

If such a parameter meets local tensors (a norm over this rank's heads), each rank gets a different part of its gradient
and silently trains its own copy. So before an optimizer's first steps, and periodically later, the ranks of the axis
compare: if a parameter is the same on all of them, its gradient must be too. A gradient that was summed by hand before
the step passes, and a parameter that differs between ranks on purpose (experts) is not checked.

Equal values may differ in their last bits, and the check must be cheap. So it compares a norm and a few sums of each
tensor, in one all-reduce per axis.
"""

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...comm.replication_check import STRIDES, TOLERANCE, numbers
from ...errors import ShardingError
from ...mesh.mesh import facts
from ...tensor.tensor import DTensor
from ...torch_private.core import never_traced
from ..modules.forward_wrapping import users_class

FIRST, EVERY = 2, 100
"""The check runs before the `FIRST` steps of an optimizer, and later before every `EVERY`-th step."""

WATCHED = "_dtensor_watched"
"""The attribute that holds the `Watched` of a parameter that a plan has left plain."""


class Watched(NamedTuple):
    """A parameter's name in its model, the class of its module, and the axis (with its process group) to check over."""

    name: str
    kind: type[nn.Module]
    axis: str
    group: str


_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def watch(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make optimizers check the parameters of `model` that a plan over a one-axis mesh has left plain."""
    group = facts(mesh).groups[(0,)]
    axis = (mesh.mesh_dim_names or ("0",))[0]
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not _lies_on(parameter, group):
                vars(parameter)[WATCHED] = Watched(f"{prefix}.{name}".lstrip("."), users_class(module), axis, group)
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_before_step))


_hooked: list[Any] = []


def _lies_on(parameter: torch.Tensor, group: str) -> bool:
    """Whether a parameter is a DTensor on a mesh with the axis of `group`, so that its gradient is one too."""
    return isinstance(parameter, DTensor) and group in facts(parameter.device_mesh).groups.values()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    done = _steps.get(optimizer, 0)
    _steps[optimizer] = done + 1
    if done < FIRST or done % EVERY == 0:
        _compare(optimizer)


@never_traced
def _compare(optimizer: Optimizer) -> None:
    """Compare the watched parameters of `optimizer`, and their gradients, over the ranks.

    Raises:
        ShardingError: a parameter is the same on all ranks of the axis but its gradient is not; raised on all of them.
    """
    by_group: dict[str, list[tuple[Watched, nn.Parameter]]] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        of: Watched | None = vars(parameter).get(WATCHED)
        if of is not None and parameter.dtype.is_floating_point and not _lies_on(parameter, of.group):
            by_group.setdefault(of.group, []).append((of, parameter))
    with torch.no_grad():
        for group, found in by_group.items():
            _compare_over(group, found)


def _compare_over(group: str, found: list[tuple[Watched, nn.Parameter]]) -> None:
    device = _local(found[0][1]).device
    numbers = torch.stack([torch.stack([_numbers(p), _numbers(p.grad, like=p)]).to(device) for _, p in found])
    most = torch.ops.dtensor.all_reduce(torch.stack([numbers, -numbers]), "max", group)
    spread, norms = (most[0] + most[1]).amax(-1), most[0, :, :, 0]
    # A gradient that consists only of rounding errors may differ on every rank.
    noise = torch.tensor([torch.finfo(p.dtype).eps for _, p in found], device=device) * norms[:, 1].max()
    norms = torch.stack([norms[:, 0], norms[:, 1].maximum(noise)], 1).clamp(min=1e-30)
    for (of, _), (by, gradient_by) in zip(found, (spread / norms).tolist()):
        if by <= TOLERANCE < gradient_by:
            raise _error(of, gradient_by)


def _numbers(x: torch.Tensor | None, like: torch.Tensor | None = None) -> torch.Tensor:
    """The norm of this rank's part of a tensor and sums of its elements; zeros, on the device of `like`, for None."""
    if x is None:
        assert like is not None
        return torch.zeros(1 + len(STRIDES), dtype=torch.float64, device=_local(like).device)
    return numbers(_local(x))


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _error(of: Watched, by: float) -> ShardingError:
    pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", of.name.rpartition(".")[0])
    entry = (
        f"write {pattern!r}: SequenceParallel(sequence_dim=d, use_local_output=True) into the plan, if its input is "
        "sharded on dim d; or "
    )
    kind, where = of.kind.__name__, used_at(of.kind, of.name.rpartition(".")[2])
    entry = entry if "norm" in kind.lower() else ""
    return ShardingError(
        f"the gradient of {of.name} differs between the ranks of axis {of.axis!r} (by {by:.0%} of its norm), but the "
        f"parameter does not: {kind} computes{where} with this rank's part of a value, or the ranks were given "
        f"different inputs, so that each would train its own copy; {entry}sum the gradient over the axis before the "
        "step, or shard the model with distribute_model, where no value is local"
    )


def used_at(cls: type, name: str) -> str:
    """The first line that reads attribute `name` of an instance of `cls`, if possible in its forward, as text such as
    " (norms.py:12: return self.weight * x)"; empty if none is found."""
    functions = [
        f for base in cls.__mro__ if base is not nn.Module for f in vars(base).values() if inspect.isfunction(f)
    ]
    for function in sorted(functions, key=lambda f: f.__name__ != "forward"):
        try:
            lines, first = inspect.getsourcelines(function)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, SyntaxError):
            continue
        found = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Attribute) and _reads(n, name)]
        if found and function.__name__ != "__init__":
            file, line = Path(inspect.getsourcefile(function) or "").name, min(found)
            return f" ({file}:{first + line - 1}: {lines[line - 1].strip()})"
    return ""


def _reads(node: ast.Attribute, name: str) -> bool:
    of = node.value
    return node.attr == name and isinstance(node.ctx, ast.Load) and isinstance(of, ast.Name) and of.id == "self"


__all__ = ["WATCHED", "watch"]
