"""`distribute_model`: shards an unmodified model in one call. Its code then runs on global tensors.

Parameters and buffers become DTensors by patterns of their names; arguments of the forward become DTensors when it is
called. Inside the model every tensor is global, and operators communicate as the layouts require. For code that works
on local tensors use the styles of `dtensor.parallel` instead.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from ...comm.from_plain import check_module, mesh_of
from ...errors import CallOrderError, PlacementError
from ...layout.placements import Placement
from ...program import environment
from ...tensor.factories import distribute_tensor
from ...tensor.tensor import DTensor
from ..fsdp.sharded_module import FullyShardedModule
from ..fsdp.sharding import SHARDED_AS
from ..modules.distribute_module import DISTRIBUTED, distribute_parameter
from ..modules.forward_wrapping import wrap_call, wrap_forward
from ..modules.replaced import following
from .by_name import at_borders, chosen_placements, fitting
from .expert_modules import use_operator
from .inputs import (
    Placements,
    check_names,
    is_by_name,
    mapped,
    parameter_names,
)
from .plan import FINDERS, INPUT, OUTPUT, Activation, Plan, check_mesh, modules_of, on_axes, recomputed_of
from .tp_plan import placements_of_plan
from .view import SENT, USED, VIEW, View, sizes_of, viewed_class

Model = TypeVar("Model", bound=nn.Module)


def distribute_model(
    model: Model,
    device_mesh: DeviceMesh | None = None,
    placements: Mapping[str, Placements] | Plan | Literal["model", "auto"] | None = None,
    *,
    batch: Any = None,
    inputs: Placements | Mapping[str, Placements] | None = None,
    outputs: Placements | None = None,
    check_inputs: bool = True,
    src_data_rank: int | None = 0,
) -> Model:
    """Shards a model written for one device over a mesh, in place. The model's code does not change.

    `fully_shard` may be applied before or after, over other axes of the same mesh. Each rank of those axes then has its
    own global view, with its part of the batch.

    Args:
        model: the model.
        device_mesh: the mesh; None uses the current one.
        placements: a dict from patterns of parameter and buffer names to placements, such as
            `{"*.q_proj.weight": {"tp": Shard(0)}}`. Patterns use the wildcards of `fnmatch`; `*` also matches dots. If
            several match a name, the one with most non-wildcard characters applies. Tensors that no pattern matches are
            replicated. "model" uses the `tp_plan` of a transformers model, over the mesh axis "tp" or the only axis. A
            `Plan`, as `dtensor.search` finds one, also says where activations and, unless `inputs` does, inputs are.
            "auto" searches for one, for `batch`; where activations are is then decided as below.
        batch: the arguments of forward as `dtensor.search` takes them, with the sizes of the whole batch; values do not
            count. With it eager mode follows layouts decided for the whole forward and backward, as compiled code does,
            so that it sends the same; without, each operator chooses for itself. The first call takes longer, as
            forward and backward are recorded; a warning says where that was not possible.
        inputs: the placements of tensors in the arguments of forward, including those in tuples, lists, dicts and
            dataclasses. None: full tensors, the same on all ranks. `{"dp": Shard(0)}`: each rank of "dp" passes its
            part of the batch, all of equal length. Tensors without that dim are full tensors; DTensors are not changed.
            Or by name: `{"tokens": {"dp": Shard(0)}, "batch.ids": {"dp": Shard(1)}}` for these arguments, or tensors in
            them; all others are full tensors.
        outputs: the placements of tensors that forward returns. None: DTensors. `{}`: full plain tensors.
            `{"dp": Shard(0)}`: each rank of "dp" gets its part as a plain tensor. Losses that ranks compute from their
            parts count as averaged over those ranks, as with DistributedDataParallel. Tensors without that dim are
            returned in full.
        check_inputs: compare the inputs of the ranks in every call: checksums along axes where inputs must be the same,
            shapes along the others. Ranks exchange a few numbers for this, in compiled code behind the first collective
            of the model. If they differ, all raise AgreementError (under Inductor alone a RuntimeError of the same
            text). Plain tensors held by modules that meet DTensors inside are also compared, from time to time and
            without waiting for other ranks; if they differ, AgreementError is raised.
        src_data_rank: the rank along each axis whose parameter and buffer values all ranks receive; None uses each
            rank's own values.

    Returns:
        `model`. Its gradients are those of one device on the global batch.

    Raises:
        PlacementError: a pattern matches no name, or two match equally well; the plan is for another mesh; the model
            has no `tp_plan`, or one with an unknown style; placements do not fit the mesh or a tensor, or differ
            between modules that share a parameter; forward takes no argument of a name in `inputs` or `batch`;
            or a parameter is already a DTensor. The model is then unchanged.
        MeshError: a parameter is fully sharded over axes that cannot be combined with those of the mesh, or there is no
            mesh.
        RuntimeError: the model was already distributed.
        TypeError: `model` is not a module.

    >>> model = LlamaForCausalLM(config)
    >>> columns, rows = {"tp": Shard(0)}, {"tp": Shard(1)}
    >>> distribute_model(model, mesh, {"*.[qkv]_proj.weight": columns, "*.o_proj.weight": rows}, outputs={})
    """
    check_module("distribute_model", model)
    mesh = mesh_of(device_mesh)
    if getattr(model, DISTRIBUTED, False):
        raise CallOrderError("the model was distributed before; call distribute_model once, on the plain model")
    decides = environment.switched("decide", True)
    found = placements == "auto" and decides
    if isinstance(placements, str):
        placements = _by_word(placements, model, mesh, batch)
    read: dict[torch.Tensor, tuple[Placement, ...]] = {}
    around: dict[str, dict[str, Activation]] = {}
    recomputed: list[str] = []
    sent: torch.dtype | None = None
    planned = isinstance(placements, Plan)
    if isinstance(placements, Plan):
        plan, placements = placements, placements.parameters
        check_mesh(plan, mesh)
        sent = plan.gradients
        inputs = plan.inputs if inputs is None else inputs
        read = chosen_placements(model, mesh, plan.used, only_named=True)
        names = [name for name, _ in model.named_modules()]
        around, recomputed = modules_of(plan, names), recomputed_of(plan, names)
    chosen = chosen_placements(model, mesh, placements or {})
    named: Any = inputs if is_by_name(inputs) else {}
    check_names(named, model.forward, other=", or placements by mesh axis for all of them")
    if isinstance(batch, Mapping):
        check_names(batch, model.forward, "batch")
    taken = {name: at_borders(p, mesh, f"inputs ({name})") for name, p in named.items()}
    alike: Any = {} if named else inputs or {}
    others = at_borders(alike, mesh, "inputs")
    given = None if outputs is None else at_borders(outputs, mesh, "outputs")
    sizes = None if batch is None or not decides else sizes_of(batch)
    view = View(mesh, taken, others, given, check_inputs, sizes)
    buffers: dict[torch.Tensor, DTensor] = {}
    before = {module: dict(_own(module._parameters)) for module in model.modules()}

    def distribute(x: nn.Parameter, placements: Sequence[Placement]) -> nn.Parameter:
        return distribute_parameter(x, mesh, placements, src_data_rank=src_data_rank)

    with following(model):
        for module in model.modules():
            for name, p in list(_own(module._parameters)):
                if SHARDED_AS in vars(p):
                    assert isinstance(module, FullyShardedModule)
                    module.redistribute_parameter(name, functools.partial(distribute, placements=chosen[p]))
                else:
                    setattr(module, name, distribute(p, chosen[p]))
            for name, b in list(_own(module._buffers)):
                if b not in buffers:  # a shared buffer stays shared
                    buffers[b] = distribute_tensor(b, mesh, chosen[b], src_data_rank=src_data_rank)
                module._buffers[name] = buffers[b]
    use_operator(model, always=planned)
    for name in recomputed:
        wrap_call(model.get_submodule(name), functools.partial(checkpoint, use_reentrant=False))
    if not found:
        for name, borders in around.items():
            _move_at_borders(model.get_submodule(name), mesh, borders)
    for module in model.modules():
        # Fully sharded parameters have their own property.
        names = tuple(sorted(name for name, p in _own(module._parameters) if SHARDED_AS not in vars(p)))
        if not names and type(module).forward is nn.Module.forward:
            continue  # a container such as ModuleList
        vars(module)[VIEW] = view
        used = {n: read[p] for n, p in before[module].items() if p in read}
        if used:
            vars(module)[USED] = used
        if sent is not None:
            vars(module)[SENT] = sent
        module.__class__ = viewed_class(type(module), names)
        if "forward" in vars(module):
            own = vars(module)["forward"]
            vars(module)["forward"] = functools.partial(view, own, parameter_names(own))
    setattr(model, DISTRIBUTED, True)
    return model


def _by_word(word: str, model: nn.Module, mesh: DeviceMesh, batch: Any) -> Mapping[str, Placements] | Plan:
    if word == "model":
        return placements_of_plan(model, mesh)
    if word not in FINDERS:
        raise PlacementError(
            f"placements is a dict from patterns to placements, a Plan, 'model' or 'auto'; got {word!r}"
        )
    if batch is None:
        raise PlacementError(
            f"placements={word!r} searches for a plan, which depends on the sizes of a batch; pass batch=, the "
            "arguments of forward of the whole batch"
        )
    return FINDERS[word](model, mesh, batch)


def _own(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, x) for name, x in tensors.items() if x is not None)


def _move_at_borders(module: nn.Module, mesh: DeviceMesh, borders: Mapping[str, Activation]) -> None:
    """Move the first tensor that a module takes, or that it returns, as a plan says."""

    def move(which: str) -> Callable[[torch.Tensor], torch.Tensor]:
        to, gradient = (on_axes(axes, mesh) for axes in (borders[which].to, borders[which].gradient))
        return functools.partial(_moved, to=to, gradient=gradient)

    if INPUT in borders:
        arriving = move(INPUT)
        wrap_forward(module, take=lambda _, args, kwargs: on_first(arriving, (args, kwargs)))
    if OUTPUT in borders:
        leaving = move(OUTPUT)
        wrap_forward(module, give=lambda _, args, out: on_first(leaving, out))


def _moved(x: torch.Tensor, to: Sequence[Placement], gradient: Sequence[Placement]) -> torch.Tensor:
    if not isinstance(x, DTensor) or not x.is_floating_point():
        return x
    back = fitting(gradient, x) if x.requires_grad and torch.is_grad_enabled() else None
    return x.redistribute(placements=fitting(to, x), grad_placements=back)


def on_first(f: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    """`x` with the first tensor that has dims replaced by `f` of it."""
    met = [False]

    def once(a: torch.Tensor, _: str) -> torch.Tensor:
        if met[0] or not a.dim():
            return a
        met[0] = True
        return f(a)

    return mapped(once, x, "")


__all__ = ["distribute_model", "on_first"]
