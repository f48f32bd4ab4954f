"""Private APIs of torch's FSDP1 and FSDP2; see also `core`. FSDP is imported on call.

FSDP1 is patched to accept tensors that are not torch's DTensors. For FSDP2, functions here read from its states what it
has sharded, and remove it from a module.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ArgumentError, UnsupportedError
from .core import tree_map


def extend_fsdp1(extensions: type, gathered: Callable[[Any, Any], Any], local: Callable[[Any], Any]) -> None:
    """Make every FullyShardedDataParallel (FSDP1) created from now on over a slice of a mesh use `extensions`.

    FSDP1 refers to torch's DTensor by name where it registers parameters again, compares their memory, and splits and
    reassembles optimizer states. These places are patched to handle tensors of other classes. Imported on call.

    Args:
        extensions: Called with the extensions that FSDP1 would use, the data mesh, and whether FSDP1 replicates and
            keeps the user's parameters. The result handles tensors for which its `owns(tensor)` is true.
        gathered: Called with each value of an optimizer's state dict, and a process group; returns what FSDP1 flattens.
        local: Returns the plain tensor whose memory a tensor uses.
    """
    from torch.distributed.fsdp import _flat_param as flat_param
    from torch.distributed.fsdp import _optim_utils as optim
    from torch.distributed.fsdp import fully_sharded_data_parallel as fsdp1

    FlatParamHandle = flat_param.FlatParamHandle

    make, register = fsdp1._init_extension, FlatParamHandle._use_unsharded_views
    view_gradients, same_storage = FlatParamHandle._use_unsharded_grad_views, flat_param._same_storage
    unflatten, gather = optim._unflatten_orig_param_states, optim._gather_state_dict
    if getattr(make, "_asks", None) is extensions:
        return

    @functools.wraps(make)
    def _init_extension(state: Any, device_mesh: DeviceMesh | None = None) -> Any:
        make(state, device_mesh)
        if state._fsdp_extension is not None:
            kept = state.sharding_strategy is fsdp1.ShardingStrategy.NO_SHARD and state._use_orig_params
            state._fsdp_extension = extensions(state._fsdp_extension, device_mesh, kept)
        return state

    @functools.wraps(register)
    def _use_unsharded_views(self, as_params: Any) -> Any:
        # A parameter's data cannot become a tensor of another class: new parameters take its place for a while.
        known = self.flat_param._param_extensions if isinstance(self._fsdp_extension, extensions) else ()
        before = self._use_orig_params
        self._use_orig_params = before and not (as_params and any(found is not None for found in known))
        try:
            return register(self, as_params)
        finally:
            self._use_orig_params = before

    @functools.wraps(view_gradients)
    def _use_unsharded_grad_views(self) -> None:
        # Without reduction, gradients stand beside parameters that are plain: views of the flat one.
        found, known = self.flat_param, self.flat_param._param_extensions
        owners = [getattr(module, name) for name, module, _ in found._param_infos]
        found._param_extensions = [None if local(p) is p else ext for p, ext in zip(owners, known)]
        try:
            view_gradients(self)
        finally:
            found._param_extensions = known

    @functools.wraps(unflatten)
    def _unflatten_orig_param_states(
        info: Any, output_states: Any, state_name: Any, shard_state: Any, to_save: Any, cpu_offload: Any
    ) -> None:
        state, found = info.state, info.state._fsdp_extension
        mine = {}
        if isinstance(found, extensions):
            mine = {name: values for name, values in output_states.items() if found.owns(values[state_name])}
        for values in mine.values() if to_save else ():
            x = values[state_name]
            x = found.chunk_dtensor(x, state.rank, state._device_mesh) if shard_state else x.detach().clone()
            values[state_name] = x.cpu() if cpu_offload else x
        rest = {name: values for name, values in output_states.items() if name not in mine}
        unflatten(info, rest, state_name, shard_state, to_save, cpu_offload)

    @functools.wraps(gather)
    def _gather_state_dict(state_dict: Any, *, pg: Any = None, **options: Any) -> Any:
        return gather(tree_map(lambda x: gathered(x, pg), state_dict), pg=pg, **options)

    @functools.wraps(same_storage)
    def _same_storage(a: Any, b: Any) -> Any:
        return same_storage(local(a), local(b))

    vars(_init_extension)["_asks"] = extensions
    FlatParamHandle._use_unsharded_grad_views, flat_param._same_storage = _use_unsharded_grad_views, _same_storage
    fsdp1._init_extension, FlatParamHandle._use_unsharded_views = _init_extension, _use_unsharded_views
    optim._unflatten_orig_param_states, optim._gather_state_dict = _unflatten_orig_param_states, _gather_state_dict


@dataclass(frozen=True, eq=False)
class FSDP2Parameter:
    """A parameter that torch's FSDP2 has sharded.

    Attributes:
        parameter: Torch's DTensor.
        places: (module, name) for each module that has the parameter.
        dim: The sharded dimension.
        inner: Mesh and placements of the torch DTensor that the forward receives; None if it receives a plain tensor.
    """

    parameter: Any
    places: list[tuple[Any, str]]
    dim: int
    inner: tuple[Any, Sequence[Any]] | None


@dataclass(frozen=True, eq=False)
class FSDP2Unit:
    """What one call of FSDP2's `fully_shard` has sharded.

    Attributes:
        modules: The modules passed to it.
        parameters: Their parameters.
        mesh: The data mesh; None if there are no parameters.
        policy: Torch's MixedPrecisionPolicy.
        reshard: Whether the backward gathers again.
        reduce: The data axes over which gradients are reduced: "all", "scatter" or "none".
    """

    modules: tuple[Any, ...]
    parameters: list[FSDP2Parameter]
    mesh: DeviceMesh | None
    policy: Any
    reshard: bool
    reduce: str


def fsdp2_units(module: Any) -> list[FSDP2Unit]:
    """What FSDP2 has sharded in `module`; empty if FSDP2 was never imported.

    Raises:
        NotImplementedError: It uses a feature that dtensor has no equivalent of.
        ValueError: A parameter in `module` belongs to a unit of a module around it, two units have untied a shared one,
            or FSDP2 holds unreduced gradients.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed._composable_state import _module_state_mapping

    inside = set(module.modules())
    for owner in [m for m in _module_state_mapping if m not in inside]:
        for group in getattr(_module_state_mapping[owner](), "_fsdp_param_groups", ()):
            if any(p._module_info.module in inside for p in group.fsdp_params):
                raise ArgumentError(
                    f"parameters of this {type(module).__name__} were sharded by a fully_shard on the "
                    f"{type(owner).__name__} around it; convert that module instead"
                )
    groups = [(state, group) for state in _fsdp2_states(module) for group in state._fsdp_param_groups or [None]]
    _check_ties([p for _, group in groups if group is not None for p in group.fsdp_params])
    return [_fsdp2_unit(state, group) for state, group in groups]


def _check_ties(parameters: list[Any]) -> None:
    """Raise if two units have sharded one parameter: each has a copy, which torch refuses in the first forward."""
    seen: dict[Any, Any] = {}
    for p in parameters:
        uid = getattr(p, "_orig_param_uid", None)
        if uid is not None and uid in seen:
            one, other = [
                f"{info.param_name} of the {type(info.module).__name__.removeprefix('FSDP')}"
                for info in (seen[uid], p._module_info)
            ]
            raise ArgumentError(
                f"{one} was tied to {other}, but separate calls of FSDP2's fully_shard have made two parameters of "
                "them, which would be trained apart; shard the two modules in one call, "
                "fully_shard([embedding, head], mesh=mesh), or convert the model before it is sharded and write "
                "dtensor.parallel.fully_shard, which keeps them tied"
            )
        seen[uid] = p._module_info


def _fsdp2_states(module: Any) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    states = {id(s): s for s in (m._get_fsdp_state() for m in module.modules() if isinstance(m, FSDPModule))}
    return list(states.values())


def _fsdp2_unit(state: Any, group: Any) -> FSDP2Unit:
    if group is None:  # a module whose parameters are all in other units
        return FSDP2Unit(state._modules, [], None, state._mp_policy, True, "all")
    for given, kind in ((group.offload_policy, "CPUOffloadPolicy"), (group.mesh_info, "DDPMeshInfo")):
        if type(given).__name__ == kind:
            raise UnsupportedError(f"torch's FSDP2 with {kind} has no equivalent here; write fully_shard without it")
    if group.mesh_info.is_spmd_mesh:
        raise UnsupportedError(
            "torch's FSDP2 with dp_mesh_dims cannot be converted; give fully_shard the data axes alone, mesh['dp']"
        )
    found, policy = [], state._mp_policy
    for p in group.fsdp_params:
        if getattr(p, "mp_policy", policy) != policy:  # each parameter has its own since torch 2.15
            raise UnsupportedError(
                "torch's FSDP2 with param_dtype_override_fn cannot be converted; give fully_shard one param_dtype"
            )
        unsharded = getattr(p, "_unsharded_param", None)
        if p.unsharded_accumulated_grad is not None or getattr(unsharded, "grad", None) is not None:
            raise ArgumentError(
                "FSDP2 holds gradients that it has not reduced; convert the model after a backward with "
                "set_requires_gradient_sync(True), or after optimizer.zero_grad()"
            )
        known = p._module_info
        places = [(known.module, known.param_name), *zip(known.shared_modules, known.shared_param_names)]
        spec = p._unsharded_dtensor_spec
        inner = None if spec is None else (spec.mesh, spec.placements)
        found.append(FSDP2Parameter(p.sharded_param, places, p.fsdp_placement.dim, inner))
    reduce = "none" if not group.reduce_grads else "all" if group.all_reduce_grads else "scatter"
    reshard = group.post_forward_mesh_info is not None
    return FSDP2Unit(state._modules, found, group.mesh_info.mesh, policy, reshard, reduce)


def remove_fsdp2(module: Any) -> None:
    """Remove FSDP2 from `module` and all modules in it: its hooks, classes and states. Parameters do not change."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    for state in _fsdp2_states(module):
        handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
        for group in state._fsdp_param_groups:
            handles += [p._post_load_hook_handle for p in group.fsdp_params]
            handles += group._module_to_pre_save_state_dict_hook_handle.values()
            handles += group._module_to_pre_load_state_dict_hook_handle.values()
        for handle in handles:
            handle.remove()
        for found in state._modules:
            found.__class__ = type(found).__mro__[FSDPModule._orig_cls_mro_index]
            _module_state_mapping.pop(found, None)
            for key in (STATE_KEY, REGISTRY_KEY):
                vars(found).pop(key, None)
    for found in module.modules():
        for key in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            vars(found).pop(key, None)


def mark_flattened(x: torch.Tensor) -> None:
    """Mark a parameter as already flattened by FSDP1."""
    from torch.distributed.fsdp._common_utils import _set_fsdp_flattened

    _set_fsdp_flattened(x)


__all__ = ["FSDP2Parameter", "FSDP2Unit", "extend_fsdp1", "fsdp2_units", "mark_flattened", "remove_fsdp2"]
