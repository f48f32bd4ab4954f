"""Batch normalisation: channels, batch and space may be sharded; the statistics are those of the global batch.

In training the mean and variance are taken over batch and space. Where these are sharded, the underlying sums are
all-reduced inside the operator (two vectors in the forward, one stacked pair in the backward), so that the results and
the running statistics equal those of one device. In evaluation every element is independent.
"""

from math import prod
from typing import Any

import torch

from ..bind import rule_for
from ..call import Call, LocalCall
from ..local_calls import all_reduce, empty_outputs, has_empty_shard, unless_empty
from ..notation import Rule, library_rule
from ..plan import signature

TRAINING: dict[str, Any] = {
    "native_batch_norm": "training",
    "_native_batch_norm_legit": "training",
    "_native_batch_norm_legit_functional": "training",
    "_native_batch_norm_legit_no_training": False,
    "_batch_norm_with_update": True,
    "_batch_norm_with_update_functional": True,
    "_batch_norm_no_update": False,
    "cudnn_batch_norm": "training",
    "miopen_batch_norm": "training",
    "native_batch_norm_backward": "train",
    "batch_norm_backward": "update",
    "cudnn_batch_norm_backward": True,
    "miopen_batch_norm_backward": True,
}
"""Operator -> whether it normalises by the batch's own statistics, or the argument that decides this."""

UPDATES = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "cudnn_batch_norm",
    "miopen_batch_norm",
)
"""Operators that update the running statistics in place."""

NAMES = {
    "exponential_average_factor": "momentum",
    "epsilon": "eps",
    "grad_output": "grad_out",
    "save_var": "save_invstd",
}
"""Argument name in some of the operators -> its name in the others."""


def _trains(call: Call) -> bool:
    by = TRAINING[call.name]
    return bool(call[by]) if isinstance(by, str) else by


def _get(call: Call | LocalCall, name: str) -> Any:
    """The argument `name` under the name that the operator uses for it; None if it has no such argument."""
    schema = call.func._schema.arguments
    return next((call[a.name] for a in schema if NAMES.get(a.name, a.name) == name), None)


def _text(call: Call, data: tuple[str, ...]) -> str:
    """The text of an operator of which the arguments `data` and the first output are batches, of n samples.

    Other tensors have one element per channel c, or none, if they are unused statistics or the reserved space.
    """
    tensors = signature(call.func)
    ins = ["nc..." if name in data else "c" for name in tensors.arguments]
    return f"{','.join(ins)}->{','.join(['nc...', *['c'] * (tensors.returns - 1)])}"


@rule_for(*(name for name in TRAINING if not name.endswith("backward")))
def batch_norm(call: Call) -> Rule:
    """Channels may be sharded. In training the statistics are those of the whole batch, be it sharded."""
    trains = _trains(call)
    statistics = tuple([name for name in ("running_mean", "running_var") if call.has(name)])
    return library_rule(
        _text(call, ("input",)),
        last="n...",
        whole=range(1, len(call.outputs)),
        written=statistics if trains and call.name in UPDATES else (),
        local=_local_forward if trains else _local_evaluation,
        all_reduces=("n...", 2) if trains else ("", 0),
    )


def _over_batch(call: LocalCall) -> bool:
    return any(axes for f, axes in call.axes.items() if f != "c")


def _reduced(x: torch.Tensor, call: LocalCall) -> torch.Tensor:
    return all_reduce(x, "sum", call, [f for f in call.axes if f != "c"])


def _local_evaluation(call: LocalCall) -> Any:
    """Run in evaluation mode. A rank without elements must not run the kernels, which divide by their number."""
    if not has_empty_shard(call):
        return call.run()
    made = empty_outputs(call)
    running = (call["running_mean"], call["running_var"])
    return (*made[:-2], *(t.clone() for t in running)) if call.call.name in _FUNCTIONAL else made


def _local_forward(call: LocalCall) -> Any:
    """Compute the statistics in two passes: first the mean, then the squared deviations from it."""
    x = call["input"]
    if not _over_batch(call) and x.numel():
        return call.run()
    outputs = call.call.outputs
    assert outputs[1] is not None
    over = [d for d in range(x.dim()) if d != 1]
    column = [-1 if d == 1 else 1 for d in range(x.dim())]
    count = prod(call.call["input"].shape[d] for d in over)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = _reduced(wide.sum(over), call) / count
    centred = wide - mean.reshape(column)
    variance = _reduced((centred * centred).sum(over), call) / count
    rstd = (variance + _get(call, "eps")).rsqrt()
    weight, bias = call["weight"], call["bias"]
    out = centred * (rstd if weight is None else rstd * weight).reshape(column)
    out = out if bias is None else out + bias.reshape(column)
    running = _updated(call, mean, variance * count / (count - 1))
    reserved = [torch.empty(0, dtype=o.dtype, device=x.device) for o in outputs[3:] if o and o.dtype == torch.uint8]
    # The kernel saves statistics in the dtype of the parameters, whatever its fake says.
    given = (t for t in (weight, bias, _get(call, "running_mean")) if t is not None)
    saved = next((t.dtype for t in given), outputs[1].dtype)
    return (out.to(x.dtype), mean.to(saved), rstd.to(saved), *reserved, *running)


_FUNCTIONAL = ("_native_batch_norm_legit_functional", "_batch_norm_with_update_functional")


def _updated(call: LocalCall, mean: torch.Tensor, variance: torch.Tensor) -> list[torch.Tensor]:
    """Update the running statistics by this batch: in place, or as returned results for the functional operators."""
    momentum = _get(call, "momentum")
    made: list[torch.Tensor] = []
    for old, new in ((_get(call, "running_mean"), mean), (_get(call, "running_var"), variance)):
        if old is None:
            continue
        moved = torch.lerp(old, new.to(old.dtype), momentum)
        if call.call.name in _FUNCTIONAL:
            made.append(moved)
        else:
            old.copy_(moved)
    return made


@rule_for(*(name for name in TRAINING if name.endswith("backward")))
def batch_norm_backward(call: Call) -> Rule:
    """In training the gradients of weight and bias are among the all-reduced sums; otherwise they are Partial."""
    gradient = "grad_output" if call.has("grad_output") else "grad_out"
    text = _text(call, (gradient, "input"))
    # The kernels divide by the number of elements.
    shared: dict[str, Any] = {"linear": gradient, "last": "n...", "refuses_empty": "nc..."}
    if not _trains(call):
        return library_rule(text, reduce="n...", local=unless_empty, **shared)
    return library_rule(text, whole=(1, 2), local=_local_backward, all_reduces=("n...", 1), **shared)


def _local_backward(call: LocalCall) -> Any:
    """Ioffe and Szegedy (2015), section 3, with both sums over the global batch in one collective."""
    x, grad = call["input"], _get(call, "grad_out")
    if not _over_batch(call) and x.numel():
        return call.run()
    outputs = call.call.wanted
    over = [d for d in range(x.dim()) if d != 1]
    column = [-1 if d == 1 else 1 for d in range(x.dim())]
    count = prod(call.call["input"].shape[d] for d in over)
    weight, dtype = call["weight"], torch.promote_types(call["save_mean"].dtype, torch.float32)
    mean, rstd = call["save_mean"].to(dtype), _get(call, "save_invstd").to(dtype)
    wide = grad.to(dtype)
    scaled = (x.to(dtype) - mean.reshape(column)) * rstd.reshape(column)
    shift, scale = _reduced(torch.stack([wide.sum(over), (wide * scaled).sum(over)]), call)
    inner = wide - (shift.reshape(column) + scaled * scale.reshape(column)) / count
    made = (inner * (rstd if weight is None else rstd * weight).reshape(column), scale, shift)
    return tuple(None if o is None else t.to(o.dtype) for t, o in zip(made, outputs))


__all__ = ["TRAINING", "UPDATES"]
