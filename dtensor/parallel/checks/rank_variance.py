"""Plain parameters under a plan: each rank of the axis has all of it, and is to train the same one.

Where such a parameter meets local tensors (a norm over this rank's heads), each rank has another part of its gradient,
and trains a copy of its own, without a word from anyone. So before an optimizer's first steps, and every so often then,
the ranks of the axis compare: of a parameter that is alike on them the gradient has to be, too. What is summed by hand
before the step is alike then, and what differs from rank to rank by intention (experts) is no such parameter.

Values that are alike may differ in their last bits, and the comparison is to cost nothing: a norm and a few sums of
each tensor are compared, in one all_reduce for each axis.
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
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...comm.replication_check import STRIDES, TOLERANCE, numbers
from ...errors import ShardingError
from ...mesh.mesh import facts
from ...tensor.tensor import DTensor
from ...torch_private.core import never_traced
from ..modules.forward_wrapping import users_class

FIRST, EVERY = 2, 100
"""How many first steps of an optimizer are looked at, and which ones later."""

WATCHED = "_dtensor_watched"
"""The attribute of a parameter that a plan has left plain: its `Watched`."""


class Watched(NamedTuple):
    """Where a parameter lies in its model, the class of its module, and the axis over which it is to be alike."""

    name: str
    kind: type[nn.Module]
    axis: str
    group: str


_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def watch(model: nn.Module, mesh: Any) -> None:
    """Have optimizers look at the parameters of `model` that a plan over a mesh of one axis has left plain."""
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
    """Whether a parameter is placed over the axis of `group`, so that its gradient is, too."""
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
    """Compare over ranks what is watched among the parameters of `optimizer`.

    Raises:
        ShardingError: on all ranks of the axis, if a parameter is alike on them and its gradient is not.
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
    # A gradient that is nothing but rounding may be another one everywhere.
    noise = torch.tensor([torch.finfo(p.dtype).eps for _, p in found], device=device) * norms[:, 1].max()
    norms = torch.stack([norms[:, 0], norms[:, 1].maximum(noise)], 1).clamp(min=1e-30)
    for (of, _), (by, gradient_by) in zip(found, (spread / norms).tolist()):
        if by <= TOLERANCE < gradient_by:
            raise _error(of, gradient_by)


def _numbers(x: torch.Tensor | None, like: torch.Tensor | None = None) -> torch.Tensor:
    """The norm of this rank's part of a tensor, and sums of its elements; zeros where there is none."""
    if x is None:
        assert like is not None
        return torch.zeros(1 + len(STRIDES), dtype=torch.float64, device=_local(like).device)
    return numbers(_local(x))


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _error(of: Watched, by: float) -> ShardingError:
    pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", of.name.rpartition(".")[0])
    entry = (
        f"write {pattern!r}: SequenceParallel(sequence_dim=d, use_local_output=True) into the plan, where its input is "
        "cut along dimension d; or "
    )
    kind, where = of.kind.__name__, used_at(of.kind, of.name.rpartition(".")[2])
    entry = entry if "norm" in kind.lower() else ""
    return ShardingError(
        f"the gradient of {of.name} differs between the ranks of axis {of.axis!r} (by {by:.0%} of its norm), and the "
        f"parameter does not: {kind} computes{where} with this rank's part of a value, or the ranks were given other "
        f"inputs, and each would train a copy of its own; {entry}sum the gradient over the axis before the step, or "
        "shard the model by distribute_model, in which no value is local"
    )


def used_at(cls: type, name: str) -> str:
    """The first line that reads the attribute `name` of instances of a class, of its forward if it is there, as text
    such as " (norms.py:12: return self.weight * x)"; "" if there is none to be found."""
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
