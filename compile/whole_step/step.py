"""`step`: compiles a training step, forward, backward, clipping and optimizers, as one graph."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
from torch.optim import Optimizer

from dtensor.errors import ArgumentError, ArgumentTypeError, shown
from dtensor.torch_private.core import in_mode_that_compiles_nothing
from dtensor.torch_private.training.optimizers import hooks_apart, steps_noted
from dtensor.torch_private.training.whole_steps import whole_step

from ..backends.options import Options
from .seam import FIRST_GRADIENT

P = ParamSpec("P")
R = TypeVar("R")


class CompiledStep(Generic[P, R]):
    """A training step that runs as one graph from its second call on. `step` makes one.

    Attributes:
        function: the step as it was written; to call it runs the same operators one by one.
        optimizers: those that the first call has stepped.
    """

    def __init__(self, function: Callable[P, R], memory: int | None, options: Mapping[str, Any] | None) -> None:
        functools.update_wrapper(self, function)
        given = {"memory": memory, **(options or {})}
        Options.of(given)
        self.function = function
        self.optimizers: list[Optimizer] | None = None
        self._compiled: Callable[P, R] = torch.compile(function, backend="dtensor", options=given, fullgraph=True)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.optimizers is None or in_mode_that_compiles_nothing():
            return self._eager(*args, **kwargs)
        with hooks_apart(self.optimizers), whole_step(FIRST_GRADIENT):
            return self._compiled(*args, **kwargs)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else functools.partial(self, owner)

    def _eager(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step as it is written, in which optimizers make their states, and see which optimizers there are."""
        with steps_noted() as optimizers:
            result = self.function(*args, **kwargs)
        for optimizer in optimizers:
            _check(optimizer)
        self.optimizers = optimizers
        return result


@overload
def step(
    function: Callable[P, R], *, memory: int | None = None, options: Mapping[str, Any] | None = None
) -> CompiledStep[P, R]: ...


@overload
def step(
    *, memory: int | None = None, options: Mapping[str, Any] | None = None
) -> Callable[[Callable[P, R]], CompiledStep[P, R]]: ...


def step(
    function: Callable[..., Any] | None = None,
    *,
    memory: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile a training step as one graph: forward, backward, clipping and the optimizers' steps.

        @dtensor.compile.step
        def train(tokens, labels):
            loss = F.cross_entropy(model(tokens), labels)
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

    The first call runs eagerly, as optimizers make their states in it; the second compiles. Without the decorator the
    function does the same, operator by operator. A learning rate that changes does not compile it again, so that
    `scheduler.step()` is called after it; gradients are accumulated by as many `backward` calls in it. Hooks of an
    optimizer of its own are part of the graph; those of all optimizers, and those that are `torch.compiler.disable`d,
    run after the step. Under a `TorchDispatchMode`, in which torch compiles nothing, it runs eagerly.

    Args:
        function: the step. It may take tensors and other values, and return some; it leaves no gradients that the next
            call does not use.
        memory: bytes that a rank may hold at once while the compiled step runs: parameters, states of optimizers and
            inputs, and all that the step allocates. What the backward needs of the forward is then held, computed or
            gathered again, or put on the host, whichever takes the least time within these bytes. None holds what
            torch's partitioner would hold. The first call, which is eager, is not bounded.
        options: those of the backend, see `dtensor.compile.Options`.

    Returns:
        A `CompiledStep`, which is called as the function is.

    Raises:
        TypeError: what is given is not a function.
        ValueError: unknown or invalid options; on the first call, an optimizer whose step cannot be part of a graph;
            on the second one, `memory` is less than the step can do with.
        NotImplementedError: `memory` is given, and shards differ in size between ranks.
        torch._dynamo.exc.Unsupported: on the second call, a line of the function cannot be part of a graph.
    """
    if function is None:
        return functools.partial(step, memory=memory, options=options)
    if isinstance(function, torch.nn.Module) or not callable(function):
        raise ArgumentTypeError(
            f"step compiles a function that makes a whole training step, got {shown(function)}; write a function that "
            "calls the model, backward and optimizer.step()"
        )
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ArgumentTypeError(f"step compiles a plain function, got the generator or coroutine {function.__name__}")
    return CompiledStep(function, memory, options)


def _check(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError(
            "LBFGS evaluates the model as often as its line search asks for, so its step is no fixed graph; compile "
            "the model by torch.compile, and leave optimizer.step(closure) outside of it"
        )
    if isinstance(optimizer, torch.optim.Adafactor) and any(torch.is_tensor(g["lr"]) for g in optimizer.param_groups):
        raise ArgumentError(
            "the step of Adafactor(lr=a tensor) reads it on the host, so it cannot be traced; give lr as a number, "
            "which may change without another compilation"
        )
    for what, instead in (("fused", "Inductor fuses the update"), ("differentiable", "compile the model alone")):
        if any(group.get(what) for group in optimizer.param_groups):
            raise ArgumentError(f"the step of {name}(..., {what}=True) cannot be traced; leave {what} out: {instead}")


__all__ = ["CompiledStep", "step"]
