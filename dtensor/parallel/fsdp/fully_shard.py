"""`fully_shard`: stores the parameters of a module sharded over the data axis and gathers them for use.

See Rajbhandari et al., "ZeRO", 2020. Names and meaning follow PyTorch's FSDP2: activations are each rank's part of the
batch, and gradients are averaged. There are no hooks and no buffers: `sharded_module` makes reading a parameter an
all-gather, and `sharding` shards it. The compiler passes decide when to gather and what to bucket.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from ...comm.from_plain import check_source, refuse_torchs
from ...dispatch.plain_operands import advice
from ...errors import ArgumentError, ArgumentTypeError, MeshError, PlacementError, UnsupportedError, shown
from ...layout.placements import Shard, as_placements
from ...mesh.mesh import one_object
from ..modules.replaced import following
from .added_later import remember
from .mixed_precision import FLOAT8, MixedPrecisionPolicy
from .sharded_module import join, plain_class, sharded_class
from .sharding import SHARDED_AS, planned, sharded
from .unit import MEMBER, Member, Unit, members
from .unshard import Unshard

OUTSIDE = (
    "if one of them is a parameter of fully_shard that is read outside of a forward, write p.full_tensor(), or "
    "module.unshard() before and module.reshard() after"
)
"""What to do where a sharded parameter meets plain tensors."""

PlacementFn = Callable[[nn.Parameter], Shard | None]


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    shard_placement_fn: PlacementFn | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    activations: Literal["local", "global"] = "local",
    src_data_rank: int | None = 0,
    offload_policy: Any = None,
) -> Any:
    """Shards the parameters of `module`, in place, over a data axis.

    Parameters become DTensors with the same names in `named_parameters` and `state_dict`. Reading a parameter while a
    forward runs gathers it. Gradients are averaged over the data axes and arrive sharded like the parameters.

    Submodules with a separate `fully_shard` call have their own policy, whether it comes before or after the call on
    the enclosing module. Parameters that tensor parallel styles have sharded over other axes of the same mesh are
    sharded further; the styles may also be applied afterwards. If the call raises, `module` is unchanged.

    Args:
        module: the module, or several that form one unit.
        mesh: a mesh of one axis, or of two axes (replicate, shard). With two, parameters are sharded over the second
            axis and replicated over the first (hybrid sharding); if the second has one rank, this is data parallelism.
        reshard_after_forward: gather parameters again in the backward; False keeps the gathered parameters of the
            forward. This applies to compiled graphs; eager autograd keeps the tensors it saves in either case.
        mp_policy: the dtypes to gather, compute and reduce in. FSDP2's policy class of torch is accepted too.
        shard_placement_fn: a function from a parameter to the `Shard(dim)` to shard it by, or to None for dim 0. Sizes
            need not divide evenly. Zero-dimensional parameters are replicated.
        ignored_params: parameters that are not changed. Their gradients are not reduced.
        activations: "local" if each rank computes on its own part of the batch as plain tensors (or as DTensors on the
            other axes): each rank has its own loss, and gradients are averaged. "global" if activations are DTensors on
            `mesh`: gradients are those of the loss itself.
        src_data_rank: the rank along each data axis whose parameter values all ranks receive; None uses each rank's
            own, without communication.
        offload_policy: None, or torch's `OffloadPolicy()`, which offloads nothing: parameters stay on their device.

    Returns:
        `module`, whose class is now also a `FullyShardedModule`.

    Raises:
        TypeError: an argument has the wrong type, or a module is scripted.
        ValueError: the mesh has more than two axes; a module is already fully sharded or is a ModuleList or ModuleDict;
            no module was given; a parameter has no shape yet (a lazy module); an option comes too late for parameters
            that are already sharded; or an axis has no rank `src_data_rank`.
        MeshError: this rank is not in the mesh, or a parameter is on a mesh that cannot be combined with it.
        NotImplementedError: `offload_policy` would offload something.
        PlacementError: `shard_placement_fn` returned a dim that the parameter does not have.
    """
    modules = list(module) if isinstance(module, Iterable) and not isinstance(module, nn.Module) else [module]
    _check_modules(modules)
    _check_mesh(mesh)
    if not isinstance(reshard_after_forward, bool):
        raise ArgumentTypeError(
            f"reshard_after_forward is True or False; got {reshard_after_forward!r}. To gather from fewer ranks, shard "
            "over fewer: give a mesh (replicate, shard)"
        )
    if offload_policy is not None and type(offload_policy).__name__ != "OffloadPolicy":
        raise UnsupportedError(
            f"fully_shard does not offload parameters; got offload_policy={shown(offload_policy)}, leave it out, and "
            "shard over more ranks where memory is short"
        )
    if activations not in ("local", "global"):
        raise ArgumentError(f"activations is 'local' or 'global'; got {activations!r}")
    check_source(mesh, src_data_rank)
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise ArgumentTypeError(f"shard_placement_fn is a function of a parameter; got {shard_placement_fn!r}")
    ignored = {id(p) for p in _parameters(ignored_params)}
    policy = policy_of(mp_policy)
    if activations == "global" and policy.reduce_dtype in FLOAT8:
        raise ArgumentError(
            f"reduce_dtype={policy.reduce_dtype} sends the gradients of ranks, which with activations='global' are "
            "reduced by the operators that compute them; write reduce_dtype=torch.bfloat16, or activations='local'"
        )
    unit = Unit(one_object(mesh), policy, not reshard_after_forward, activations == "local")
    parts = _Parts(modules, unit, ignored, shard_placement_fn)
    if OUTSIDE not in advice:
        advice.append(OUTSIDE)
    with following(*modules):
        parts.shard(src_data_rank)
    for found in modules:
        remember(found)
    return module


class _Parts:
    """The work of one `fully_shard` call, planned and checked before anything is changed.

    Attributes:
        new: for each module that joins the unit, its parameters to shard now, and how to unshard them.
        moved: modules that were already sharded by a call on an enclosing module, and move to the new unit.
    """

    def __init__(
        self, modules: list[nn.Module], unit: Unit, ignored: set[int], placement_fn: PlacementFn | None
    ) -> None:
        self.modules, self.unit, self.ignored, self.placement_fn = modules, unit, ignored, placement_fn
        self.planned: dict[int, Unshard] = {}
        self.new: dict[nn.Module, dict[str, Unshard]] = {}
        for module in modules:
            for name, part in module.named_modules():
                self._add(part, name)
        own = {id(member.unit) for module in modules for _, member in members(module) if member.given}
        self.moved = [found for module in modules for found in members(module) if id(found[1].unit) not in own]
        for part, member in self.moved:
            self._check_moved(part, member)

    def shard(self, src_data_rank: int | None) -> None:
        """Shard the planned parameters and add their modules to the unit."""
        for _, member in self.moved:
            member.unit = self.unit
        for part, how in self.new.items():
            for name in how:
                parameter: Any = part._parameters[name]
                if SHARDED_AS not in vars(parameter):
                    sharded(parameter, how[name], src_data_rank)
                made, how[name], _ = vars(parameter)[SHARDED_AS]
                part._parameters[name] = parameter if made is None else made
            join(part, self.unit, how, any(part is module for module in self.modules))

    def _add(self, part: nn.Module, prefix: str) -> None:
        done = vars(part)[MEMBER].how if MEMBER in vars(part) else {}
        found = {
            name: self._planned(parameter, f"{prefix}.{name}".lstrip("."))
            for name, parameter in part._parameters.items()
            if parameter is not None and name not in done and id(parameter) not in self.ignored
        }
        if found or any(part is module for module in self.modules):
            if isinstance(part, torch.jit.ScriptModule):
                raise ArgumentTypeError(
                    f"{prefix or 'the module itself'} is a scripted module, which reads its parameters by itself; call "
                    "fully_shard on the module it was made from, or pass these parameters as ignored_params"
                )
            sharded_class(plain_class(part), tuple(sorted({*done, *found})))
            self.new[part] = found

    def _planned(self, parameter: nn.Parameter, name: str) -> Unshard:
        if is_lazy(parameter):
            raise ArgumentError(
                f"parameter {name} has no shape yet (a lazy module); run the module once before fully_shard"
            )
        _, how, before = vars(parameter).get(SHARDED_AS, (None, None, self.unit.mesh))
        if before != self.unit.mesh:
            raise MeshError(
                f"parameter {name} is shared with a module that was fully sharded over {before}; give this module the "
                f"same mesh, not {self.unit.mesh}"
            )
        if how is not None:
            return how
        if id(parameter) not in self.planned:
            self.planned[id(parameter)] = planned(parameter, self.unit.mesh, _dim(parameter, name, self.placement_fn))
        return self.planned[id(parameter)]

    def _check_moved(self, part: nn.Module, member: Member) -> None:
        kind = type(part).__name__.removeprefix("FSDP")
        if member.unit.mesh != self.unit.mesh:
            raise MeshError(
                f"the parameters of this {kind} are fully sharded over {member.unit.mesh} already, by a call on an "
                f"enclosing module; pass the same mesh, not {self.unit.mesh}, or call fully_shard on this module first"
            )
        ignored = [name for name, p in part._parameters.items() if id(p) in self.ignored and name in member.how]
        if self.placement_fn is not None or ignored:
            given = "shard_placement_fn" if self.placement_fn is not None else f"ignored_params ({ignored[0]})"
            raise ArgumentError(
                f"{given} comes too late: the parameters of this {kind} are sharded already, by a call on an "
                "enclosing module; call fully_shard on this module first"
            )


def _dim(parameter: nn.Parameter, name: str, placement_fn: PlacementFn | None) -> int | None:
    if parameter.dim() == 0:
        return None
    placement = None if placement_fn is None else placement_fn(parameter)
    try:
        (checked,) = as_placements([Shard(0) if placement is None else placement], 1, parameter.dim())
    except PlacementError as error:
        raise PlacementError(f"shard_placement_fn returned {shown(placement)} for {name}: {error}") from None
    if not isinstance(checked, Shard):
        raise ArgumentTypeError(
            f"shard_placement_fn must return Shard(dim) or None; got {placement!r} for parameter {name}"
        )
    return checked.dim


def _parameters(ignored: Any) -> list[torch.Tensor]:
    found = list(ignored) if isinstance(ignored, Iterable) and not isinstance(ignored, torch.Tensor) else [ignored]
    for p in found:
        if not isinstance(p, torch.Tensor):
            raise ArgumentTypeError(
                f"ignored_params holds parameters, such as those of model.head.parameters(); got {shown(p)}"
            )
    return found


def _check_modules(modules: list[Any]) -> None:
    if not modules:
        raise ArgumentError("fully_shard got an empty list; pass the modules that are gathered together")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError(
                f"fully_shard takes an nn.Module, or a list of them; got {shown(module)}, write fully_shard(model, "
                f"mesh=mesh)"
            )
        refuse_torchs("fully_shard", module)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ArgumentError(
                f"{type(module).__name__} has no forward, during which its parameters would be gathered; call "
                "fully_shard on the modules inside, or on the enclosing one"
            )
        if any(found is module and member.given for found, member in members(module)):
            raise ArgumentError(f"this {type(module).__name__} is fully sharded already; call fully_shard once on each")


def _check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(
            f"fully_shard takes a DeviceMesh; got {type(mesh).__name__}, write init_device_mesh(...)"
        )
    if mesh.ndim > 2:
        raise ArgumentError(
            f"fully_shard takes a mesh of one axis, or of two (replicate, shard); this one has {mesh.ndim}; slice the "
            'data axes out, such as mesh["dp"] or mesh["replicate", "shard"]'
        )
    if mesh.get_coordinate() is None:
        raise MeshError(f"this rank is not in {mesh}; call fully_shard on the ranks of the mesh only")


def policy_of(given: Any) -> MixedPrecisionPolicy:
    """The `MixedPrecisionPolicy` equivalent to `given`, which is one, an FSDP2 policy of torch, or None."""
    if given is None:
        return MixedPrecisionPolicy()
    if isinstance(given, MixedPrecisionPolicy):
        return given
    if type(given).__name__ == "MixedPrecisionPolicy" and type(given).__module__.startswith("torch.distributed"):
        before_2_15 = not hasattr(given, "param_dtype_override_fn")
        reduce_dtype = given.reduce_dtype or (given.param_dtype if before_2_15 else None)
        return MixedPrecisionPolicy(given.param_dtype, reduce_dtype, given.output_dtype, given.cast_forward_inputs)
    fix = f", write MixedPrecisionPolicy(param_dtype={given})" if isinstance(given, torch.dtype) else ""
    raise ArgumentTypeError(f"mp_policy is a MixedPrecisionPolicy or None; got {shown(given)}{fix}")


__all__ = ["fully_shard", "policy_of"]
