"""`fully_shard`: the parameters of a module live sharded over the data axis and are gathered for their use.

After Rajbhandari et al., "ZeRO", 2020, and PyTorch's FSDP2 in what it is called and means: activations are each rank's
part of the batch, gradients are averaged. There are no hooks and no buffers of its own: `sharded_module` makes reading
a parameter a gather, `sharding` cuts it, and what is gathered when and what travels together is left to the passes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from ..errors import MeshError
from ..mesh import one_object
from ..placements import Shard, as_placements
from .mixed_precision import MixedPrecisionPolicy
from .sharded_module import FullyShardedModule, Unit, join, members
from .sharding import SHARDED_AS, sharded
from .unshard import Unshard

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
) -> Any:
    """Shard the parameters of `module`, in place, over a data axis.

    Parameters become DTensors; names in `named_parameters` and `state_dict` stay. While a forward runs, a parameter
    that is read is gathered; gradients are averaged over the data axes and arrive as the parameters are sharded. Call
    it bottom-up to give parts of a model policies of their own; modules that are fully sharded already are left alone.
    Parameters that tensor parallel styles have sharded over other axes of the same mesh are sharded further; styles may
    also come after.

    Args:
        module: the module, or several that make one unit.
        mesh: a mesh of one axis; or of two, (replicate, shard): then parameters are sharded over the second and
            replicated over the first (hybrid sharding).
        reshard_after_forward: gather again in the backward. False keeps what the forward gathered. Compiled graphs do
            so; eager autograd keeps what it saves in either case.
        mp_policy: dtypes of what is gathered, computed and reduced; torch's policies of FSDP2 are taken, too.
        shard_placement_fn: parameter -> the `Shard(dim)` that says along which dimension it is cut, None for dim 0.
            Sizes need not divide. A parameter without dimensions is replicated.
        ignored_params: parameters that stay as they are; nothing reduces their gradients.
        activations: "local" where each rank computes with its own part of the batch as plain tensors (or as DTensors
            on the other axes): the loss is the rank's, and gradients are averaged. "global" where activations are
            DTensors on `mesh`: gradients are those of the loss, as it is.
        src_data_rank: rank of each data axis whose parameter values all take; None takes each rank's own, without
            communication.

    Returns:
        `module`, whose class is now also a `FullyShardedModule`.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: a mesh of more than two axes, a module that is fully sharded already or has no forward of its own, a
            parameter without a shape yet.
        MeshError: this rank is not in the mesh, or a parameter is on a mesh that does not go with it.
        PlacementError: `shard_placement_fn` gives a dimension that is not there.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    _check_modules(modules)
    _check_mesh(mesh)
    if not isinstance(reshard_after_forward, bool):
        raise TypeError(
            f"reshard_after_forward is True or False; got {reshard_after_forward!r}. To gather from fewer ranks, shard "
            "over fewer: give a mesh (replicate, shard)"
        )
    if activations not in ("local", "global"):
        raise ValueError(f"activations is 'local' or 'global'; got {activations!r}")
    ignored = {id(p) for p in ignored_params}
    unit = Unit(one_object(mesh), policy_of(mp_policy), not reshard_after_forward, activations == "local")
    for given in modules:
        for name, part in given.named_modules():
            how = _shard_parameters(part, name, unit, ignored, shard_placement_fn, src_data_rank)
            if how or part is given:
                join(part, unit, how, part is given)
    return module


def _shard_parameters(
    module: nn.Module,
    name: str,
    unit: Unit,
    ignored: set[int],
    placement_fn: PlacementFn | None,
    src_data_rank: int | None,
) -> dict[str, Unshard]:
    """Replace the parameters of `module` itself; those that are sharded already stay."""
    done = {} if not isinstance(module, FullyShardedModule) else next(members(module))[1].how
    found = {}
    for key, parameter in list(module._parameters.items()):
        if parameter is None or key in done or id(parameter) in ignored:
            continue
        module._parameters[key], found[key] = _shard(
            parameter, f"{name}.{key}".lstrip("."), unit.mesh, placement_fn, src_data_rank
        )
    return found


def _shard(
    parameter: nn.Parameter, name: str, mesh: Any, placement_fn: PlacementFn | None, src_data_rank: int | None
) -> tuple[nn.Parameter, Unshard]:
    if is_lazy(parameter):
        raise ValueError(f"parameter {name} has no shape yet (a lazy module); run the module once before fully_shard")
    made, how, before = vars(parameter).get(SHARDED_AS, (None, None, mesh))
    if before != mesh:
        raise MeshError(
            f"parameter {name} is shared with a module that was fully sharded over {before}; give this module the same "
            f"mesh, not {mesh}"
        )
    if how is not None:
        return parameter if made is None else made, how
    return sharded(parameter, mesh, _dim(parameter, name, placement_fn), src_data_rank)


def _dim(parameter: nn.Parameter, name: str, placement_fn: PlacementFn | None) -> int | None:
    if parameter.dim() == 0:
        return None
    placement = None if placement_fn is None else placement_fn(parameter)
    (checked,) = as_placements([Shard(0) if placement is None else placement], 1, parameter.dim())
    if not isinstance(checked, Shard):
        raise TypeError(f"shard_placement_fn gives Shard(dim) or None; it gave {placement!r} for parameter {name}")
    return checked.dim


def _check_modules(modules: list[Any]) -> None:
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"fully_shard takes an nn.Module, or a list of them; got {type(module).__name__}")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"{type(module).__name__} has no forward, during which its parameters would be gathered; give "
                "fully_shard the modules inside, or the one around it"
            )
        if any(found is module and member.given for found, member in members(module)):
            raise ValueError(f"this {type(module).__name__} is fully sharded already; call fully_shard once on each")


def _check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"fully_shard takes a DeviceMesh; got {type(mesh).__name__}, write init_device_mesh(...)")
    if mesh.ndim > 2:
        raise ValueError(
            f"fully_shard takes a mesh of one axis, or of two (replicate, shard); this one has {mesh.ndim}; slice the "
            'data axes out, such as mesh["dp"] or mesh["replicate", "shard"]'
        )
    if mesh.get_coordinate() is None:
        raise MeshError(f"this rank is not in {mesh}; call fully_shard on the ranks of the mesh only")


def policy_of(given: Any) -> MixedPrecisionPolicy:
    """Our policy for `given`: ours, that of FSDP2, or None."""
    if given is None:
        return MixedPrecisionPolicy()
    if isinstance(given, MixedPrecisionPolicy):
        return given
    if type(given).__name__ == "MixedPrecisionPolicy" and type(given).__module__.startswith("torch.distributed"):
        return MixedPrecisionPolicy(
            given.param_dtype, given.reduce_dtype, given.output_dtype, given.cast_forward_inputs
        )
    raise TypeError(f"mp_policy is a MixedPrecisionPolicy or None; got {given!r}")


__all__ = ["fully_shard", "policy_of"]
