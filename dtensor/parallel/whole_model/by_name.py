"""From patterns of names to placements of parameters and buffers, and from axes to placements of inputs and outputs."""

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import PlacementError, shown
from ...layout.placements import Placement, Replicate, Shard, as_placement, as_placements
from ...tensor.tensor import DTensor
from ..fsdp.sharding import SHARDED_AS, joint_mesh
from .inputs import Placements


def chosen_placements(
    model: nn.Module, mesh: DeviceMesh, given: Mapping[str, Placements], *, only_named: bool = False
) -> dict[torch.Tensor, tuple[Placement, ...]]:
    """The placements of each parameter and buffer; with `only_named`, of those that a pattern matches.

    Raises:
        PlacementError: as documented in `distribute_model`.
    """
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = [name for name, _ in named]
    for name, x in named:
        if SHARDED_AS in vars(x):
            joint_mesh(vars(x)[SHARDED_AS][1].mesh, mesh)
        elif isinstance(x, DTensor):
            raise PlacementError(f"{name} is a DTensor already; give distribute_model the plain model")
    for pattern in given:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            raise PlacementError(
                f"{pattern!r} matches no parameter or buffer of the model; it has for example {', '.join(near)}"
            )
    chosen: dict[torch.Tensor, tuple[Placement, ...]] = {}
    said: dict[torch.Tensor, str] = {}
    for name, x in named:
        pattern = pattern_for(name, given)
        if pattern is None:
            continue
        found = _placed(given[pattern], mesh, x, name if name == pattern else f"{name} ({pattern!r})")
        if chosen.setdefault(x, found) != found:
            raise PlacementError(
                f"{said[x]} and {name} are one tensor, but its placements are given as both {list(chosen[x])} and "
                f"{list(found)}; give both names the same placements"
            )
        said[x] = name
    if only_named:
        return chosen
    whole: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
    return {x: chosen.get(x, whole) for _, x in named}


def pattern_for(name: str, given: Mapping[str, Placements]) -> str | None:
    """The most specific pattern that matches a name; None if none does."""
    found = [pattern for pattern in given if fnmatchcase(name, pattern)]
    if not found:
        return None
    first, *others = sorted(found, key=_specific, reverse=True)
    if others and _specific(first) == _specific(others[0]) and given[first] != given[others[0]]:
        raise PlacementError(
            f"{name} is matched by {first!r} and as closely by {others[0]!r}, which have different placements; write "
            "the name itself, or make one of the two more specific"
        )
    return first


def _specific(pattern: str) -> int:
    return sum(c not in "*?[]" for c in pattern)


def _placed(given: Placements, mesh: DeviceMesh, x: torch.Tensor, what: str) -> tuple[Placement, ...]:
    try:
        return as_placements(_by_axis(given, mesh), mesh.ndim, x.dim())
    except PlacementError as error:
        raise PlacementError(f"{what} of shape {list(x.shape)}: {error}") from None


def _by_axis(given: Placements, mesh: DeviceMesh) -> list[Placement]:
    """One placement for each axis of the mesh.

    Raises:
        PlacementError: the mesh has no such axis, the number of placements is wrong, or one is not a placement.
    """
    if not isinstance(given, Mapping):
        if not isinstance(given, (list, tuple)) or len(given) != mesh.ndim:
            one = isinstance(given, Placement)
            such = [*[Replicate()] * (mesh.ndim - 1), given if one else Shard(0)]
            style = ", and styles go to parallelize_module" if hasattr(given, "apply") else ""
            raise PlacementError(
                f"the mesh has {mesh.ndim} {'axis' if mesh.ndim == 1 else 'axes'} but got {shown(given)}; write one "
                f"placement for each axis in a list, such as {such}, or a dict from names of axes to placements{style}"
            )
        return [as_placement(p) for p in given]
    axes = mesh.mesh_dim_names or ()
    if unknown := [axis for axis in given if axis not in axes]:
        raise PlacementError(
            f"the mesh has axes {list(axes)} and no {unknown[0]!r}; write one of these, "
            f"such as {{{next(iter(axes), 'tp')!r}: Shard(0)}}"
        )
    return [as_placement(given.get(axis, Replicate())) for axis in axes] if axes else [Replicate()] * mesh.ndim


def at_borders(given: Placements, mesh: DeviceMesh, what: str) -> list[Placement]:
    """The placements of inputs or outputs, for tensors with any number of dims.

    Raises:
        PlacementError: as for `_by_axis`, or a placement is neither Replicate nor Shard of a non-negative dim.
    """
    try:
        found = _by_axis(given, mesh)
    except PlacementError as error:
        raise PlacementError(f"{what}: {error}") from None
    for p in found:
        if not (p.is_replicate() or (isinstance(p, Shard) and p.dim >= 0)):
            raise PlacementError(f"{what} are Replicate() or Shard(dim), dim from the front; got {p!r}")
    return found


def fitting(placements: Sequence[Placement], x: torch.Tensor) -> list[Placement]:
    """`placements`, with Replicate in place of Shard for dims that `x` does not have."""
    return [Replicate() if isinstance(p, Shard) and p.dim >= x.dim() else p for p in placements]


__all__ = ["at_borders", "chosen_placements", "fitting", "pattern_for"]
