"""What is called in place of the forwards of a model that `distribute_model` sharded: plain tensors in, global tensors
inside, plain tensors out.
"""

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...comm.from_plain import refuse_export
from ...dispatch.dispatch import wrap
from ...dispatch.global_view import global_view
from ...dispatch.whole_graph import now
from ...layout.layout import Layout
from ...layout.placements import Placement, Replicate, Shard
from ...mesh.tensor_spec import Spec
from ...tensor.tensor import DTensor, homing
from ...torch_private.core import eval_frame_callback, is_in_backward, never_traced, traced_with_caller
from ..checks.input_check import Given, InputCheck
from ..modules.distribute_module import DISTRIBUTED
from ..modules.forward_wrapping import made_class, with_own_code
from .by_name import fitting
from .inputs import arguments_of, entry_of, mapped, mapped_arguments, parameter_names

VIEW = "_dtensor_view"
"""The attribute of a module that holds the `View` of its model."""

USED = "_dtensor_used"
"""The attribute of a module that holds for its parameters the placements in which its forward reads them."""

SENT = "_dtensor_sent"
"""The attribute of a module that holds the dtype in which gradients of its parameters are sent."""


def sizes_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a forward, with tensors in which nothing is."""

    def empty(x: torch.Tensor, _: str) -> torch.Tensor:
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return made.requires_grad_(x.requires_grad)

    return mapped_arguments(empty, (), *arguments_of(batch))


class View:
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

    def __deepcopy__(self, memo: dict[int, Any]) -> "View":
        made = memo[id(self)] = View(*self.__reduce__()[1])
        return made

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return View, (self.mesh, self.inputs, self.others, self.outputs, self.check is not None, self.batch)

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
    if name not in module._parameters:
        raise AttributeError(name)  # it was moved out, as by a parametrization, so the module says what there is
    p: Any = module._parameters[name]
    if not isinstance(p, DTensor) or not module._dtensor_view.depth:
        return p
    used: Any = None if module._dtensor_used is None else module._dtensor_used.get(name)
    if not (p.requires_grad and torch.is_grad_enabled()):
        return p if used is None else p.redistribute(placements=used)
    sent = module._dtensor_sent
    if sent is not None and sent.itemsize >= p.dtype.itemsize:
        sent = None
    if used is None:
        refuse_export()
        return homing(p, "a parameter", sent)
    return p.redistribute(placements=used, grad_placements=p.placements, backward_dtype=sent)


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


__all__ = ["SENT", "USED", "VIEW", "View", "sizes_of", "viewed_class"]
