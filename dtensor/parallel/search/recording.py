"""Records a training step, operator by operator, on fake tensors.

model, inputs -> forward, loss, backward on fake tensors -> tape
"""

import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ...errors import ArgumentError, PlacementError
from ...rules import SHAPES
from ...torch_private.core import (
    FakeTensorMode,
    TorchDispatchMode,
    UnknownValue,
    backward_number,
    forward_number,
    storage_of,
    tree_leaves,
    tree_map,
)
from ..whole_model.distribute_model import on_first
from ..whole_model.expert_modules import using_operator
from ..whole_model.inputs import arguments_of, mapped_arguments, parameter_names
from ..whole_model.plan import INPUT as ARRIVING
from ..whole_model.plan import OUTPUT as LEAVING
from .tape import BORDER, BUFFER, CONSTANT, INPUT, MADE, PARAMETER, Op, Tape, Value

Loss = Callable[[Any], torch.Tensor]
"""Computes the loss from what the model returns."""


def default_loss(outputs: Any) -> torch.Tensor:
    """The loss among the outputs of a model, or else the sum of all that it returns.

    A model's own `loss`, as models of transformers return it; a number; or the sum of all floating-point tensors.
    """
    own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    found: list[torch.Tensor] = []
    tree_map(lambda x: found.append(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else None, outputs)
    if not found:
        raise ArgumentError("the model returns no floating-point tensor; pass loss=, a function of what it returns")
    return found[0] if len(found) == 1 and not found[0].dim() else torch.stack([x.sum() for x in found]).sum()


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape()
        self.known: dict[int, Value] = {}
        self.alive: list[Any] = []
        self.same: dict[int, int] = {}
        self.open: list[str] = []
        self.entered: list[tuple[int, str]] = [(-1, "")]
        self.backward = self.quiet = False

    def note(self, x: torch.Tensor, value: Value) -> Value:
        """Remember which value a tensor is, and keep the tensor so that no other gets its id."""
        self.known[id(x)] = value
        self.alive.append(x)
        return value

    def made(self, x: torch.Tensor, kind: str = MADE, name: str = "") -> Value:
        own = storage_of(x)
        return self.note(x, Value(kind, name, tuple(x.shape), tuple(x.stride()), x.dtype, self.same.get(own, own)))

    def value(self, x: torch.Tensor) -> Value:
        return self.known.get(id(x)) or self.made(x, CONSTANT)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        run: Any = SHAPES.get(func._schema.name, func)
        out = run(*args, **kwargs)
        if self.quiet or func.namespace == "prim":
            return out
        operands: list[Value] = []

        def seen(a: Any) -> Any:
            if isinstance(a, torch.Tensor):
                operands.append(self.value(a))
                return operands[-1]
            return [seen(item) for item in a] if isinstance(a, (list, tuple)) else a

        given, named = tuple([seen(a) for a in args]), {k: seen(a) for k, a in kwargs.items()}
        many = isinstance(out, (tuple, list))
        results = list(out) if many else [out]
        self.add(func, given, named, operands, results, many)
        return out

    def add(self, func: Any, args: Any, kwargs: Any, operands: list[Value], results: list[Any], many: bool) -> None:
        plain = all(v.kind == CONSTANT for v in operands)
        op = Op(func, args, kwargs, operands, [], many, self.path(), self.backward, again=self.again())
        for k, x in enumerate(results):
            v = None
            if isinstance(x, torch.Tensor):
                v = self.made(x, CONSTANT if plain else MADE)
                v.maker, v.index = op, k
            op.outputs.append(v)
        self.tape.ops.append(op)

    def again(self) -> bool:
        """Whether the backward is running a forward again."""
        return self.backward and bool(self.open)

    def path(self) -> str:
        if not self.backward or self.open:
            return self.open[-1] if self.open else ""
        number = backward_number()
        if number is None:
            return ""
        return self.entered[max(0, bisect.bisect_right(self.entered, number, key=lambda e: e[0]) - 1)][1]

    def cross(self, path: str) -> None:
        """From the next operator on, the forward is in another module."""
        self.entered.append((forward_number(), path))

    def hand_on(self, x: torch.Tensor, path: str, what: str) -> torch.Tensor:
        """A tensor at the border of a module."""
        if x.requires_grad and torch.is_grad_enabled():
            return _Border.apply(x, self, path, what)  # pyright: ignore[reportReturnType]
        return self.border(x, path, what)

    def border(self, x: torch.Tensor, path: str, what: str, forward: Op | None = None) -> torch.Tensor:
        self.quiet = True
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        self.quiet = False
        given = self.value(x)
        self.same[storage_of(made)] = given.storage
        value = self.made(made, CONSTANT if given.kind == CONSTANT else MADE)
        again = forward is None and self.again()
        value.maker = Op(BORDER, (given,), {}, [given], [value], False, path, self.backward, what, forward, again)
        self.tape.ops.append(value.maker)
        return made


class _Border(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, recorder: _Recorder, path: str, what: str) -> torch.Tensor:
        made = recorder.border(x, path, what)
        ctx.given = recorder, path, what, recorder.tape.ops[-1]
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        recorder, path, what, forward = ctx.given
        return recorder.border(grad, path, what, forward), None, None, None


@contextmanager
def _borders(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if not path or type(module).forward is nn.Module.forward:
                continue  # the model itself, or a container such as ModuleList

            def enter(_: Any, args: Any, kwargs: Any, path: str = path) -> Any:
                recorder.open.append(path)
                recorder.cross(path)
                return on_first(lambda x: recorder.hand_on(x, path, ARRIVING), (args, kwargs))

            def leave(_: Any, args: Any, out: Any, path: str = path) -> Any:
                out = on_first(lambda x: recorder.hand_on(x, path, LEAVING), out)
                recorder.open.pop()
                recorder.cross(recorder.open[-1] if recorder.open else "")
                return out

            pre = module.register_forward_pre_hook(enter, with_kwargs=True)
            stack.callback(pre.remove)
            # always_call: a recomputation ends, by an exception, as soon as the backward has what it needs.
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


@contextmanager
def _recomputed(model: nn.Module, names: Collection[str], recorder: _Recorder) -> Iterator[None]:
    """The backward runs the forward of these modules again."""

    def run(forward: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        if not recorder.backward:
            return forward(*args, **kwargs)
        recorder.open.append(name)  # the module's hooks run around the first forward only
        try:
            return forward(*args, **kwargs)
        finally:
            recorder.open.pop()

    modules = [model.get_submodule(name) for name in names]
    own = [vars(module).get("forward") for module in modules]
    for name, module in zip(names, modules):
        whole = partial(run, module.forward, name)
        vars(module)["forward"] = partial(checkpoint, whole, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for module, forward in zip(modules, own):
            del vars(module)["forward"]
            if forward is not None:
                vars(module)["forward"] = forward


class _Step(nn.Module):
    """A module whose forward is a whole step of another one, in which that one has other parameters."""

    def __init__(self, model: nn.Module, step: Callable[..., None]) -> None:
        super().__init__()
        self.model, self._run = model, step

    def forward(self, *args: Any, **kwargs: Any) -> None:
        self._run(*args, **kwargs)


def record(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any] | torch.Tensor,
    *,
    loss: Loss | None = None,
    training: bool = True,
    device: str = "cpu",
    recomputed: Collection[str] = (),
) -> Tape:
    """Record a step of `model` on `inputs`, without computing anything.

    Args:
        model: the model; its parameters may be on the meta device.
        inputs: arguments of its forward, with the sizes of the whole batch: a tensor, a sequence, or a dict of names.
        loss: computes the loss from what the model returns; None for `default_loss`.
        training: whether to record the backward, too.
        device: the type of device on which the step will run.
        recomputed: names of modules whose forward the backward runs again.

    Returns:
        The tape.

    Raises:
        PlacementError: the forward needs the values of tensors, which nobody has before it runs.
    """
    mode, recorder = FakeTensorMode(allow_non_fake_inputs=True), _Recorder()
    names: dict[int, str] = {}

    def fake(x: torch.Tensor, grad: bool = False) -> torch.Tensor:
        with mode:
            made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        return made.requires_grad_() if grad else made

    given: dict[str, torch.Tensor] = {}
    parameters: dict[str, torch.Tensor] = {}
    for kind, named in (
        (PARAMETER, model.named_parameters(remove_duplicate=False)),
        (BUFFER, model.named_buffers(remove_duplicate=False)),
    ):
        for name, x in named:
            if id(x) in names:
                recorder.tape.ties[name] = names[id(x)]
                given[name] = given[names[id(x)]]
                continue
            names[id(x)] = name
            given[name] = fake(x, x.requires_grad and training)
            recorder.tape.values[kind, name] = recorder.made(given[name], kind, name)
            if given[name].requires_grad:
                parameters[name] = given[name]

    def take(x: torch.Tensor, name: str) -> torch.Tensor:
        made = fake(x, x.requires_grad)
        recorder.tape.values[INPUT, name] = recorder.made(made, INPUT, name)
        return made

    args, kwargs = mapped_arguments(take, parameter_names(model.forward), *arguments_of(inputs))

    def step(*args: Any, **kwargs: Any) -> None:
        out = model(*args, **kwargs)
        recorder.tape.results = [recorder.value(x) for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if not training:
            return
        total = (loss or default_loss)(out)
        recorder.tape.loss = recorder.value(total)
        recorder.backward = True
        wanted = list(parameters)
        found = torch.autograd.grad(total, [parameters[n] for n in wanted], allow_unused=True)
        recorder.tape.gradients = {n: recorder.value(g) for n, g in zip(wanted, found) if g is not None}

    try:
        with (
            using_operator(model),
            mode,
            _borders(model, recorder),
            _recomputed(model, recomputed, recorder),
            recorder,
            torch.set_grad_enabled(training),
        ):
            inside = {f"model.{name}": x for name, x in given.items()}
            functional_call(_Step(model, step), inside, args, kwargs, tie_weights=False)
    except UnknownValue as error:
        raise PlacementError(
            f"the forward of {type(model).__name__} needs the values of tensors, in {error}: what it computes, or how "
            "large that is, cannot be known before it runs; search with inputs that avoid it, or write the plan by hand"
        ) from error
    return recorder.tape


__all__ = ["Loss", "default_loss", "record"]
