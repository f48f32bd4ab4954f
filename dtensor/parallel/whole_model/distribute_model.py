"""`distribute_model`: shards an unmodified model in one call. Its code then runs on global tensors.

Parameters and buffers become DTensors by patterns of their names; arguments of the forward become DTensors when it is
called. Inside the model every tensor is global, and operators communicate as the layouts require. For code that works
on local tensors use the styles of `dtensor.parallel` instead.
"""

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from ...comm.from_plain import check_module, mesh_of
from ...dispatch.dispatch import wrap
from ...dispatch.global_view import global_view
from ...dispatch.whole_graph import now
from ...errors import CallOrderError, PlacementError
from ...layout.layout import Layout
from ...layout.placements import Placement, Replicate, Shard
from ...mesh.tensor_spec import Spec
from ...program import environment
from ...tensor.factories import distribute_tensor
from ...tensor.tensor import DTensor
from ...torch_private.core import eval_frame_callback, is_in_backward, never_traced, traced_with_caller
from ..checks.input_check import Given, InputCheck
from ..fsdp.sharded_module import FullyShardedModule
from ..fsdp.sharding import SHARDED_AS
from ..modules.distribute_module import DISTRIBUTED, distribute_parameter
from ..modules.forward_wrapping import made_class, with_own_code, wrap_call, wrap_forward
from ..modules.replaced import following
from .by_name import at_borders, chosen_placements, fitting
from .inputs import (
    Placements,
    arguments_of,
    check_names,
    entry_of,
    is_by_name,
    mapped,
    mapped_arguments,
    parameter_names,
)
from .plan import FINDERS, INPUT, OUTPUT, Activation, Plan, check_mesh, modules_of, on_axes, recomputed_of
from .tp_plan import placements_of_plan

Model = TypeVar("Model", bound=nn.Module)

VIEW = "_dtensor_view"
"""The attribute of a module that holds the `_View` of its model."""

USED = "_dtensor_used"
"""The attribute of a module that holds for its parameters the placements in which its forward reads them."""

SENT = "_dtensor_sent"
"""The attribute of a module that holds the dtype in which gradients of its parameters are sent."""


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
            between modules that share a parameter; forward takes no argument of a name in `inputs`; or a parameter is
            already a DTensor. The model is then unchanged.
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
    check_names(named, model.forward)
    taken = {name: at_borders(p, mesh, f"inputs ({name})") for name, p in named.items()}
    alike: Any = {} if named else inputs or {}
    others = at_borders(alike, mesh, "inputs")
    given = None if outputs is None else at_borders(outputs, mesh, "outputs")
    sizes = None if batch is None or not decides else _sizes(batch)
    view = _View(mesh, taken, others, given, check_inputs, sizes)
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


def _sizes(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a forward, with tensors in which nothing is."""

    def empty(x: torch.Tensor, _: str) -> torch.Tensor:
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return made.requires_grad_(x.requires_grad)

    return mapped_arguments(empty, (), *arguments_of(batch))


def _own(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, x) for name, x in tensors.items() if x is not None)


class _View:
    """The function called in place of the forward of a model and of each of its modules.

    Only the outermost call converts inputs and outputs. A module called on its own is thus treated like the model.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        inputs: Mapping[str, Sequence[Placement]],
        others: Sequence[Placement],
        outputs: Sequence[Placement] | None,
        checked: bool,
        batch: tuple[tuple[Any, ...], dict[str, Any]] | None,
    ) -> None:
        self.mesh, self.inputs, self.others, self.outputs, self.batch = mesh, inputs, others, outputs, batch
        self.decisions: Any = None
        self.depth = self.runs = 0
        self.check = InputCheck(mesh) if checked else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_View":
        made = memo[id(self)] = _View(*self.__reduce__()[1])
        return made

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _View, (self.mesh, self.inputs, self.others, self.outputs, self.check is not None, self.batch)

    @traced_with_caller
    def __call__(self, forward: Callable[..., Any], names: Sequence[str], /, *args: Any, **kwargs: Any) -> Any:
        if self.depth:
            return forward(*args, **kwargs)
        if not torch.compiler.is_compiling() and is_in_backward():  # recomputation by activation checkpointing
            with self.running():
                return forward(*args, **kwargs)
        plain: list[Given] = []
        args, kwargs = mapped_arguments(functools.partial(self._take, plain), names, args, kwargs)
        if self.check is not None:
            self.check(plain)
        if self.batch is None or torch.compiler.is_compiling() or eval_frame_callback():
            return self._run(forward, args, kwargs)  # also where Dynamo left this frame and compiles those inside
        with self._following(forward, names):
            return self._run(forward, args, kwargs)

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self.running():
            out = forward(*args, **kwargs)
        return mapped(self._give, out, "")

    def _following(self, forward: Callable[..., Any], names: Sequence[str]) -> contextlib.AbstractContextManager[None]:
        """Context in which the forward of the model, and its backward, follow what is decided for the batch."""
        module = getattr(forward, "__self__", None) if not isinstance(forward, functools.partial) else forward.args[0]
        if not getattr(module, DISTRIBUTED, False):
            return contextlib.nullcontext()
        if self.decisions is None:
            known = importlib.import_module("dtensor.parallel.decisions.eager")
            call = functools.partial(self._on_batch, forward, names)
            self.decisions = known.EagerDecisions(module, self.mesh.device_type, call)
        return self.decisions.followed()

    def _on_batch(self, forward: Callable[..., Any], names: Sequence[str]) -> Any:
        """Run the forward on DTensors of the batch's sizes in which nothing is."""

        def empty(x: torch.Tensor, name: str) -> torch.Tensor:
            layout = Layout.of(self._placements(name, x), x.dim())
            spec = Spec.make(self.mesh, layout, tuple(x.shape), tuple(x.stride()), x.dtype)
            local = torch.empty(spec.local_shape(), dtype=x.dtype, device=self.mesh.device_type)
            return wrap(local, spec).requires_grad_(x.requires_grad)

        assert self.batch is not None
        args, kwargs = mapped_arguments(empty, names, *self.batch)
        runs = self.runs
        try:
            return self._run(forward, args, kwargs)
        finally:
            self.runs = runs

    def _placements(self, name: str, x: torch.Tensor) -> tuple[Placement, ...]:
        """Where an argument of the forward is."""
        entry = entry_of(name, self.inputs)
        return tuple(fitting(self.others if entry is None else self.inputs[entry], x))

    @never_traced
    def _take(self, plain: list[Given], x: torch.Tensor, name: str) -> torch.Tensor:
        """An argument of the forward as a DTensor. Plain tensors are also added to `plain`."""
        if isinstance(x, DTensor):
            return x
        placements = self._placements(name, x)
        plain.append((name, x, [axis for axis, p in enumerate(placements) if isinstance(p, Shard)]))
        return DTensor.from_local(x, self.mesh, placements)

    @never_traced
    def _give(self, x: torch.Tensor, _: str) -> torch.Tensor:
        """A tensor that the forward returns, in the placements of `outputs`."""
        if not isinstance(x, DTensor):
            # A plain tensor, but computed from DTensors written into it, so its gradient must arrive as a DTensor.
            x = x if x.is_leaf or not torch.is_grad_enabled() else _Leaving.apply(x, self.mesh)  # pyright: ignore
        if self.outputs is None or not isinstance(x, DTensor):
            return x
        target = fitting(self.outputs, x)
        parts = math.prod([self.mesh.size(axis) for axis, p in enumerate(target) if isinstance(p, Shard)])
        local = x.redistribute(placements=target).to_local()
        if not local.dim():
            local = local.clone()  # a loss may be scaled in place, which autograd refuses for a local tensor
        return _MeanOverParts.apply(local, parts) if parts > 1 and local.requires_grad else local  # pyright: ignore

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.depth += 1
        run = 0
        if not torch.compiler.is_compiling():
            run, self.runs = self.runs, self.runs + 1
        try:
            with global_view(self.check is not None and now.recorder is None, run):
                yield
        finally:
            self.depth -= 1


@functools.cache
def viewed_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The class derived from `cls` whose forward calls the module's view and which reads the parameters `names` by
    `_read`."""
    inner = cls.forward
    arguments = parameter_names(inner)[1:]

    @with_own_code
    @functools.wraps(inner)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._dtensor_view(functools.partial(inner, self), arguments, *args, **kwargs)

    inside: dict[str, Any] = {name: property(functools.partial(_read, name=name)) for name in names}
    inside |= {USED: None, SENT: None}  # of modules that have none of their own: Dynamo traces each read
    if callable(generate := getattr(cls, "generate", None)):
        inside["generate"] = _in_view(generate)
    return made_class(viewed_class, cls, names, forward=forward, **inside)


def _in_view(generate: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' `generate`, which reorders the cache between forwards by plain indices of beams: global values."""

    @functools.wraps(generate)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with global_view(vars(self)[VIEW].check is not None, vars(self)[VIEW].runs):
            return generate(self, *args, **kwargs)

    return run


@never_traced
def _read(module: Any, name: str) -> torch.Tensor | None:
    """A parameter. If a forward reads it, its gradient arrives in the parameter's own placements: operators may produce
    a partial sum, which optimizers would reduce more than once."""
    p: Any = module._parameters.get(name)
    if not isinstance(p, DTensor) or not module._dtensor_view.depth:
        return p
    used: Any = None if module._dtensor_used is None else module._dtensor_used.get(name)
    if not (p.requires_grad and torch.is_grad_enabled()):
        return p if used is None else p.redistribute(placements=used)
    own, sent = p.placements, module._dtensor_sent
    if sent is not None and sent.itemsize >= p.dtype.itemsize:
        sent = None
    return p.redistribute(placements=used or own, grad_placements=own, backward_dtype=sent)


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


class _Leaving(torch.autograd.Function):
    """A replicated plain tensor as a DTensor, so that its gradient is one too."""

    @staticmethod
    def forward(x: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, Any], output: DTensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:  # pyright: ignore
        return grad, None


class _MeanOverParts(torch.autograd.Function):
    """A rank's part of an output. Results that `parts` ranks compute from their parts count as averaged over them."""

    @staticmethod
    def forward(x: torch.Tensor, parts: int) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, int], output: torch.Tensor) -> None:
        ctx.parts = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore
        return grad / ctx.parts, None


__all__ = ["distribute_model", "on_first"]
