"""Private APIs of Dynamo by which it traces a whole training step: the backward and the steps of optimizers as well.

Dynamo can trace `backward`, if a setting says so. Of an optimizer it initializes the state itself, from gradients that
exist before the frame runs, and its step breaks the graph twice; here gradients are made in the graph, so that both are
traced as any other code. Learning rates become inputs of the graph: torch would compile it again once one has changed.
"""

import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch

from ..on_demand import when_imported  # first: the version of torch is checked there

# isort: split
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import unimplemented
from torch._dynamo.pgo import auto_dynamic
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import builder
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import (
    CONSTANT_VARIABLE_FALSE,
    CONSTANT_VARIABLE_NONE,
    CONSTANT_VARIABLE_TRUE,
    ConstantVariable,
)
from torch._dynamo.variables.functions import UserMethodVariable
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._functorch import config as functorch_config

LEARNING_RATE = re.compile(r"param_groups\b.*\['lr'\]$")
"""The learning rate of a group of an optimizer, as Dynamo writes where a value comes from."""

_whole: ContextVar[bool] = ContextVar("dtensor_whole_step", default=False)
_seam: ContextVar[Any] = ContextVar("dtensor_whole_step_seam", default=None)

_own_getattr = OptimizerVariable.var_getattr
_own_call = OptimizerVariable.call_method
_own_automatic = builder.process_automatic_dynamic
_own_leaves = TensorVariable._collect_backward_inputs
_own_attribute = TensorVariable.var_getattr
_own_backward = TensorVariable.method_backward


def decompositions() -> dict[Any, Callable[..., Any]] | None:
    """How AOTAutograd is to take operators apart that take a number of the host which changes, such as a learning rate
    as `alpha`; None where no whole step is compiled. Inductor knows them by itself.

    Torch makes such numbers tensors only where an operator multiplies or adds them. It takes others for constants, and
    compiles anew when they change.
    """
    return dict(_table()) if _whole.get() else None


def inductor_options() -> dict[str, Any]:
    """What Inductor is to do otherwise when it compiles a whole step: it takes that for a graph without a backward, of
    which it moves all computations right before their first use. A gradient that is first read when all are clipped
    would be computed, and sent, after the whole backward."""
    return {"reorder_for_locality": False} if _whole.get() else {}


def _taken_apart(compute: Callable[..., Any], number: str | int, default: float = 1) -> Callable[..., Any]:
    """A decomposition by `compute(number, *tensors)`, in the precision in which torch's kernels compute; `number` is
    the name or position of the argument."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        tensors = list(args)
        value = kwargs.get(number, default) if isinstance(number, str) else tensors.pop(number)
        if not isinstance(value, torch.SymFloat):
            return NotImplemented
        dtype = functools.reduce(torch.promote_types, [x.dtype for x in tensors])
        wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        return compute(value, *[x.to(wide) for x in tensors]).to(dtype)

    return decompose


def _one_by_one(single: Callable[..., Any], always: bool) -> Callable[..., Any]:
    """A decomposition of an operator on lists of tensors, given that on one. Where Inductor has no kernel for such
    lists it is `always` to be taken, as the operator could otherwise not run there."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        if not always and not any(isinstance(x, torch.SymFloat) for x in (*args, *kwargs.values())):
            return NotImplemented
        length = next(len(x) for x in args if isinstance(x, (list, tuple)))
        rows = ([x[i] if isinstance(x, (list, tuple)) else x for x in args] for i in range(length))
        return [single(*row, **kwargs) for row in rows]

    return decompose


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    from torch._inductor.inductor_prims import fma  # to which Dynamo takes `addcdiv_` and `addcmul_` apart

    aten: Any = torch.ops.aten
    found: dict[Any, Callable[..., Any]] = {
        aten.add.Tensor: _taken_apart(lambda k, x, y: x + y * k, "alpha"),
        aten.sub.Tensor: _taken_apart(lambda k, x, y: x - y * k, "alpha"),
        aten.addcmul.default: _taken_apart(lambda k, x, a, b: x + a * k * b, "value"),
        aten.addcdiv.default: _taken_apart(lambda k, x, a, b: x + a * k / b, "value"),
        aten.lerp.Scalar: _taken_apart(lambda k, x, y: x + (y - x) * k, 2),
        aten.pow.Scalar: _taken_apart(lambda k, x: torch.pow(torch.ones_like(x) * k, x), 0),
        fma: _taken_apart(lambda k, x, y: x * k + y, 1),
    }
    singles: dict[str, Any] = {name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "lerp", "pow")}
    singles["addcmul"] = lambda x, a, b, value=1: torch.addcmul(x, a, b, value=value)
    singles["addcdiv"] = lambda x, a, b, value=1: torch.addcdiv(x, a, b, value=value)
    for name, single in singles.items():
        packet = getattr(aten, f"_foreach_{name}")
        for form in {"Scalar", "List", "ScalarList", "ScalarAndTensor"}.intersection(packet.overloads()):
            if form != "List" or name in ("add", "sub"):  # which have alpha
                found[getattr(packet, form)] = _one_by_one(single, form == "ScalarList")
    return found


def _extend_inductors() -> None:
    """Put ours before Inductor's decompositions of the same operators, from now on. (To give it a table of its own
    would keep torch from caching what is compiled.)"""
    from torch._inductor.decomposition import decompositions as found

    def first(own: Callable[..., Any], then: Callable[..., Any] | None) -> Callable[..., Any]:
        def either(*args: Any, **kwargs: Any) -> Any:
            made = own(*args, **kwargs)
            return then(*args, **kwargs) if made is NotImplemented and then is not None else made

        return either

    found.update({op: first(own, found.get(op)) for op, own in _table().items()})


def is_whole_step() -> bool:
    """Whether what Dynamo compiles now is a whole training step."""
    return _whole.get()


@contextmanager
def whole_step(first_gradient: Any = None) -> Iterator[None]:
    """A context in which what Dynamo compiles is a whole training step.

    Args:
        first_gradient: the operator that gives the gradient of a loss that is a plain tensor; None for torch's ones.
    """
    _install()
    tokens = _whole.set(True), _seam.set(first_gradient)
    _settings.needed(1)
    try:
        yield
    finally:
        _settings.needed(-1)
        _whole.reset(tokens[0])
        _seam.reset(tokens[1])


class _Settings:
    """The settings of torch that a whole step needs. All threads share them; ranks may be threads."""

    def __init__(self) -> None:
        self.lock, self.count, self.before = threading.Lock(), 0, (False, False)

    def needed(self, change: int) -> None:
        """Set them when the first thread needs them, and undo that when none does any more."""
        with self.lock:
            if self.count == 0:
                self.before = dynamo_config.trace_autograd_ops, functorch_config.remat_using_tags_for_fwd_loss_bwd_graph
            self.count += change
            trace, again = (True, False) if self.count else self.before
            dynamo_config.trace_autograd_ops = trace
            functorch_config.remat_using_tags_for_fwd_loss_bwd_graph = again  # which `dtensor.passes.Recompute` does


_settings = _Settings()


@functools.cache
def _install() -> None:
    OptimizerVariable.var_getattr = _var_getattr
    OptimizerVariable.call_method = _call_method
    builder.process_automatic_dynamic = _process_automatic_dynamic
    TensorVariable._collect_backward_inputs = _collect_backward_inputs
    TensorVariable.var_getattr = _attribute_of_tensor
    TensorVariable.method_backward = _method_backward
    when_imported("torch._inductor.decomposition", _extend_inductors)


def _var_getattr(self: Any, tx: Any, name: str) -> Any:
    """As Dynamo reads an attribute of an optimizer, but that its methods are those of its class, without what torch
    wraps around them: hooks of all optimizers, names in a profile, graph breaks, the order not to trace them."""
    if not _whole.get():
        return _own_getattr(self, tx, name)
    method = inspect.getattr_static(type(self.value), name, None)
    if not inspect.isfunction(method):
        return _own_getattr(self, tx, name)
    own = inspect.unwrap(method)
    return UserMethodVariable({"step": _step_with, "zero_grad": _zero_grad_with}.get(name, _as_it_is)(own), self)


def _call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    """As Dynamo calls a method of an optimizer, but that it traces how the state is initialized."""
    if not _whole.get():
        return _own_call(self, tx, name, args, kwargs)
    return UserDefinedObjectVariable.call_method(self, tx, name, args, kwargs)


def _process_automatic_dynamic(tx: Any, name: str, entry: Any, **kwargs: Any) -> Any:
    """As Dynamo decides whether a number is a constant, which learning rates are not."""
    found = _own_automatic(tx, name, entry, **kwargs)
    return replace(found, scalar=auto_dynamic) if _whole.get() and LEARNING_RATE.search(name) else found


def _collect_backward_inputs(self: Any, vars_iter: Any, error_on_non_leaf: bool = False) -> Any:
    """As Dynamo finds the tensors that `backward` gives gradients, of all that the function has met so far.

    Torch looks among inputs of the graph only, and is silent where there is none.
    """
    if not _whole.get() or error_on_non_leaf:
        return _own_leaves(self, vars_iter, error_on_non_leaf)
    met = InstructionTranslator.current_tx().output.side_effects.id_to_variable.values()
    found = _own_leaves(self, [*vars_iter, *met])
    if not found:
        unimplemented(
            gb_type="backward of a whole step",
            context=str(self),
            explanation="backward() finds no tensor to give a gradient to.",
            hints=["Compute the loss from parameters that require gradients, outside of torch.no_grad()."],
        )
    return found


def _method_backward(self: Any, tx: Any, gradient: Any = None, *args: Any, **kwargs: Any) -> Any:
    """As Dynamo traces `backward`, but that the gradient of a loss comes from the operator that was given."""
    if gradient is None and _seam.get() is not None and self.python_type() is torch.Tensor:
        gradient = VariableTracker.build(tx, _seam.get()).call_function(
            tx, [self.call_method(tx, "detach", [], {})], {}
        )
    return _own_backward(self, tx, gradient, *args, **kwargs)


def _attribute_of_tensor(self: Any, tx: Any, name: str) -> Any:
    """As Dynamo reads an attribute of a tensor, but for a gradient that is None, and for flags.

    Torch (2.13) notes where it was read on the one object that stands for None, True or False, in this and in all later
    compilations.
    """
    found: Any = _own_attribute(self, tx, name)
    if any(found is shared for shared in _SHARED) and found.source is not None:
        source, found.source = found.source, None
        return ConstantVariable(found.value, source=source)
    return found


_SHARED = (CONSTANT_VARIABLE_NONE, CONSTANT_VARIABLE_TRUE, CONSTANT_VARIABLE_FALSE)


def _as_it_is(own: Callable[..., Any]) -> Callable[..., Any]:
    return own


@functools.cache
def _step_with(own: Callable[..., Any]) -> Callable[..., Any]:
    """The step of an optimizer, given that of its class: without gradients, between its own hooks."""

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        for hook in self._optimizer_step_pre_hooks.values():
            changed = hook(self, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        with torch.no_grad():
            result = own(self, *args, **kwargs)
        for hook in self._optimizer_step_post_hooks.values():
            hook(self, args, kwargs)
        return result

    return step


@functools.cache
def _zero_grad_with(own: Callable[..., Any]) -> Callable[..., Any]:
    """`zero_grad`, given that of the class; torch's own has a name in a profile, of which Dynamo would warn."""
    if own is not inspect.unwrap(torch.optim.Optimizer.zero_grad):
        return own

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = None if set_to_none else torch.zeros_like(p.grad)

    return zero_grad


__all__ = ["decompositions", "inductor_options", "is_whole_step", "whole_step"]
