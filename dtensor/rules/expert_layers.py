"""`dtensor::experts` and its backward on one rank: a layer of experts, of which each token goes through some.

    experts(x, index, weight, up, down, up_bias, down_bias, gate) -> (out, hidden)
    experts_backward(grad, x, index, weight, up, down, up_bias, down_bias, hidden, gate)
        -> (grad_x, grad_weight, grad_up, grad_down, grad_up_bias, grad_down_bias)

    x (t, d), index and weight (t, k), up (e, d, g), down (e, f, o), up_bias (e, g), down_bias (e, o) or None
    hidden[i, j] = x[i] @ up[index[i, j]] + up_bias[index[i, j]]                                            (t, k, g)
    out[i] = sum over j of weight[i, j] * (gate(hidden[i, j]) @ down[index[i, j]] + down_bias[index[i, j]]) (t, o)

Rows are sorted by expert for two grouped products, and put back (Gale et al., "MegaBlocks", 2023). A rank may hold a
part of the experts: the tokens of others come last, are not computed, and count as zero, so that `out` is a sum over
the ranks. Their rows of `hidden` are -inf, so that it is the maximum over ranks; the backward does not read them. An
index that is no expert's is treated likewise.

`gate` names a function from (n, g) to (n, f) whose forward and backward were traced before (`gate_name`). Its name
holds a checksum of the trace, so that what compilers keep of a program is kept for that function only.
"""

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..errors import ArgumentError, shown
from ..mesh.operator_library import library
from .grouped_rows import rows_by_group, rows_within_groups

_LAYER = "Tensor index, Tensor weight, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias"
library.define(f"experts(Tensor x, {_LAYER}, str gate) -> (Tensor out, Tensor hidden)")
library.define(
    f"experts_backward(Tensor grad, Tensor x, {_LAYER}, Tensor hidden, str gate) -> (Tensor grad_x, "
    "Tensor grad_weight, Tensor grad_up, Tensor grad_down, Tensor grad_up_bias, Tensor grad_down_bias)"
)


@dataclass(frozen=True)
class Gate:
    """A function of rows, and its vector-Jacobian product: `forward(h)` and `backward(h, grad)`."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


GATES: dict[str, Gate] = {}
"""Name -> function. A graph that has been compiled does not look here again: it holds the operators."""


_tracing = threading.Lock()
"""fx traces one function at a time."""


def gate_name(
    function: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor, width: int, device: str = "cpu"
) -> str:
    """Trace a function of rows of a width, for values of the dtype and device of a tensor, or of this device if that is
    on the meta device; returns its name.

    Raises:
        ValueError: what it returns is not of the shape (rows, any width), or depends on other rows, or is random; or
            the function holds tensors, whose gradients would be lost.
    """
    device = device if like.is_meta else str(like.device)
    made = _checked(function, like, width, device)
    # Sizes that are equal in a trace are taken for the same one, so the number of rows is that of no width.
    n = next(n for n in (2, 3, 5, 7) if n not in (width, made.shape[1]))
    h, of_made = (made.new_ones(n, columns) for columns in (width, made.shape[1]))

    version = h._version
    with torch.no_grad():
        function(h)
    writes = h._version != version

    def forward(h: torch.Tensor) -> torch.Tensor:
        return function(h.clone() if writes else h)  # rows are read again

    def backward(h: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        product: Any = torch.func.vjp(forward, h)[1]
        (found,) = product(grad)
        return found

    graphs = _traced(forward, h), _traced(backward, h, of_made)
    text = f"{''.join([g.code for g in graphs])}{like.dtype}"
    name = f"{getattr(function, '__name__', type(function).__name__)}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    GATES.setdefault(name, Gate(*[g.forward for g in graphs]))  # not by its call, which hooks of all modules see
    return name


def _checked(
    function: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor, width: int, device: str
) -> torch.Tensor:
    """What a function makes of rows, if it makes each of the one at its place."""
    h = torch.linspace(-2, 2, 3 * width, device=device).to(like.dtype).view(3, width)
    with torch.no_grad():
        made = function(h.clone())
        if not isinstance(made, torch.Tensor) or made.dim() != 2 or made.shape[0] != 3:
            raise ArgumentError(
                f"the gate of experts takes rows (n, {width}) and returns rows (n, f); got {shown(made)}"
            )
        alone = torch.cat([function(row.clone()) for row in h.split(1)])
    if not torch.allclose(made.double(), alone.double(), 1e-2, 1e-2, equal_nan=True):
        raise ArgumentError(
            "the gate of experts makes something else of a row where others stand beside it, or each time; write it "
            "such that a row depends on no other row, and on no random number"
        )
    return made


def _traced(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> fx.GraphModule:
    """A graph of a function, for any number of rows, which writes to nothing."""
    from torch.fx.experimental.proxy_tensor import make_fx  # it takes long to import

    with _tracing:
        pure: Any = torch.func.functionalize(function, remove="mutations")
        graph = make_fx(pure, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*args)
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            raise ArgumentError(
                f"the gate of experts reads the tensor {node.target}, whose gradient would be lost; write the gate as "
                "a function of its rows and numbers, or apply the tensor before or after the experts"
            )
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ArgumentError(
                f"the gate of experts draws random numbers ({node.target}), others in its backward; write dropout "
                "before or after the experts"
            )
    return graph


def _gate(name: str) -> Gate:
    if name not in GATES:
        raise ArgumentError(
            f"the gate {name!r} of a layer of experts was traced in another process; call "
            "dtensor.parallel.expert_gate again, or distribute_model for a model of transformers"
        )
    return GATES[name]


class _Rows:
    """The rows of a call: each token once for each of its experts, sorted by expert; those of other ranks' come last.

    Args:
        index: the expert of each token's entries, counted from this rank's first one.
        experts: how many experts the rank has.
        of: how many experts there are.

    Attributes:
        order: which entry a row is.
        token: which token it is of.
        place: which row an entry is.
        held: whether an entry is of an expert of this rank.
        expert: the expert of each row; `experts` for rows of others.
        ends: where the rows of each expert end.
    """

    def __init__(self, index: torch.Tensor, experts: Any, of: Any) -> None:
        self.shape: tuple[Any, Any] = (index.shape[0], index.shape[1])
        self.held: torch.Tensor = (index >= 0) & (index < experts)
        flat = torch.where(self.held, index, experts).reshape(-1).long()
        self.expert, self.order = flat.sort(stable=True)
        self.token: torch.Tensor = self.order // index.shape[1]
        counted = torch.arange(flat.shape[0], device=index.device)
        self.place: torch.Tensor = torch.empty_like(self.order).scatter(0, self.order, counted)
        numbers = torch.arange(experts, device=index.device)
        self.ends: torch.Tensor = torch.searchsorted(self.expert, numbers, right=True).to(torch.int32)
        self.experts, self.of_all = experts, of

    def times(self, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """Each row times the matrix of its expert."""
        return rows_by_group(rows, matrices, self.ends, self.of_all)

    def within(self, rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """The matrices of which these are the gradients: of each expert, from its rows."""
        return rows_within_groups(rows, others, self.ends, self.of_all)

    def back(self, rows: torch.Tensor, other: float = 0.0) -> torch.Tensor:
        """What rows hold, by token and entry; `other` for entries that are not of this rank's experts."""
        found = rows[self.place].view(*self.shape, *rows.shape[1:])
        held = self.held.view(*self.shape, *[1] * (rows.dim() - 1))
        return torch.where(held, found, other)

    def sorted(self, entries: torch.Tensor) -> torch.Tensor:
        """The rows of what is given by token and entry."""
        return entries.reshape(-1, *entries.shape[2:])[self.order]

    def each(self, bias: torch.Tensor) -> torch.Tensor:
        """The row of `bias` of each row's expert."""
        return torch.cat([bias, bias.new_zeros(1, bias.shape[1])])[self.expert]

    def summed(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of the rows of each expert."""
        return rows.new_zeros(self.experts + 1, rows.shape[1]).index_add(0, self.expert, rows)[:-1]


def experts(
    x: Any,
    index: Any,
    weight: Any,
    up: Any,
    down: Any,
    up_bias: Any,
    down_bias: Any,
    gate: str,
    of: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the experts that are here make of tokens, and the rows between both products.

    Args:
        x, index, weight: (t, d), (t, k) and (t, k); an index counts from the first expert that is here.
        up, down, up_bias, down_bias: of the experts that are here.
        gate: a name that `gate_name` returned.
        of: how many experts there are on all ranks; None if these are all."""
    rows = _Rows(index, up.shape[0], up.shape[0] if of is None else of)
    hidden = rows.times(x[rows.token], up)
    if up_bias is not None:
        hidden = hidden + rows.each(up_bias)
    out = rows.times(_gate(gate).forward(hidden), down)
    if down_bias is not None:
        out = out + rows.each(down_bias)
    return (rows.back(out) * weight.unsqueeze(-1)).sum(1), rows.back(hidden, -torch.inf)


def experts_backward(
    grad: Any,
    x: Any,
    index: Any,
    weight: Any,
    up: Any,
    down: Any,
    up_bias: Any,
    down_bias: Any,
    hidden: Any,
    gate: str,
    of: Any = None,
) -> tuple[torch.Tensor, ...]:
    """The gradients of `x`, `weight`, `up`, `down` and the biases (empty for None), given that of `out` of `experts`,
    whose arguments these are."""
    rows = _Rows(index, up.shape[0], up.shape[0] if of is None else of)
    between = rows.sorted(hidden)
    given = grad.to(x.dtype)[rows.token]
    gated = _gate(gate).forward(between)
    of_gated = rows.times(given, down.mT)
    of_weight = (of_gated * gated).sum(-1)
    if down_bias is not None:
        of_weight = of_weight + (given * rows.each(down_bias)).sum(-1)
    share = rows.sorted(weight).to(x.dtype).unsqueeze(-1)
    given = given * share
    of_between = _gate(gate).backward(between, of_gated * share)
    none = x.new_empty(0)
    return (
        rows.back(rows.times(of_between, up.mT)).sum(1),
        rows.back(of_weight).to(weight.dtype),
        rows.within(x[rows.token], of_between),
        rows.within(gated, given),
        none if up_bias is None else rows.summed(of_between),
        none if down_bias is None else rows.summed(given),
    )


def _fake(x: Any, index: Any, weight: Any, up: Any, down: Any, up_bias: Any, down_bias: Any, gate: Any) -> Any:
    out = x.new_empty(x.shape[0], down.shape[2], dtype=torch.result_type(x, weight))
    return out, x.new_empty(*index.shape, up.shape[2])


def _fake_backward(
    grad: Any, x: Any, index: Any, weight: Any, up: Any, down: Any, up_bias: Any, down_bias: Any, hidden: Any, gate: Any
) -> Any:
    biases = [x.new_empty(0) if b is None else x.new_empty(b.shape) for b in (up_bias, down_bias)]
    return (*(t.new_empty(t.shape) for t in (x, weight, up, down)), *biases)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)  # zeros in place of a gradient would be a plain tensor
    *tensors, ctx.gate = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Any, of_hidden: Any) -> Any:
    x, index, weight, up, down, up_bias, down_bias, hidden = ctx.saved_tensors
    if grad is None:
        return (None,) * 8
    if torch.is_grad_enabled():
        return _recorded(grad, x, index, weight, up, down, up_bias, down_bias, ctx.gate)
    given = (x, index, weight, up, down, up_bias, down_bias, hidden, ctx.gate)
    of_x, of_weight, of_up, of_down, *of_biases = torch.ops.dtensor.experts_backward(grad, *given)
    biases = [None if b is None else g for b, g in zip((up_bias, down_bias), of_biases)]
    return of_x, None, of_weight, of_up, of_down, *biases, None


def _recorded(
    grad: Any, x: Any, index: Any, weight: Any, up: Any, down: Any, up_bias: Any, down_bias: Any, gate: str
) -> tuple[Any, ...]:
    """The gradients, such that they can be differentiated again: by operators with derivatives, on a copy of the
    matrices for each token."""
    held = (index >= 0) & (index < up.shape[0])
    flat = (index * held).reshape(-1)
    chosen: list[Any] = [None if m is None else m[flat] for m in (up, down, up_bias, down_bias)]
    rows = x.unsqueeze(1).expand(-1, index.shape[1], -1).reshape(index.numel(), 1, x.shape[1])
    hidden = torch.bmm(rows, chosen[0]).squeeze(1)
    hidden = hidden if up_bias is None else hidden + chosen[2]
    out = torch.bmm(_gate(gate).forward(hidden).unsqueeze(1), chosen[1]).squeeze(1)
    out = out if down_bias is None else out + chosen[3]
    made = (out.view(*index.shape, out.shape[1]) * (weight * held).unsqueeze(-1)).sum(1)
    given = (x, None, weight, up, down, up_bias, down_bias)
    supply = iter(
        torch.autograd.grad(made, [t for t in given if t is not None and t.requires_grad], grad, create_graph=True)
    )
    return *[next(supply) if t is not None and t.requires_grad else None for t in given], None


library.impl("experts", experts, "CompositeExplicitAutograd")
library.impl("experts_backward", experts_backward, "CompositeExplicitAutograd")
torch.library.register_fake("dtensor::experts", _fake, lib=library)
torch.library.register_fake("dtensor::experts_backward", _fake_backward, lib=library)
torch.library.register_autograd("dtensor::experts", _backward, setup_context=_save, lib=library)

__all__ = ["GATES", "Gate", "experts", "experts_backward", "gate_name"]
