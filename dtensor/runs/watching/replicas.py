"""What a rank holds of a model, its optimizers and generators, and which ranks are to hold the same.

`Scope` is the ranks that compare, and how they exchange what they compare. `holdings` lists the tensors of this rank,
each with its `ReplicaPlace`: the ranks that hold the same one, which follow from mesh and placements of a DTensor, and
are all ranks for a plain tensor. Where programs of all ranks are the same, these lists are, too, apart from the values;
the `text` of a holding is what they have in common.
"""

import difflib
import functools
import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Number
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...comm.from_plain import mesh_of
from ...comm.pending_tensor import waited
from ...errors import ArgumentError, ArgumentTypeError, MeshError
from ...job.groups import group_ranks
from ...mesh.mesh import default_group, group_between
from ...parallel.fsdp.unit import members
from ...tensor.tensor import DTensor
from ...tensor.torch_dtensor import as_ours, is_torch_dtensor
from ...torch_private.core import FakeTensor, backend_of, resolve_process_group, root_mesh

WITHOUT_RANKS = ("fake", "threaded")
"""Backends whose ranks have no generators of their own, or do not exist."""

BY_BATCH = ("running_mean", "running_var")
"""Buffers that each rank computes of its own batch, unless a module is one of `SYNCHRONIZED`."""

SYNCHRONIZED = (nn.SyncBatchNorm,)
FSDP1 = "FullyShardedDataParallel"
PARAMETER, BUFFER, STATE = "parameter", "buffer", "optimizer state"
GRADIENT, GENERATOR, OPTIONS = "gradient", "generator", "options"

WRAPPED = "_orig_mod."
"""What torch.compile puts into the names of parameters."""


class ReplicaPlace(NamedTuple):
    """Which ranks hold the same as this one.

    Attributes:
        ranks: These ranks, ascending, this one included.
        kind: Equal for tensors with the same ranks on every rank.
        text: The placements, for a message; "" for a plain tensor.
        mesh: The mesh that has these ranks; None for a plain tensor.
        axes: Names of the axes of `mesh` over which the tensor is replicated.
    """

    ranks: tuple[int, ...]
    kind: Hashable
    text: str = ""
    mesh: DeviceMesh | None = None
    axes: tuple[str, ...] = ()


@dataclass(eq=False)
class Holding:
    """A tensor that this rank holds.

    Attributes:
        name: The name of the parameter or buffer, or of what stands in for one.
        role: What it is: one of the names above.
        value: The tensor, a DTensor or plain.
        place: Which ranks hold the same.
        shown: Description of the tensor that is the same on all ranks.
        is_counted: Whether its NaNs and infinities are counted.
        key: The key of a state of an optimizer.
        labels: Names of the elements, if they have any.
    """

    name: str
    role: str
    value: torch.Tensor
    place: ReplicaPlace
    shown: str
    is_counted: bool
    key: str = ""
    labels: Sequence[str] = ()

    @property
    def text(self) -> str:
        """What the ranks have in common."""
        of = f"{self.key} of {self.name}" if self.key else self.name
        return f"{self.role} {of}: {self.shown}"

    @property
    def is_compared(self) -> bool:
        """Whether any other rank is to hold the same."""
        return len(self.place.ranks) > 1

    @functools.cached_property
    def local(self) -> torch.Tensor:
        """The plain tensor in the memory of this rank."""
        x = self.value
        return waited(x.to_local()).detach() if isinstance(x, DTensor) else x.detach()


class Scope:
    """The ranks that compare: those of the default process group, or of `mesh`.

    Attributes:
        mesh: The mesh whose ranks compare; None for all ranks.
        rank: This rank.
        ranks: The ranks, in the order of what `gather` returns.
        group: The name of their process group; None if there are no others.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.mesh: DeviceMesh | None = None if mesh is None else mesh_of(mesh)
        self.group: str | None = None
        self._places: dict[Any, ReplicaPlace] = {}
        self.rank: int = 0
        self.ranks: tuple[int, ...] = (0,)
        self.has_generators: bool = dist.is_initialized() and dist.get_backend() not in WITHOUT_RANKS
        if not dist.is_initialized() or dist.get_backend() == "fake":
            return
        self.rank = dist.get_rank()
        if self.mesh is not None and self.mesh.get_coordinate() is None:
            raise MeshError(f"rank {self.rank} is not in {self.mesh}; call watch on the ranks of the mesh only")
        name = default_group() if self.mesh is None else group_between(self.mesh, self.mesh)
        assert name is not None
        self.ranks = group_ranks(name)
        self.group = name if len(self.ranks) > 1 else None

    def device(self, of: torch.device) -> torch.device:
        """The device of what is exchanged, given that of the model: the CPU if the group sends from it."""
        if self.group is None or backend_of(resolve_process_group(self.group), "cpu"):
            return torch.device("cpu")
        return of

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, all of the shape of `x`, along a new first dimension."""
        if self.group is None:
            return x[None]
        whole = torch.ops.dtensor.all_gather(x.reshape(-1), 0, x.numel() * len(self.ranks), self.group)
        return whole.view(len(self.ranks), *x.shape)

    def objects(self, item: Any) -> list[Any]:
        """The objects of all ranks, which must be picklable."""
        if self.group is None:
            return [item]
        found: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(found, item, group=resolve_process_group(self.group))
        return found

    def broadcast(self, x: torch.Tensor, rank: int) -> None:
        """Overwrite `x` with that of `rank`."""
        if self.group is not None:
            dist.broadcast(x, rank, group=resolve_process_group(self.group))

    def alone(self) -> ReplicaPlace:
        """The place of what no other rank holds."""
        return ReplicaPlace((self.rank,), None)

    def everywhere(self) -> ReplicaPlace:
        """The place of what every rank holds."""
        return ReplicaPlace(tuple(sorted(self.ranks)), "everywhere")

    def place(self, x: torch.Tensor) -> ReplicaPlace:
        """The place of a DTensor, or of a plain tensor that is the same on all ranks."""
        if not isinstance(x, DTensor):
            return self.everywhere()
        mesh = x.device_mesh
        replicated = tuple([axis for axis, p in enumerate(x.placements) if p.is_replicate()])
        return self.over(mesh, replicated, self.mesh)._replace(text="".join(map(str, x.placements)))

    def over(self, mesh: DeviceMesh, replicated: tuple[int, ...], within: Any = None) -> ReplicaPlace:
        """The place of what is the same along the given axes of a mesh, and along those that only `within` has."""
        key = (mesh, replicated, within)
        if key not in self._places:
            self._places[key] = self._found(mesh, replicated, within)
        return self._places[key]

    def _found(self, mesh: DeviceMesh, replicated: tuple[int, ...], within: Any) -> ReplicaPlace:
        names = tuple(mesh.mesh_dim_names or map(str, range(mesh.ndim)))
        axes = tuple([names[axis] for axis in replicated])
        other = tuple([name for name in names if name not in axes])
        if within is not None and _is_part(mesh, within):
            mesh, names = within, tuple(within.mesh_dim_names)
            axes = tuple([name for name in names if name not in other])
        at = mesh.get_coordinate()
        if at is None:
            return ReplicaPlace((self.rank,), (mesh, axes), mesh=mesh, axes=axes)
        index = tuple([slice(None) if name in axes else at[axis] for axis, name in enumerate(names)])
        found = mesh.mesh[index].reshape(-1).tolist()
        return ReplicaPlace(tuple(sorted(set(found) & set(self.ranks))), (mesh, axes), mesh=mesh, axes=axes)


def _is_part(mesh: DeviceMesh, whole: Any) -> bool:
    """Whether `mesh` is a slice along axes of `whole`."""
    if root_mesh(mesh) != root_mesh(whole) or not mesh.mesh_dim_names:
        return False
    return set(mesh.mesh_dim_names) <= set(whole.mesh_dim_names or ())


class Holdings:
    """Lists what this rank holds of a model, its optimizers and its generators.

    Attributes:
        model: The model.
        optimizers: Its optimizers.
        scope: The ranks that compare.
        skip: Patterns of names that are left out.
        rng: Whether generators are compared; None for those that DTensors draw from.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], scope: Scope, skip: Sequence[str], rng: bool | None
    ) -> None:
        self.model: nn.Module = model
        self.optimizers: Sequence[Optimizer] = optimizers
        self.scope: Scope = scope
        self.skip: Sequence[str] = skip
        self.rng: bool | None = rng

    def all(self) -> list[Holding]:
        """Everything, in an order that is the same on all ranks."""
        self._parameters: dict[int, tuple[torch.Tensor, Holding | None]] = {}
        found = [*self._of_model(), *self._of_optimizers()]
        device = next((h.value.device for h in found if h.value.device.type != "cpu"), torch.device("cpu"))
        found += [*self._gradients(), *self._generators(device)]
        self._parameters = {}  # parameters that are replaced meanwhile need not be kept
        return found

    def check_patterns(self) -> None:
        """Check what is to be left out.

        Raises:
            TypeError: It is not a sequence of texts.
            ValueError: A pattern matches no parameter or buffer.
        """
        given = [*self.model.named_parameters(), *self.model.named_buffers()]
        names = [name.replace(WRAPPED, "") for name, _ in given]
        for pattern in self.skip:
            if not isinstance(pattern, str):
                raise ArgumentTypeError(
                    f"skip is names of parameters and buffers, or patterns of them; got {pattern!r}"
                )
            if not any(fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
                raise ArgumentError(
                    f"skip={pattern!r} matches no parameter or buffer of the model; it has for example "
                    f"{', '.join(near)}"
                )

    def _of_model(self) -> Iterator[Holding]:
        flat = _prefixes(self.model, lambda m: type(m).__name__ == FSDP1)
        for name, p in self.model.named_parameters():
            yield from self._parameter(name, p, is_own=any(name.startswith(prefix) for prefix in flat))
        synchronized = _prefixes(self.model, lambda m: isinstance(m, SYNCHRONIZED))
        for name, x in self.model.named_buffers():
            prefix, _, last = name.rpartition(".")
            is_own = last in BY_BATCH and f"{prefix}." not in synchronized and not isinstance(x, DTensor)
            if not is_own:
                yield from self._made(name, BUFFER, x, is_counted=False)

    def _parameter(self, name: str, p: torch.Tensor, is_own: bool = False) -> Iterator[Holding]:
        if id(p) not in self._parameters:
            made = list(self._made(name, PARAMETER, p, self.scope.alone() if is_own else None))
            self._parameters[id(p)] = p, made[0] if made else None
            yield from made

    def _made(
        self,
        name: str,
        role: str,
        x: torch.Tensor,
        place: ReplicaPlace | None = None,
        is_counted: bool = True,
        key: str = "",
    ) -> Iterator[Holding]:
        """The holding of a tensor, unless it is left out or has no memory that could be read."""
        name = name.replace(WRAPPED, "")
        if self._is_skipped(name) or not _is_readable(x):
            return
        x = as_ours(x.detach()) if is_torch_dtensor(x) else x
        place = self.scope.place(x) if place is None else place
        kind = str(x.dtype).removeprefix("torch.")
        sizes = list(x.shape) if isinstance(x, DTensor) or place.kind == "everywhere" else "[...]"
        yield Holding(name, role, x, place, f"{kind} {sizes} {place.text}".rstrip(), is_counted, key)

    def _is_skipped(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.skip)

    def _of_optimizers(self) -> Iterator[Holding]:
        for number, optimizer in enumerate(self.optimizers):
            of = f"optimizer {number}, " if len(self.optimizers) > 1 else ""
            for g, group in enumerate(optimizer.param_groups):
                yield from self._options(f"{of}param_groups[{g}]", group)
                for i, p in enumerate(group["params"]):
                    name = f"{of}param_groups[{g}]['params'][{i}]"
                    yield from self._parameter(name, p)
                    yield from self._state(p, optimizer.state.get(p, {}))

    def _options(self, name: str, group: dict[str, Any]) -> Iterator[Holding]:
        """The numbers among the options of a group, such as its learning rate, as one tensor; and its tensors."""
        labels, numbers = [], []
        for key, given in group.items():
            if isinstance(given, torch.Tensor):
                yield from self._made(f"{name}[{key!r}]", OPTIONS, given)
            for part in given if isinstance(given, (tuple, list)) else (given,):
                if isinstance(part, Number) and not isinstance(part, complex):
                    labels.append(key)
                    numbers.append(float(part))  # pyright: ignore[reportArgumentType]
        values = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        place = self.scope.everywhere()
        yield Holding(name, OPTIONS, values, place, ", ".join(labels), False, labels=labels)

    def _state(self, p: torch.Tensor, state: Any) -> Iterator[Holding]:
        _, of = self._parameters[id(p)]
        for key in sorted(state, key=str) if of is not None and isinstance(state, dict) else ():
            x = state[key]
            if isinstance(x, (int, float)):
                x = torch.tensor(x, dtype=torch.float64, device="cpu")
            if isinstance(x, torch.Tensor):
                assert of is not None
                # A plain tensor beside a sharded parameter is about this rank's shard, unless it is a single number.
                is_own = x.dim() > 0 and not isinstance(x, DTensor) and not is_torch_dtensor(x)
                place = of.place._replace(text="") if is_own else None
                yield from self._made(of.name, STATE, x, place, key=str(key))

    def _gradients(self) -> Iterator[Holding]:
        """Gradients of the last step, of which only NaNs and infinities are of interest.

        A gradient scaler has its optimizers skip the steps in which there are any.
        """
        scaled = [o for o in self.optimizers if getattr(o, "found_inf", None) is not None]
        left_out = {id(p) for o in scaled for group in o.param_groups for p in group["params"]}
        for key, (p, of) in self._parameters.items():
            if of is not None and p.grad is not None and key not in left_out:
                yield from self._made(of.name, GRADIENT, p.grad, self.scope.alone())

    def _generators(self, device: torch.device) -> Iterator[Holding]:
        place = self._place_of_generators()
        if self.scope.group is None or not self.scope.has_generators or place is None:
            return
        yield Holding("the generator of the CPU", GENERATOR, torch.get_rng_state(), place, "", False)
        if device.type not in ("cpu", "meta"):
            state = torch.get_device_module(device).get_rng_state()
            yield Holding(f"the generator of {device.type}", GENERATOR, state, place, "", False)

    def _place_of_generators(self) -> ReplicaPlace | None:
        """Which ranks are to draw the same numbers; None if none are.

        Those that compute on DTensors together. Along a data axis of `fully_shard` each rank has a batch of its own,
        and may drop out other elements than its neighbours.
        """
        if self.rng is False:
            return None
        if self.rng:
            return self.scope.everywhere()
        found: ReplicaPlace | None = None
        data = _data_axes(self.model)
        for name, p in self.model.named_parameters():
            x = as_ours(p.detach()) if is_torch_dtensor(p) else p
            if isinstance(x, DTensor) and x.device_mesh.get_coordinate() is not None:
                mesh = x.device_mesh
                shared = tuple([axis for axis in range(mesh.ndim) if axis not in data.get(name, ())])
                place = self.scope.over(mesh, shared)
                if found is None or len(place.ranks) > len(found.ranks):
                    found = place
        return found._replace(kind="generators") if found is not None else None


def _data_axes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name of a fully sharded parameter -> the axes of its mesh along which each rank has a batch of its own."""
    names, found = {id(m): name for name, m in model.named_modules()}, {}
    for module, member in members(model):
        for name in member.how if member.unit.local else ():
            p: Any = module._parameters[name]
            data, mesh = member.unit.mesh, p.device_mesh
            known: list[str] = list(mesh.mesh_dim_names or ())
            axes = range(mesh.ndim) if mesh == data else map(known.index, data.mesh_dim_names or ())
            found[f"{names[id(module)]}.{name}".lstrip(".")] = tuple(axes)
    return found


def _prefixes(model: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> list[str]:
    """The prefix of the names in each module that is wanted."""
    return [f"{name}." if name else "" for name, module in model.named_modules() if is_wanted(module)]


def _is_readable(x: torch.Tensor) -> bool:
    """Whether a tensor has memory that lies in strides, and is no stand-in for another."""
    if is_lazy(x) or x.is_meta or isinstance(x, FakeTensor) or x.layout != torch.strided:
        return False
    return not x.is_quantized


def digest(text: str) -> int:
    """A checksum of a text, in 63 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


__all__ = [
    "BUFFER",
    "GENERATOR",
    "GRADIENT",
    "OPTIONS",
    "PARAMETER",
    "STATE",
    "WRAPPED",
    "Holding",
    "Holdings",
    "ReplicaPlace",
    "Scope",
    "digest",
]
