"""`parallelize_module`: applies a plan, a dict from module names to styles, to a model.

The whole plan is resolved before anything is sharded, so that a wrong plan leaves the model unchanged. How a module is
changed is up to its `ParallelStyle`.
"""

import difflib
import warnings
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...comm.from_plain import check_module, mesh_of
from ...errors import ArgumentError, ArgumentTypeError, CallOrderError, shown
from ...layout.placements import Placement
from ...torch_private.core import mesh_resources
from ..checks.rank_variance import watch
from ..checks.size_misfit import Planned, tell_of_misfits
from ..modules.distribute_module import DISTRIBUTED
from ..modules.replaced import following
from ..modules.ties import Ties
from .style import ParallelStyle
from .torch_styles import as_our_style


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | dict[str, ParallelStyle] | None = None,
    *,
    check_inputs: bool = True,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Parallelizes `module`, in place, over a mesh of one axis.

    Parameters that the plan leaves plain must get the same gradient on all ranks. Optimizers check this over the axis
    before their first two steps and then before every hundredth step. If a gradient differs they raise ShardingError,
    which names the parameter and a remedy.

    If an operator in the model's code later fails because of the sizes of this rank's shards, the error (MisfitError in
    eager mode) names the module, the entries of the plan and a remedy.

    Args:
        module: the module.
        device_mesh: a mesh of one axis, such as `mesh["tp"]`; None uses that of the surrounding `with mesh:`.
        parallelize_plan: a style for `module` itself, or a dict from names of submodules to styles. A name such as
            "layers.*.attention.wq" is matched segment by segment with the wildcards of `fnmatch` (`*`, `?`, `[0-3]`)
            and applies to every module that matches; "" is `module` itself. Entries apply in the dict's order. The
            styles of torch.distributed.tensor.parallel are taken for their namesakes here.
        check_inputs: compare the ranks' inputs of a module if its style takes a plain tensor as Replicate(): on first
            use and once in a hundred later uses. In compiled code the graph inputs that it is computed from are
            compared instead. If ranks differ, all raise AgreementError.
        src_data_rank: the rank of the axis whose parameter values all ranks receive; None uses each rank's own.

    Returns:
        `module`.

    Raises:
        ValueError: there is no mesh, the mesh has several axes, a name matches no module, or a module without an entry
            shares a parameter with one whose entry shards it.
        PlacementError: entries give a shared parameter different placements.
        TypeError: `module` is not a module, or the plan is neither a style nor a dict from names to styles, or a style
            is derived from one of torch's.
    """
    check_module("parallelize_module", module)
    mesh = _one_axis_mesh(device_mesh)
    if parallelize_plan is None:
        warnings.warn(
            "parallelize_module was given no parallelize_plan and does nothing; "
            "write a ParallelStyle or a dict from module names to styles",
            stacklevel=2,
        )
        return module
    targets, ties = _resolved(module, parallelize_plan), Ties(module)
    _check_ties(module, ties, [(target, style) for target, _, style in targets])
    with following(module):
        for target, _, style in targets:
            style.src_data_rank, style.check_inputs = src_data_rank, check_inputs
            style.apply(target, mesh)
        ties.restore()  # a custom style may shard more than it declares
    watch(module, mesh)
    tell_of_misfits(module, [(target, planned) for target, planned, _ in targets])
    return module


def _one_axis_mesh(device_mesh: DeviceMesh | None) -> DeviceMesh:
    mesh = device_mesh
    if mesh is None:
        try:
            mesh = mesh_resources.get_current_mesh()
        except RuntimeError:
            raise ArgumentError(
                "parallelize_module was given no device_mesh and is not called within one; "
                "write device_mesh=..., or call it inside `with mesh:`"
            ) from None
    mesh = mesh_of(mesh)
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        fix = (
            f"slice one axis out, such as mesh[{names[-1]!r}] (the axes are {', '.join(map(repr, names))})"
            if names
            else 'name the axes, init_device_mesh(..., mesh_dim_names=("dp", "tp")), and slice one out: mesh["tp"]'
        )
        raise ArgumentError(f"parallelize_module works over a mesh of one axis, but this one has {mesh.ndim}; {fix}")
    return mesh


def _resolved(
    module: nn.Module, plan: ParallelStyle | dict[str, ParallelStyle]
) -> list[tuple[nn.Module, Planned, ParallelStyle]]:
    """The modules to parallelize, each with its plan entry and style, in order."""
    plan = as_our_style(plan)
    if isinstance(plan, ParallelStyle):
        return [(module, Planned("", "", type(plan).__name__), plan)]
    if not isinstance(plan, dict):
        raise ArgumentTypeError(
            f"parallelize_plan is a ParallelStyle or a dict from module names to styles; got {shown(plan)}, write "
            'such as {"up": ColwiseParallel(), "down": RowwiseParallel()}'
        )
    targets = []
    modules = dict(module.named_modules(remove_duplicate=False))
    for pattern, style in plan.items():
        if not isinstance(pattern, str):
            raise ArgumentTypeError(
                f"parallelize_plan has names of modules as its keys; got {pattern!r}, write '{pattern}'"
            )
        style = as_our_style(style)
        if not isinstance(style, ParallelStyle):
            raise ArgumentTypeError(
                f"parallelize_plan[{pattern!r}] is not a ParallelStyle but {shown(style)}; {_style_for(style)}"
            )
        matching = _matching(modules, pattern)
        again = [name for name, m in matching if style.shards_parameters and getattr(m, DISTRIBUTED, False)]
        if again:
            raise CallOrderError(
                f"{again[0] or 'the module'} was parallelized before, so {type(style).__name__}() would shard shards; "
                "call parallelize_module once, on the plain module, with one plan for all of it"
            )
        targets += [(m, Planned(name, pattern, type(style).__name__), style) for name, m in matching]
    return targets


def _style_for(given: Any) -> str:
    """What to write in a plan in place of something that is no style."""
    if isinstance(given, type) and issubclass(given, ParallelStyle):
        return f"write {given.__name__}()"
    if isinstance(given, Placement):
        return (
            "write ColwiseParallel() or RowwiseParallel(), or for placements of parameters "
            f'distribute_model(model, mesh, {{"name.weight": [{given!r}]}})'
        )
    styles = {"colwise": "ColwiseParallel", "rowwise": "RowwiseParallel", "sequence": "SequenceParallel"}
    near = difflib.get_close_matches(str(given).lower(), styles, n=1)
    return f"write {styles[near[0]]}()" if near else "write such as ColwiseParallel() or RowwiseParallel()"


def _check_ties(module: nn.Module, ties: Ties, targets: list[tuple[nn.Module, ParallelStyle]]) -> None:
    """Raise if the plan shards a shared parameter in one of the modules that hold it but not in the others."""
    sharded = [target for target, style in targets if style.shards_parameters]
    names = {found: name for name, found in module.named_modules()}
    for _, holders in ties.shared:
        told = [m for m, _ in holders if m in sharded]
        rest = [m for m, _ in holders if m not in sharded]
        if told and rest:
            raise ArgumentError(
                f"parallelize_plan shards {names[told[0]]!r}, which shares a parameter with {names[rest[0]]!r}, but "
                f"does not shard that; add an entry for {names[rest[0]]!r} (ColwiseParallel for an nn.Linear goes "
                "with RowwiseParallel for the nn.Embedding tied to it)"
            )


def _matching(modules: dict[str, nn.Module], pattern: str) -> list[tuple[str, nn.Module]]:
    """Pairs of (name, module) whose name matches `pattern`. A module with several names occurs once."""
    found = {m: name for name, m in reversed(modules.items()) if _matches(name, pattern)}
    if not found:
        named = [name for name in modules if name]
        near = difflib.get_close_matches(pattern, named, n=5, cutoff=0.3) or named[:5]
        hint = f"the nearest names are: {', '.join(near)}" if near else "it has no modules inside; write ''"
        raise ArgumentError(
            f"parallelize_plan names {pattern!r}, but no module of {type(modules['']).__name__} matches; {hint}"
        )
    return [(name, m) for m, name in reversed(found.items())]


def _matches(name: str, pattern: str) -> bool:
    if not name or not pattern:
        return name == pattern
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


__all__ = ["parallelize_module"]
