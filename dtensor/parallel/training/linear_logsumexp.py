"""`dtensor::linear_lse` and its backward on one rank: the logsumexp of logits that are never materialised in full.

    linear_lse(x, weight, bias, row, none, chunk) -> (lse, picked)
    linear_lse_backward(grad_lse, grad_picked, x, weight, bias, row, none, lse, chunk)
        -> (grad_x, grad_weight, grad_bias)

x has shape (..., d), weight (v, d) and bias (v,) or None. row (...) is the class picked for each sample; the number
`none` picks no class. lse (...) is the logsumexp over the classes of `x @ weight.T + bias`, and picked (...) the logit
of the picked class, or 0. Logits are in memory for `chunk` samples at a time, and the backward computes them again. A
gradient that is differentiated again (create_graph=True) materialises all logits at once. Half precision is widened to
float32. The rule in `dtensor.rules.families.linear_lse` combines ranks that hold different classes.
"""

from collections.abc import Iterator
from typing import Any

import torch

from ...errors import ArgumentError
from ...mesh.operator_library import library

library.define(
    "linear_lse(Tensor x, Tensor weight, Tensor? bias, Tensor row, int none, int chunk) -> (Tensor lse, Tensor picked)",
)
library.define(
    "linear_lse_backward(Tensor grad_lse, Tensor grad_picked, Tensor x, Tensor weight, Tensor? bias, Tensor row, "
    "int none, Tensor lse, int chunk) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
)

HALF = (torch.float16, torch.bfloat16)


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which logits are exponentiated and summed: float32 for half precision, else `dtype`."""
    return torch.float32 if dtype in HALF else dtype


def _chunks(x: torch.Tensor, row: torch.Tensor, chunk: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    flat, rows = x.reshape(-1, x.shape[-1]), row.reshape(-1)
    for begin in range(0, flat.shape[0], chunk):
        part = slice(begin, begin + chunk)
        yield part, flat[part], rows[part]


def _logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight, bias).to(accumulated(x.dtype))


def linear_lse(x: Any, weight: Any, bias: Any, row: Any, none: int, chunk: int) -> Any:
    """Return for each row the log of the sum of exponentials of its logits, and the logit of its class.

    Both have the shape of `row` and the dtype in which sums of `x` are accumulated.

    Args:
        x, weight, bias: rows [..., k], classes [v, k] and [v]; `bias` may be None.
        row: class of each row; `none` where there is none, whose logit is 0.
        none: the class that counts for nothing.
        chunk: how many rows have their logits in memory at a time.

    Raises:
        ValueError: `chunk` is less than 1."""
    if chunk < 1:
        raise ArgumentError(f"chunk is a number of samples, at least 1; got {chunk}")
    lse = x.new_full((row.numel(),), -torch.inf, dtype=accumulated(x.dtype))
    picked = torch.zeros_like(lse)
    if weight.shape[0]:
        for part, rows, classes in _chunks(x, row, chunk):
            logits = _logits(rows, weight, bias)
            lse[part] = logits.logsumexp(-1)
            counts = classes != none
            found = logits.gather(-1, (classes * counts).unsqueeze(-1)).squeeze(-1)
            picked[part] = torch.where(counts, found, torch.zeros_like(found))
    else:
        picked.new_zeros(1).index_select(0, (row != none).reshape(-1).int())  # raises if a class is picked
    return lse.view(row.shape), picked.view(row.shape)


def linear_lse_backward(
    grad_lse: Any, grad_picked: Any, x: Any, weight: Any, bias: Any, row: Any, none: int, lse: Any, chunk: int
) -> Any:
    """Return the gradients of `x`, `weight` and `bias`, given those of both results of `linear_lse`. The logits are
    computed again, `chunk` rows at a time."""
    wide = accumulated(x.dtype)
    grad_x = torch.zeros_like(x, memory_format=torch.contiguous_format)
    grad_weight = torch.zeros_like(weight, dtype=wide, memory_format=torch.contiguous_format)
    grad_bias = torch.zeros(0 if bias is None else bias.shape[0], dtype=wide, device=x.device)
    into, of_lse, of_picked, sums = (t.reshape(-1, *t.shape[row.dim() :]) for t in (grad_x, grad_lse, grad_picked, lse))
    if weight.shape[0]:
        for part, rows, classes in _chunks(x, row, chunk):
            grad = (_logits(rows, weight, bias) - sums[part].unsqueeze(-1)).exp() * of_lse[part].unsqueeze(-1)
            counts = classes != none
            mine = torch.where(counts, of_picked[part], torch.zeros_like(of_picked[part]))
            grad.scatter_add_(-1, (classes * counts).unsqueeze(-1), mine.unsqueeze(-1))
            into[part] = grad.to(x.dtype) @ weight
            grad_weight += (grad.to(x.dtype).t() @ rows).to(wide)
            if bias is not None:
                grad_bias += grad.sum(0)
    return grad_x, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)


def _fake(x: Any, weight: Any, bias: Any, row: Any, none: Any, chunk: Any) -> Any:
    made = x.new_empty(row.shape, dtype=accumulated(x.dtype))
    return made, torch.empty_like(made)


def _fake_backward(
    grad_lse: Any, grad_picked: Any, x: Any, weight: Any, bias: Any, row: Any, none: Any, lse: Any, chunk: Any
) -> Any:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(0 if bias is None else bias.shape[0])


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, row, none, chunk = inputs
    ctx.set_materialize_grads(False)  # zeros in place of a gradient would be a plain tensor
    ctx.save_for_backward(x, weight, bias, row, output[0])
    ctx.none, ctx.chunk = none, chunk


def _backward(ctx: Any, grad_lse: Any, grad_picked: Any) -> Any:
    x, weight, bias, row, lse = ctx.saved_tensors
    grad_lse, grad_picked = (torch.zeros_like(lse) if g is None else g for g in (grad_lse, grad_picked))
    if torch.is_grad_enabled():
        return *_recorded(grad_lse, grad_picked, x, weight, bias, row, ctx.none), None, None, None
    operands = (grad_lse, grad_picked, x, weight, bias, row)
    grads = torch.ops.dtensor.linear_lse_backward(*operands, ctx.none, lse, ctx.chunk)
    return grads[0], grads[1], None if bias is None else grads[2], None, None, None


def _recorded(
    grad_lse: Any, grad_picked: Any, x: Any, weight: Any, bias: Any, row: Any, none: Any
) -> list[torch.Tensor | None]:
    """The gradients, such that they can be differentiated again: by operators with derivatives, on all logits."""
    logits = torch.nn.functional.linear(x, weight, bias).to(accumulated(x.dtype))
    left_out = row == none
    found = logits.gather(-1, row.masked_fill(left_out, 0).unsqueeze(-1)).squeeze(-1)
    made = logits.logsumexp(-1), found.masked_fill(left_out, 0)
    given = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
    supply = iter(torch.autograd.grad(made, given, (grad_lse, grad_picked), create_graph=True))
    return [next(supply) if t is not None and t.requires_grad else None for t in (x, weight, bias)]


library.impl("linear_lse", linear_lse, "CompositeExplicitAutograd")
library.impl("linear_lse_backward", linear_lse_backward, "CompositeExplicitAutograd")
torch.library.register_fake("dtensor::linear_lse", _fake, lib=library)
torch.library.register_fake("dtensor::linear_lse_backward", _fake_backward, lib=library)
torch.library.register_autograd("dtensor::linear_lse", _backward, setup_context=_save, lib=library)

__all__ = ["accumulated", "linear_lse", "linear_lse_backward"]
