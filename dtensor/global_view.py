"""`distribute_model`: one call that shards an unmodified model, whose code then runs on global tensors.

Parameters and buffers become DTensors by patterns of their names, arguments of the forward when it is called; inside,
every tensor is global, and its operators communicate as its layout needs. Styles of `dtensor.parallel` are for code
that works on local tensors.
"""

import contextlib
import difflib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn

from .api import distribute_parameter, distribute_tensor
from .boundary import check_module, mesh_of
from .errors import PlacementError
from .invariance import implicit_replication
from .placements import Placement, Replicate, Shard, as_placements
from .tensor import DTensor
from .wrapping import wrap_call

Placements: TypeAlias = Mapping[str, Placement] | Sequence[Placement]
"""Placements by mesh axis: those that are not Replicate by the names of their axes, or one for each axis."""

VIEW = "_dtensor_view"
"""The attribute of a module under which the `_View` of its model lies."""

DISTRIBUTED = "_distributed_module"
"""The attribute of a module that `distribute_module` or `distribute_model` has distributed."""


def distribute_model(
    model: nn.Module,
    device_mesh: Any = None,
    placements: Mapping[str, Placements] | None = None,
    *,
    inputs: Placements | None = None,
    outputs: Placements | None = None,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Shard a model for one device over a mesh, in place; its code stays as it is.

    Args:
        model: the model.
        device_mesh: the mesh; None takes the current one.
        placements: patterns of names of parameters and buffers, with the wildcards of `fnmatch` (`*` goes over dots) ->
            placements, such as `{"*.q_proj.weight": {"tp": Shard(0)}}`. Of patterns that match a name the one with most
            characters that are no wildcards counts. What is not named is replicated.
        inputs: how tensors arrive in the arguments of forward, in tuples, lists, dicts and dataclasses too. None:
            whole, and the same on all ranks, which is not checked. `{"dp": Shard(0)}`: each rank of "dp" gives its part
            of the batch, all of equal length. Tensors without that dimension are whole; DTensors stay as they are.
        outputs: how tensors leave in what forward returns. None: as DTensors. `{}`: whole. `{"dp": Shard(0)}`: each
            rank of "dp" has its part; a loss that ranks compute from theirs counts as the mean over them, as under
            DistributedDataParallel. Tensors without that dimension come out whole.
        src_data_rank: the rank of each axis whose values of parameters and buffers all ranks take; None keeps each
            rank's own.

    Returns:
        `model`. Its gradients are those of one device on the global batch.

    Raises:
        PlacementError: a pattern matches no name, or two match equally well; placements that do not fit the mesh or the
            parameter; other ones for modules that share a parameter. Nothing was changed then.
        RuntimeError: the model was distributed before.
        TypeError: `model` is no module.

    >>> model = LlamaForCausalLM(config)
    >>> columns, rows = {"tp": Shard(0)}, {"tp": Shard(1)}
    >>> distribute_model(model, mesh, {"*.[qkv]_proj.weight": columns, "*.o_proj.weight": rows}, outputs={})
    """
    check_module("distribute_model", model)
    mesh = mesh_of(device_mesh)
    if getattr(model, DISTRIBUTED, False):
        raise RuntimeError("the model was distributed before; call distribute_model once, on the plain model")
    chosen = _chosen(model, mesh, placements or {})
    view = _View(
        mesh,
        None if inputs is None else _by_axis(inputs, mesh, "inputs"),
        None if outputs is None else _by_axis(outputs, mesh, "outputs"),
    )
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, distribute_parameter(p, mesh, chosen[p], src_data_rank=src_data_rank))
        for name, b in list(module.named_buffers(recurse=False)):
            if not isinstance(b, DTensor):
                module._buffers[name] = distribute_tensor(b, mesh, chosen[b], src_data_rank=src_data_rank)
    wrap_call(model, view)
    for module in model.modules():
        names = tuple(sorted(name for name, _ in module.named_parameters(recurse=False)))
        if names:
            vars(module)[VIEW] = view
            module.__class__ = _reading(type(module), names)
    setattr(model, DISTRIBUTED, True)
    return model


class _View:
    """What is called in place of a model's forward. Knows whether one runs."""

    def __init__(self, mesh: Any, inputs: Sequence[Placement] | None, outputs: Sequence[Placement] | None) -> None:
        self.mesh, self.inputs, self.outputs, self.depth = mesh, inputs, outputs, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "_View":
        return _View(self.mesh, self.inputs, self.outputs)

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _mapped(functools.partial(_taken, self.mesh, self.inputs), (args, kwargs))
        with implicit_replication(), self.running():
            out = forward(*args, **kwargs)
        return out if self.outputs is None else _mapped(functools.partial(_given, self.mesh, self.outputs), out)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        if torch.compiler.is_compiling():
            yield
            return
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


@functools.cache
def _reading(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The class of modules of class `cls` of which a forward reads the parameters `names` by `_read`."""
    inside: dict[str, Any] = {name: property(functools.partial(_read, name=name)) for name in names}
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**named, **inside})


def _read(module: nn.Module, name: str) -> torch.Tensor | None:
    """A parameter, whose gradient comes in its own placements where a forward reads it: what arrives from operators may
    be a sum that is pending, which optimizers would reduce more than once."""
    p = module._parameters.get(name)
    if not isinstance(p, DTensor) or not (torch.compiler.is_compiling() or vars(module)[VIEW].depth):
        return p
    if not (p.requires_grad and torch.is_grad_enabled()):
        return p
    return p.redistribute(placements=p.placements, grad_placements=p.placements)


def _chosen(model: nn.Module, mesh: Any, given: Mapping[str, Placements]) -> dict[torch.Tensor, tuple[Placement, ...]]:
    """The placements of each parameter and buffer.

    Raises:
        PlacementError: as `distribute_model` says.
    """
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = [name for name, _ in named]
    for pattern in given:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            raise PlacementError(
                f"{pattern!r} matches no parameter or buffer of the model; it has for example {', '.join(near)}"
            )
    chosen: dict[torch.Tensor, tuple[Placement, ...]] = {}
    said: dict[torch.Tensor, str] = {}
    for name, x in named:
        pattern = _pattern_for(name, given)
        if pattern is None:
            continue
        found = _placed(given[pattern], mesh, x, f"{name} ({pattern!r})")
        if chosen.setdefault(x, found) != found:
            raise PlacementError(
                f"{said[x]} and {name} are one tensor, which is to be both {list(chosen[x])} and {list(found)}; "
                "give both names the same placements"
            )
        said[x] = name
    whole: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
    return {x: chosen.get(x, whole) for _, x in named}


def _pattern_for(name: str, given: Mapping[str, Placements]) -> str | None:
    """The most specific of the patterns that match a name."""
    found = [pattern for pattern in given if fnmatchcase(name, pattern)]
    if not found:
        return None
    first, *others = sorted(found, key=_specific, reverse=True)
    if others and _specific(first) == _specific(others[0]) and given[first] != given[others[0]]:
        raise PlacementError(
            f"{name} is matched by {first!r} and as closely by {others[0]!r}, which say different placements; write "
            "the name itself, or one of the two longer"
        )
    return first


def _specific(pattern: str) -> int:
    return sum(c not in "*?[]" for c in pattern)


def _placed(given: Placements, mesh: Any, x: torch.Tensor, what: str) -> tuple[Placement, ...]:
    try:
        return as_placements(_by_axis(given, mesh, what), mesh.ndim, x.dim())
    except PlacementError as error:
        raise PlacementError(f"{what} of shape {list(x.shape)}: {error}") from None


def _by_axis(given: Placements, mesh: Any, what: str) -> list[Placement]:
    """One placement for each axis of the mesh.

    Raises:
        PlacementError: an axis that the mesh does not have.
    """
    if not isinstance(given, Mapping):
        return list(as_placements(list(given), mesh.ndim, 64))
    axes = mesh.mesh_dim_names or ()
    if unknown := [axis for axis in given if axis not in axes]:
        raise PlacementError(f"{what}: the mesh has axes {list(axes)} and no {unknown[0]!r}; write one of these")
    return [given.get(axis, Replicate()) for axis in axes] if axes else [Replicate()] * mesh.ndim


def _fitting(placements: Sequence[Placement], x: torch.Tensor) -> list[Placement]:
    """`placements` without the cuts of dimensions that `x` does not have."""
    return [Replicate() if isinstance(p, Shard) and p.dim >= x.dim() else p for p in placements]


def _taken(mesh: Any, placements: Sequence[Placement] | None, x: torch.Tensor) -> torch.Tensor:
    """An argument of the forward as a DTensor."""
    if isinstance(x, DTensor):
        return x
    whole = [Replicate()] * mesh.ndim
    return DTensor.from_local(x, mesh, whole if placements is None else _fitting(placements, x))


def _given(mesh: Any, placements: Sequence[Placement], x: torch.Tensor) -> torch.Tensor:
    """What the forward returns, as a plain tensor."""
    if not isinstance(x, DTensor):
        return x
    target = _fitting(placements, x)
    parts = 1
    for axis, p in enumerate(target):
        parts *= mesh.size(axis) if isinstance(p, Shard) else 1
    local = x.redistribute(placements=target).to_local()
    return _MeanOverParts.apply(local, parts) if parts > 1 and local.requires_grad else local  # pyright: ignore


class _MeanOverParts(torch.autograd.Function):
    """A rank's part of an output: what ranks compute from their parts counts as the mean over `parts` of them."""

    @staticmethod
    def forward(x: torch.Tensor, parts: int) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, int], output: torch.Tensor) -> None:
        ctx.parts = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore
        return grad / ctx.parts, None


def _mapped(f: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    """`x` with `f` of each tensor in it; objects that are none of tuple, list, dict and dataclass stay."""
    if isinstance(x, torch.Tensor):
        return f(x)
    if isinstance(x, (tuple, list)):
        items = [_mapped(f, item) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    if isinstance(x, dict) and is_dataclass(x):  # an output of transformers, which leaves out what is None
        return type(x)(**{key: _mapped(f, item) for key, item in x.items()})
    if isinstance(x, dict):
        return {key: _mapped(f, item) for key, item in x.items()}
    if is_dataclass(x) and not isinstance(x, type):
        return type(x)(**{field.name: _mapped(f, getattr(x, field.name)) for field in fields(x) if field.init})
    return x


__all__ = ["distribute_model"]
