"""`distribute_model`: one call that shards an unmodified model, whose code then runs on global tensors.

Parameters and buffers become DTensors by patterns of their names, arguments of the forward when it is called; inside,
every tensor is global, and its operators communicate as its layout needs. Styles of `dtensor.parallel` are for code
that works on local tensors.
"""

import contextlib
import difflib
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from ...comm.from_plain import check_module, mesh_of
from ...dispatch.global_view import global_view
from ...errors import PlacementError
from ...layout.placements import Placement, Replicate, Shard, as_placement, as_placements
from ...tensor.factories import distribute_tensor
from ...tensor.tensor import DTensor
from ...torch_private.core import is_in_backward, never_traced, traced_with_caller
from ..checks.input_check import InputCheck
from ..fsdp.sharded_module import FullyShardedModule
from ..fsdp.sharding import SHARDED_AS, joint_mesh
from ..modules.distribute_module import DISTRIBUTED, distribute_parameter
from ..modules.forward_wrapping import made_class, with_own_code
from .tp_plan import placements_of_plan

Placements: TypeAlias = Mapping[str, Placement] | Sequence[Placement]
"""Placements by mesh axis: those that are not Replicate by the names of their axes, or one for each axis."""

VIEW = "_dtensor_view"
"""The attribute of a module under which the `_View` of its model lies."""


def distribute_model(
    model: nn.Module,
    device_mesh: Any = None,
    placements: Mapping[str, Placements] | Literal["model"] | None = None,
    *,
    inputs: Placements | None = None,
    outputs: Placements | None = None,
    check_inputs: bool = True,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Shard a model for one device over a mesh, in place; its code stays as it is.

    `fully_shard` may come before or after, over other axes of the same mesh: each of its ranks is then a global view of
    its own, with its part of the batch.

    Args:
        model: the model.
        device_mesh: the mesh; None takes the current one.
        placements: patterns of names of parameters and buffers, with the wildcards of `fnmatch` (`*` goes over dots) ->
            placements, such as `{"*.q_proj.weight": {"tp": Shard(0)}}`. Of patterns that match a name the one with most
            characters that are no wildcards counts. What is not named is replicated. "model": as the `tp_plan` says
            that a model of transformers has, over the mesh's axis "tp", or its only one.
        inputs: how tensors arrive in the arguments of forward, in tuples, lists, dicts and dataclasses too. None:
            whole, and the same on all ranks. `{"dp": Shard(0)}`: each rank of "dp" gives its part of the batch, all of
            equal length. Tensors without that dimension are whole; DTensors stay as they are.
        outputs: how tensors leave in what forward returns. None: as DTensors. `{}`: whole. `{"dp": Shard(0)}`: each
            rank of "dp" has its part; a loss that ranks compute from theirs counts as the mean over them, as under
            DistributedDataParallel. Tensors without that dimension come out whole.
        check_inputs: compare, in each call, what ranks give: checksums along the axes along which inputs are to be the
            same, shapes along the others. A small all_reduce, two where inputs are parts. Where ranks differ, all raise
            RuntimeError. And compare, now and then and without waiting for others, the plain tensors that modules hold
            and that meet DTensors inside: AgreementError where they differ.
        src_data_rank: the rank of each axis whose values of parameters and buffers all ranks take; None keeps each
            rank's own.

    Returns:
        `model`. Its gradients are those of one device on the global batch.

    Raises:
        PlacementError: a pattern matches no name, or two match equally well; the model has no `tp_plan`, or one with a
            style that is not known; placements that do not fit the mesh or the parameter; other ones for modules that
            share a parameter; a parameter that is a DTensor already. Nothing was changed then.
        MeshError: a parameter is fully sharded over axes that do not go with those of the mesh.
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
    if isinstance(placements, str):
        if placements != "model":
            raise PlacementError(f"placements is a dict from patterns to placements, or 'model'; got {placements!r}")
        placements = placements_of_plan(model, mesh)
    chosen = _chosen(model, mesh, placements or {})
    taken = _borders(inputs or {}, mesh, "inputs")
    given = None if outputs is None else _borders(outputs, mesh, "outputs")
    view = _View(mesh, taken, given, check_inputs)
    buffers: dict[torch.Tensor, DTensor] = {}

    def distribute(x: nn.Parameter, placements: Sequence[Placement]) -> nn.Parameter:
        return distribute_parameter(x, mesh, placements, src_data_rank=src_data_rank)

    for module in model.modules():
        for name, p in list(_own(module._parameters)):
            if SHARDED_AS in vars(p):
                assert isinstance(module, FullyShardedModule)
                module.redistribute_parameter(name, functools.partial(distribute, placements=chosen[p]))
            else:
                setattr(module, name, distribute(p, chosen[p]))
        for name, b in list(_own(module._buffers)):
            if b not in buffers:  # one that several modules hold stays one
                buffers[b] = distribute_tensor(b, mesh, chosen[b], src_data_rank=src_data_rank)
            module._buffers[name] = buffers[b]
    for module in model.modules():
        # Parameters that are fully sharded are read as that says.
        names = tuple(sorted(name for name, p in _own(module._parameters) if SHARDED_AS not in vars(p)))
        if not names and type(module).forward is nn.Module.forward:
            continue  # a list of modules
        vars(module)[VIEW] = view
        module.__class__ = viewed_class(type(module), names)
        if "forward" in vars(module):
            vars(module)["forward"] = functools.partial(view, vars(module)["forward"])
    setattr(model, DISTRIBUTED, True)
    return model


def _own(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, x) for name, x in tensors.items() if x is not None)


class _View:
    """What is called in place of the forward of a model and of its modules. Knows whether one runs: modules that are
    called by themselves are given inputs, and give outputs, as the model is and does."""

    def __init__(
        self,
        mesh: Any,
        inputs: Sequence[Placement],
        outputs: Sequence[Placement] | None,
        checked: bool,
    ) -> None:
        self.mesh, self.inputs, self.outputs = mesh, inputs, outputs
        self.depth = self.runs = 0
        cut = [axis for axis, p in enumerate(inputs) if isinstance(p, Shard)]
        self.check = InputCheck(mesh, cut) if checked else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_View":
        made = memo[id(self)] = _View(*self.__reduce__()[1])
        return made

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _View, (self.mesh, self.inputs, self.outputs, self.check is not None)

    @traced_with_caller
    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.depth:
            return forward(*args, **kwargs)
        if not torch.compiler.is_compiling() and is_in_backward():  # activation checkpoints run what ran inside again
            with self.running():
                return forward(*args, **kwargs)
        plain: list[tuple[str, torch.Tensor, bool]] = []
        take = functools.partial(self._take, plain)
        args = _mapped(take, args, "args")
        kwargs = {name: _mapped(take, x, name) for name, x in kwargs.items()}
        if self.check is not None:
            self.check(plain)
        with self.running():
            out = forward(*args, **kwargs)
        return _mapped(self._give, out, "")

    @never_traced
    def _take(self, plain: list[tuple[str, torch.Tensor, bool]], x: torch.Tensor, name: str) -> torch.Tensor:
        """An argument of the forward as a DTensor; what is none yet is added to `plain`."""
        if isinstance(x, DTensor):
            return x
        placements = _fitting(self.inputs, x)
        plain.append((name, x, any(isinstance(p, Shard) for p in placements)))
        return DTensor.from_local(x, self.mesh, placements)

    @never_traced
    def _give(self, x: torch.Tensor, _: str) -> torch.Tensor:
        """What the forward returns, as it is to leave."""
        if not isinstance(x, DTensor):
            # Plain, but what was written to it was not: its gradient is to come as a DTensor.
            x = x if x.is_leaf or not torch.is_grad_enabled() else _Leaving.apply(x, self.mesh)  # pyright: ignore
        if self.outputs is None or not isinstance(x, DTensor):
            return x
        target = _fitting(self.outputs, x)
        parts = math.prod([self.mesh.size(axis) for axis, p in enumerate(target) if isinstance(p, Shard)])
        local = x.redistribute(placements=target).to_local()
        return _MeanOverParts.apply(local, parts) if parts > 1 and local.requires_grad else local  # pyright: ignore

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.depth += 1
        run = 0
        if not torch.compiler.is_compiling():
            run, self.runs = self.runs, self.runs + 1
        try:
            with global_view(self.check is not None, run):
                yield
        finally:
            self.depth -= 1


@functools.cache
def viewed_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The class of modules of class `cls` whose view is called in place of their forward, which reads the parameters
    `names` by `_read`."""
    inner = cls.forward

    @with_own_code
    @functools.wraps(inner)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._dtensor_view(functools.partial(inner, self), *args, **kwargs)

    inside: dict[str, Any] = {name: property(functools.partial(_read, name=name)) for name in names}
    return made_class(viewed_class, cls, names, forward=forward, **inside)


@never_traced
def _read(module: nn.Module, name: str) -> torch.Tensor | None:
    """A parameter, whose gradient comes in its own placements where a forward reads it: what arrives from operators may
    be a sum that is pending, which optimizers would reduce more than once."""
    p = module._parameters.get(name)
    if not isinstance(p, DTensor) or not vars(module)[VIEW].depth:
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
        PlacementError: an axis that the mesh does not have, too few or too many placements, or what is none.
    """
    if not isinstance(given, Mapping):
        found = [given] if isinstance(given, Placement) else list(given)
        if isinstance(given, Placement) or len(found) != mesh.ndim:
            raise PlacementError(
                f"{what}: the mesh has {mesh.ndim} axes but got {given!r}; write one placement for each axis in a "
                "list, or a dict from names of axes to placements"
            )
        return [as_placement(p) for p in found]
    axes = mesh.mesh_dim_names or ()
    if unknown := [axis for axis in given if axis not in axes]:
        raise PlacementError(f"{what}: the mesh has axes {list(axes)} and no {unknown[0]!r}; write one of these")
    return [as_placement(given.get(axis, Replicate())) for axis in axes] if axes else [Replicate()] * mesh.ndim


def _borders(given: Placements, mesh: Any, what: str) -> list[Placement]:
    """How tensors of any number of dimensions come in or go out.

    Raises:
        PlacementError: as `_by_axis`; or neither whole nor cut along a dimension that is counted from the front.
    """
    found = _by_axis(given, mesh, what)
    for p in found:
        if not (p.is_replicate() or (isinstance(p, Shard) and p.dim >= 0)):
            raise PlacementError(f"{what} are Replicate() or Shard(dim), dim from the front; got {p!r}")
    return found


def _fitting(placements: Sequence[Placement], x: torch.Tensor) -> list[Placement]:
    """`placements` without the cuts of dimensions that `x` does not have."""
    return [Replicate() if isinstance(p, Shard) and p.dim >= x.dim() else p for p in placements]


class _Leaving(torch.autograd.Function):
    """A plain tensor of which every rank has all, as a DTensor, and so its gradient."""

    @staticmethod
    def forward(x: torch.Tensor, mesh: Any) -> DTensor:
        return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, Any], output: DTensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:  # pyright: ignore
        return grad, None


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


def _mapped(f: Callable[[torch.Tensor, str], torch.Tensor], x: Any, name: str) -> Any:
    """`x`, which is called `name`, with `f` of each tensor in it and of what that is called; objects that are none of
    tuple, list, dict and dataclass stay."""
    if isinstance(x, torch.Tensor):
        return f(x, name)
    if isinstance(x, (tuple, list)):
        items = [_mapped(f, item, f"{name}[{i}]") for i, item in enumerate(x)]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    if isinstance(x, dict):
        # An output of transformers is both, and leaves out what is None.
        items = {key: _mapped(f, item, f"{name}[{key!r}]") for key, item in x.items()}
        return type(x)(**items) if is_dataclass(x) else OrderedDict(items) if isinstance(x, OrderedDict) else items
    if is_dataclass(x) and not isinstance(x, type):
        items = {d.name: _mapped(f, getattr(x, d.name), f"{name}.{d.name}") for d in fields(x) if d.init}
        return type(x)(**items)
    return x


__all__ = ["distribute_model"]
