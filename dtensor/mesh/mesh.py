"""What the library needs to know about a DeviceMesh, looked up once per mesh object, and the process groups for it.

Facts are keyed by the mesh object, not by its value: after the process groups have been destroyed and made again, an
equal mesh has different groups.

A mesh comes with one process group per axis. A single collective over two axes needs a group over both. Such groups are
made here, by `prepare`, and nowhere else: all ranks of the default group must make a group together and in the same
order, which only a deliberate call on every rank can guarantee. `init_device_mesh` is such a call already, and prepares
the mesh. A mesh made in another way must be prepared by the user, or is redistributed over one axis at a time. So no
group is ever made in a redistribution, in a pass or during a trace, and plans may merge the same axes on all ranks, in
eager mode and at trace time. Slices of a prepared mesh use its groups.

The costs of links must also be the same for the plans of all ranks. In `prepare`, the first rank of the mesh reads the
links measured on its machine (`dtensor.prices.calibrated`) and broadcasts them. Hosts are assumed to be identical: only
that rank's file is read.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import combinations
from math import prod
from numbers import Integral
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh

from ..errors import ArgumentError, ArgumentTypeError, MeshError, shown
from ..job.elastic import init_process_group, join_round, started_alone
from ..job.groups import is_alive, shared_name
from ..job.job import all_here, job
from ..prices.calibrated import Measured, links_here
from ..prices.links import Link, Network
from ..prices.machine import Machine
from ..torch_private.core import default_group_timeout, disable_current_modes, real_object, root_mesh
from .caches import cache, clear_caches

PREPARED = "_dtensor_prepared"
"""The attribute of a mesh in which `prepare` stores its `Prepared`, so that it lives as long as the mesh."""
MANY_AXES = 4
"""With up to this many axes, every set of axes gets a group; with more, only sets of neighbouring axes."""
RANKS_PER_HOST = "LOCAL_WORLD_SIZE"
"""The environment variable that shows which axes are within a host; torchrun sets it to the same value on all ranks."""


@dataclass
class Prepared:
    """What `prepare` made for a mesh.

    Attributes:
        groups: Axes -> name of this rank's group over them, None on ranks outside.
        unions: Union of ranks -> name of this rank's group over them, None on ranks outside.
        links: The links that the user gave, one per axis; None if not given.
        measured: The measured links that all ranks use.
        slices: Names of axes -> the mesh of these axes.
    """

    groups: dict[tuple[int, ...], str | None] = field(default_factory=dict)
    unions: dict[tuple[int, ...], str | None] = field(default_factory=dict)
    links: tuple[Link, ...] | None = None
    measured: Measured = field(default_factory=Measured)
    slices: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Prepared":
        return self

    def __reduce__(self) -> Any:
        # Names of groups mean nothing in another process.
        return Prepared, ()


torch.serialization.add_safe_globals([DeviceMesh, Prepared])  # the contents of a pickled mesh, for torch.load


@dataclass(frozen=True)
class MeshFacts:
    """What is known about a mesh.

    Attributes:
        mesh: The mesh.
        shape: Sizes of its axes.
        coordinate: This rank's index along each axis; None on a rank outside the mesh.
        groups: Ascending axes -> name of this rank's group over them; empty on a rank outside the mesh.
        network: The description of the mesh for the planner.
        measured: Whether its links were measured, or given to `prepare`.
        machine: What a rank computes with, as measured on the mesh's first rank; None if it was not.
    """

    mesh: DeviceMesh
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    groups: dict[tuple[int, ...], str]
    network: Network
    measured: bool = False
    machine: Machine | None = None

    @property
    def by_axis(self) -> list[str]:
        """Names of this rank's groups over a single axis, one per mesh axis."""
        return [group for axes, group in self.groups.items() if len(axes) == 1]


_facts: dict[int, MeshFacts] = cache()


def facts(mesh: DeviceMesh) -> MeshFacts:
    """The facts of `mesh`, cached.

    Raises:
        MeshError: The ranks do not ascend along an axis, as those of a group do, and the mesh was not prepared.
    """
    found = _facts.get(id(mesh))
    if found is None:
        real = real_object(mesh)
        if real is not mesh:
            return facts(real)
        with disable_current_modes():
            found = _facts[id(mesh)] = _look_up(mesh)
    return found


def _look_up(mesh: DeviceMesh) -> MeshFacts:
    root = root_mesh(mesh)
    prepared: Prepared = vars(root).get(PREPARED) or Prepared()
    in_root = _axes_in_root(mesh, root)
    made = {}
    for axes, name in prepared.groups.items():
        if all(a in in_root for a in axes):
            mine = tuple([in_root.index(a) for a in axes])
            if list(mine) == sorted(mine):
                made[mine] = name
    at = mesh.get_coordinate()
    groups = {}
    for axis in range(mesh.ndim):
        if (axis,) not in made and not _ascending(_rows(mesh.mesh, (axis,))):
            raise MeshError(
                f"along axis {axis} of {mesh} the ranks do not ascend, but those of its process group do; "
                "write dtensor.prepare(mesh) on every rank after making the mesh, or list its ranks in ascending order"
            )
        if at is not None:
            groups[(axis,)] = made.get((axis,)) or mesh.get_group(axis).group_name
    merged = [axes for axes in made if len(axes) > 1]
    if at is not None:
        groups.update({axes: made[axes] for axes in merged})
    own, links = (_links_by_host(m.mesh, prepared.measured) for m in (mesh, root))
    links = prepared.links or links
    mine = tuple([links[a] if a is not None else own[i] for i, a in enumerate(in_root)])
    network = Network.of(tuple(mesh.shape), mine, merged)
    groups = {axes: shared_name(name, _label(mesh, axes), _all_rows(root, mesh, axes)) for axes, name in groups.items()}
    said = prepared.measured
    measured = bool(prepared.links or said.inter or said.intra)
    at = None if at is None else tuple(at)
    return MeshFacts(mesh, tuple(mesh.shape), at, groups, network, measured, said.machine)


def _all_rows(root: Any, mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The ranks of all groups along `axes`, in slices other than this one too."""
    in_root = _axes_in_root(mesh, root)
    own = [in_root[a] for a in axes]
    rows = _rows(mesh.mesh, axes) if None in own else _rows(root.mesh, tuple([a for a in own if a is not None]))
    return tuple([tuple(row) for row in rows])


def _label(mesh: DeviceMesh, axes: tuple[int, ...]) -> str:
    """What the group of this rank along `axes` is: `mesh.dp+tp`, or `mesh.0+1` if the axes have no names."""
    names = mesh.mesh_dim_names or range(mesh.ndim)
    return "mesh." + "+".join([str(names[axis]) for axis in axes])


def partitions(mesh: DeviceMesh) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Names of this rank's groups over axes of `mesh` -> the ranks of all groups over the same axes.

    For a sliced mesh this includes the groups of the mesh that it was sliced from: each rank is in a different slice.
    """
    with disable_current_modes():
        root = root_mesh(mesh)
        found = {}
        for whole in {id(m): m for m in (mesh, root)}.values():
            for axes, name in _look_up(whole).groups.items():
                found[name] = tuple([tuple(row) for row in _rows(whole.mesh, axes)])
        return found


def forget_all_but_meshes() -> None:
    """Clear all caches but that of the meshes: all specs are made, and all decisions taken, anew."""
    clear_caches(but=_facts)


def known_groups() -> dict[str, tuple[str, tuple[tuple[int, ...], ...]]]:
    """Names of this rank's groups over axes of the meshes that were looked up -> the device type of the mesh, and the
    ranks of all groups over these axes. The same on all ranks."""
    found: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {}
    for known in known_meshes():
        if all(is_alive(name) for name in known.groups.values()):
            found |= {name: (known.mesh.device_type, rows) for name, rows in partitions(known.mesh).items()}
    return found


def _axes_in_root(mesh: DeviceMesh, root: Any) -> list[int | None]:
    """For each axis of `mesh`, the same axis of `root`; None if there is none, as for a flattened axis."""
    if mesh is root:
        return list(range(mesh.ndim))
    names = list(root.mesh_dim_names or ())
    return [names.index(n) if n in names else None for n in mesh.mesh_dim_names or ()]


def _rows(ranks: torch.Tensor, axes: tuple[int, ...]) -> list[list[int]]:
    """The ranks of each group over `axes`, with the last axis fastest."""
    size = 1
    for a in axes:
        size *= ranks.shape[a]
    return ranks.movedim(axes, tuple(range(-len(axes), 0))).reshape(-1, size).tolist()


def _ascending(rows: list[list[int]]) -> bool:
    return all(row == sorted(row) for row in rows)


def _links_by_host(ranks: torch.Tensor, measured: Measured) -> tuple[Link, ...]:
    """For each axis, the link between hosts if one of its groups spans hosts, otherwise the link within a host."""
    per_host = int(os.environ.get(RANKS_PER_HOST, "0"))
    inter, intra = measured.links

    def link(axis: int) -> Link:
        rows = _rows(ranks, (axis,))
        return inter if per_host and any(r // per_host != row[0] // per_host for row in rows for r in row) else intra

    return tuple([link(axis) for axis in range(ranks.dim())])


def init_device_mesh(
    device_type: str, mesh_shape: tuple[int, ...], *, timeout: timedelta | None = None, **options: Any
) -> DeviceMesh:
    """Make a DeviceMesh and prepare it.

    Like `torch.distributed.device_mesh.init_device_mesh`, followed by `prepare`. Collective: every rank of the default
    process group calls it. If there is no process group yet, this makes it, in such a way that ranks which torchrun
    has restarted do not read what their predecessors left in its store. A process that was started without a launcher,
    as by `python train.py`, is the only rank.

    Args:
        device_type: "cpu", "cuda" or another device type of torch.
        mesh_shape: Number of ranks along each axis. One of them may be -1, for as many as there are: (-1,) or (-1, 2)
            fits any job, and (-1,) a single process, too.
        timeout: For the process group, if it is made here: how long ranks wait for each other, at the start and in a
            collective. None for torch's default, which is half an hour over gloo.
        options: Passed on to torch's function.

    Raises:
        ValueError: `mesh_shape` is not a tuple of positive ints, of which one may be -1, the number of ranks cannot be
            divided so, torch does not know `device_type`, or the axes do not have one name each.
        TypeError: `mesh_dim_names` is not a sequence of names.
        MeshError: The job has fewer ranks than the mesh, this process was started without a launcher, or torch sees no
            such device.
        AgreementError: A rank did not come within `timeout`.
    """
    sizes = _checked_shape(device_type, mesh_shape)
    _check_names(options.get("mesh_dim_names"), sizes)
    if not dist.is_initialized():
        _check_launched(sizes)
        init_process_group(timeout)
    sizes = _filled(sizes, dist.get_world_size())
    _check_ranks(device_type, sizes)
    all_here()
    mesh = torch_init_device_mesh(device_type, sizes, **options)
    prepare(mesh)
    return mesh


def _checked_shape(device_type: Any, mesh_shape: Any) -> tuple[int, ...]:
    sizes = mesh_shape if isinstance(mesh_shape, (tuple, list)) else ()
    if not sizes or not all(isinstance(n, Integral) and (int(n) > 0 or n == -1) for n in sizes) or sizes.count(-1) > 1:
        raise ArgumentError(
            "mesh_shape must be a tuple with the number of ranks along each axis, such as (4,) or (2, 2), at least one "
            f"per axis, or -1 along one axis for as many as there are; got {shown(mesh_shape)}, write such as "
            'init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))'
        )
    try:
        found = torch.device(device_type)
    except (RuntimeError, TypeError):
        raise ArgumentError(
            f'device_type must be "cpu", "cuda" or another of torch\'s; got {shown(device_type)}, write '
            'init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))'
        ) from None
    if found.index is not None:
        raise ArgumentError(
            f"device_type names a kind of device, of which each rank has one; got {device_type!r}, write {found.type!r}"
        )
    return tuple(map(int, sizes))


def _check_launched(sizes: tuple[int, ...]) -> None:
    """Refuse a mesh of several ranks in a process that was started by itself."""
    ranks = abs(prod(sizes))
    if ranks > 1 and started_alone():
        script = sys.argv[0] if sys.argv[0].endswith(".py") else "train.py"
        raise MeshError(
            f"a mesh of shape {sizes} has {ranks} ranks, but this process was started alone, without a launcher; "
            f"write: torchrun --nproc-per-node {ranks} {script}. In a notebook, dtensor.simulate({ranks}) starts "
            f"{ranks} ranks. A mesh of shape (-1,) takes as many ranks as there are, also one"
        )


def _filled(sizes: tuple[int, ...], world: int) -> tuple[int, ...]:
    """`sizes` with the number of ranks in place of -1."""
    if -1 not in sizes:
        return sizes
    others = -prod(sizes)
    if world % others:
        raise ArgumentError(
            f"mesh_shape {sizes} takes a multiple of {others} ranks, but there are {world}; "
            f"start {others * -(-world // others)}, or write other sizes"
        )
    return tuple([world // others if n == -1 else n for n in sizes])


def _check_names(names: Any, mesh_shape: Sequence[int]) -> None:
    if names is None:
        return
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        fix = f"({names!r},)" if isinstance(names, str) else 'such as ("dp", "tp")'
        raise ArgumentTypeError(f"mesh_dim_names is a tuple with a name for each axis; got {names!r}, write {fix}")
    if len(names) != len(mesh_shape) or len(set(names)) < len(names):
        raise ArgumentError(
            f"mesh_dim_names has a name of its own for each axis, but mesh_shape {tuple(mesh_shape)} has "
            f"{len(mesh_shape)} and the names are {tuple(names)}; write as many different ones"
        )


def _check_ranks(device_type: str, sizes: tuple[int, ...]) -> None:
    """Raise if there are too few ranks for a mesh, or no such devices."""
    ranks, world = prod(sizes), dist.get_world_size()
    if ranks > world:
        raise MeshError(
            f"a mesh of shape {sizes} takes {ranks} ranks, but this job has {world}; start it by `torchrun "
            f"--nproc-per-node={ranks} script.py`, or write a mesh of {world}, such as init_device_mesh"
            f'("{device_type}", ({world},))'
        )
    kind: Any = getattr(torch, device_type, None)
    if dist.get_backend() != "fake" and hasattr(kind, "is_available") and not kind.is_available():
        raise MeshError(
            f'device_type is "{device_type}", but torch sees no such device here '
            f"(torch.{device_type}.is_available() is "
            'False); write "cpu", or install a torch that supports it and start on a machine that has one'
        )


def prepare(*meshes: DeviceMesh, links: Sequence[Link] | None = None) -> None:
    """Make the process groups with which redistributions cover several axes of a mesh in one collective.

    Given several meshes, also make a group over the ranks of all of them, over which tensors move from one mesh to
    another. (If the meshes, or one of them, cover all ranks, such moves need no preparation.) Collective: every rank of
    the default process group calls it, including those outside the meshes, in the same order relative to other calls
    that make groups. Given a slice of a mesh, prepares the mesh that it was sliced from.

    Args:
        meshes: The meshes.
        links: For the planner, the link along each axis of the mesh (`dtensor.prices.links.Link`); only with a single
            mesh. By default, an axis has the link between hosts if one of its groups spans hosts, judging by
            torchrun's LOCAL_WORLD_SIZE, and otherwise the link within a host. Both are as `dtensor calibrate` measured
            them on the machine of the mesh's first rank, or else `INTER` and `INTRA`.

    Raises:
        ValueError: No mesh is given, links are given for several meshes, or the number of links is not the number of
            axes.
        MeshError: An argument is not a mesh.
        TypeError: An item of `links` is not a `Link`.
    """
    if not meshes or (links is not None and len(meshes) > 1):
        raise ArgumentError(
            f"prepare takes one mesh, with or without links, or several meshes without links; got {len(meshes)} meshes "
            f"and links={links}"
        )
    for mesh in meshes:
        if not hasattr(mesh, "device_type"):
            raise MeshError(f"prepare takes meshes as made by init_device_mesh; got {mesh!r}")
    for link in links or ():
        if not isinstance(link, Link):
            raise ArgumentTypeError(f"links takes a dtensor.prices.links.Link for each axis of the mesh; got {link!r}")
    join_round()
    job()  # from here on each rank knows whether the others are alive
    roots = [root_mesh(mesh) for mesh in meshes]
    if links is not None and len(links) != roots[0].ndim:
        raise ArgumentError(
            f"{roots[0]} has {roots[0].ndim} axes but {len(links)} links were given; write one for each"
        )
    for root in roots:
        prepared = vars(root).setdefault(PREPARED, Prepared())
        for axes in _worth_merging(root.mesh):
            if axes not in prepared.groups:
                prepared.groups[axes] = _new_groups(_rows(root.mesh, axes))
        prepared.links = tuple(links) if links is not None else prepared.links
        prepared.measured = _agreed_links(root)
    union = _union(*roots)
    if len(roots) > 1 and len(union) < dist.get_world_size():
        name = _new_groups([list(union)])
        for root in roots:
            vars(root)[PREPARED].unions[union] = name
    _prepared.extend([(ref(root), job()) for root in roots])
    clear_caches()  # cached decisions hold plans made without these groups and links


_prepared: list[tuple[ref[DeviceMesh], Any]] = []
"""The meshes that were prepared in this process, and the jobs for which they were."""


def look_up_prepared() -> bool:
    """Look up the facts of the meshes that were prepared for this job, so that the same ones are known on all ranks.

    Returns:
        Whether the job has other ranks and any mesh is known. Groups of an earlier job may have the names of new ones.
    """
    here = job()
    if here is None:
        return False
    _prepared[:] = [(mesh, made_for) for mesh, made_for in _prepared if mesh() is not None and made_for is here]
    for known, _ in _prepared:
        if (mesh := known()) is not None:
            facts(mesh)
    return bool(_facts)


def one_object(mesh: DeviceMesh) -> DeviceMesh:
    """`mesh`, or an equal slice of the same mesh that was passed before.

    Slicing makes a new object each time, and facts are keyed by the object.
    """
    prepared: Prepared = vars(root_mesh(mesh)).setdefault(PREPARED, Prepared())
    known = prepared.slices.setdefault(tuple(mesh.mesh_dim_names or ()), mesh)
    return known if known == mesh else mesh


def backend_of(mesh: DeviceMesh) -> str:
    """Name of the backend that sends tensors of the mesh's device type; "" if there is none."""
    backends = dict(pair.split(":") for pair in str(dist.get_backend_config()).split(","))
    return backends.get(mesh.device_type, "")


def _agreed_links(mesh: DeviceMesh) -> Measured:
    """The links measured on the machine of the mesh's first rank, broadcast to every rank of the default group."""
    first, backend = int(mesh.mesh.flatten()[0]), backend_of(mesh)
    alone = backend == "fake" or dist.get_world_size() == 1
    said = [links_here(backend, mesh.device_type) if alone or dist.get_rank() == first else Measured()]
    if not alone:
        with disable_current_modes():
            dist.broadcast_object_list(said, src=first)
    return said[0]


def _worth_merging(ranks: torch.Tensor) -> Iterator[tuple[int, ...]]:
    """The sets of axes that get a group: two or more axes of more than one rank, and single non-ascending axes."""
    yield from ((a,) for a in range(ranks.dim()) if not _ascending(_rows(ranks, (a,))))
    axes = [a for a in range(ranks.dim()) if ranks.shape[a] > 1]
    for k in range(2, len(axes) + 1):
        if len(axes) <= MANY_AXES:
            yield from combinations(axes, k)
        else:
            yield from (tuple(axes[i : i + k]) for i in range(len(axes) - k + 1))


def _new_groups(rows: list[list[int]]) -> str | None:
    """Make a group over each of `rows`, with ranks in the listed order; the name of the one with this rank, or None."""
    if rows == [list(range(dist.get_world_size()))]:
        return default_group()
    mine = None
    for row in rows:
        group: Any = dist.new_group(row, timeout=default_group_timeout(), sort_ranks=row == sorted(row))
        if dist.get_rank() in row:
            mine = group.group_name
    return mine


def default_group() -> str:
    """Name of the default process group."""
    group: Any = dist.group.WORLD
    return group.group_name


def _union(*meshes: DeviceMesh) -> tuple[int, ...]:
    return tuple(sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}))


def group_between(one: Any, other: Any) -> str | None:
    """Name of a process group over the ranks of both meshes; None on a rank outside it.

    Raises:
        MeshError: There is no such group.
    """
    union = _union(one, other)
    if len(union) == dist.get_world_size():
        return default_group()
    for mesh in (one, other):
        if _union(mesh) == union:
            real = tuple([a for a, n in enumerate(mesh.shape) if n > 1]) or (0,)
            if len(real) == 1 or real in facts(mesh).network.merged:
                return facts(mesh).groups.get(real)
        prepared: Prepared = vars(root_mesh(mesh)).get(PREPARED) or Prepared()
        if union in prepared.unions:
            return prepared.unions[union]
    raise MeshError(
        f"there is no process group over the ranks {list(union)} of {one} and {other}; "
        "write dtensor.prepare(mesh, other_mesh) on every rank after making the meshes"
    )


def known_meshes() -> list[MeshFacts]:
    """The facts of all meshes looked up so far: those that tensors are on. Some may outlive their groups."""
    return list(_facts.values())


MeshKind = tuple[str, str, tuple[str, ...] | None, tuple[str, ...] | None, tuple[int, ...]]


def mesh_kind(mesh: DeviceMesh) -> MeshKind:
    """What a mesh is, in the same words on all ranks: for a slice, the mesh that it was sliced from, and its axes."""
    root = root_mesh(mesh)
    return mesh.device_type, str(root.mesh.tolist()), root.mesh_dim_names, mesh.mesh_dim_names, tuple(mesh.shape)


def mesh_of_kind(kind: MeshKind) -> Any:
    """The mesh of this rank that is what another rank described by `mesh_kind`.

    Raises:
        MeshError: There is none.
    """
    for known in known_meshes():
        if mesh_kind(known.mesh) == kind:
            return known.mesh
    raise MeshError(f"there is no mesh {kind[3] or kind[4]} of {kind[0]} ranks {kind[1]} here")


def _is_own(mesh: DeviceMesh) -> bool:
    """Whether this rank is where `mesh` says: ranks that are threads of one process see each other's meshes."""
    root = root_mesh(mesh)  # a slice is computed from the rank that asks, so it says nothing of whose it is
    here = (root.mesh == dist.get_rank()).nonzero().tolist()
    coordinate = root.get_coordinate()
    return here == ([] if coordinate is None else [list(coordinate)])


_any_rank: ContextVar[bool] = ContextVar("dtensor_keys_of_any_rank", default=False)


@contextmanager
def keys_of_any_rank() -> Iterator[None]:
    """A context in which cache keys of compiled code do not depend on where this rank is in its meshes."""
    token = _any_rank.set(True)
    try:
        yield
    finally:
        _any_rank.reset(token)


def is_for_any_rank() -> bool:
    """Whether cache keys must not depend on the rank: within `keys_of_any_rank`."""
    return _any_rank.get()


def unpickled(mesh: DeviceMesh, rank: int) -> DeviceMesh:
    """The mesh of this rank for `mesh`, which global rank `rank` pickled.

    A pickled mesh says where in it the rank is that pickled it, names that rank's groups, and lacks those of several
    axes. So a rank takes its own mesh of the same ranks instead, if it has one: then all plan the same collectives.

    Raises:
        MeshError: another rank pickled the mesh, and this rank has used no such mesh yet.
    """
    if not dist.is_initialized():
        return mesh
    kind = mesh_kind(mesh)
    for known in known_meshes():
        if mesh_kind(known.mesh) == kind and _is_own(known.mesh):
            return known.mesh
    if dist.get_rank() == rank:
        return mesh
    raise MeshError(
        f"there is no mesh {kind[3] or kind[4]} of {kind[0]} ranks {kind[1]} here; make it, and the model on it, "
        "before loading, or save x.full_tensor()"
    )


def world_of(mesh: DeviceMesh) -> str:
    """Text with everything about `mesh` that a traced graph may depend on, for cache keys of compiled code."""
    known = facts(mesh)
    n, at = known.network, known.coordinate
    place = (at is not None, mesh_kind(mesh)) if is_for_any_rank() else at
    return repr((known.shape, place, sorted(known.groups.items()), n.links, sorted(n.merged), mesh.device_type))


def mesh_shape(mesh: DeviceMesh) -> tuple[int, ...]:
    """Sizes of the mesh axes."""
    return facts(mesh).shape


def group_name(mesh: DeviceMesh, axis: int) -> str:
    """Name of this rank's process group along a mesh axis."""
    return facts(mesh).groups[(axis,)]


__all__ = [
    "MeshFacts",
    "facts",
    "forget_all_but_meshes",
    "group_between",
    "group_name",
    "init_device_mesh",
    "is_for_any_rank",
    "keys_of_any_rank",
    "known_groups",
    "known_meshes",
    "look_up_prepared",
    "mesh_kind",
    "mesh_of_kind",
    "mesh_shape",
    "one_object",
    "partitions",
    "prepare",
    "unpickled",
    "world_of",
]
