"""Attention block by block: queries and a block of keys and values, each this rank's or what another rank has passed.

    attend(query, key, value, mask, out, lse, …)                  -> out, lse     with one more block
    attend_backward(grad, query, key, value, mask, out, lse, …)   -> the gradients of the three by one block
    join(out, lse, found, by, first, group, low)                  -> out, lse     with what another rank found
    add_rows(x, rows, first, group, low, high)                    -> x            with rows that another rank found

The softmax over blocks is put together from the logsumexp of each: with l = logaddexp(l₁, l₂), the result is
exp(l₁ - l) out₁ + exp(l₂ - l) out₂ (Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023). The
kernels' backward takes the result and the logsumexp of all blocks and then gives the gradients by one.

Which queries and keys these are by their positions follows from the ranks of the groups that split them. The operators
look that up when they run, so every rank traces the same graph, for any length; what a causal mask leaves nothing of is
not computed. Arguments of the first two:

    mask        added to the scores, for these queries and all keys; or None
    is_causal   a query sees the keys up to its own position
    kernel      the aten operator that computes a block
    queries, query_groups    length of all queries, and the groups that split it, one after the other
    query_behind             for each of these groups, of how many ranks before this one the queries are
    first                    where in that rank's queries those given begin
    keys, key_groups, key_behind    as for queries

The last two copy `out`, `lse` and `x` as they are on ranks that are not from `low` up to `high` in the group.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..comm.start_collectives import ANY_ORDER
from ..job.groups import group_rank, group_size
from ..layout.chunks import chunk_length
from ..mesh.operator_library import library
from ..torch_private.core import below_autograd

_SAID = (
    "bool is_causal, float? scale, str kernel, SymInt queries, str[] query_groups, int[] query_behind, SymInt first, "
    "SymInt keys, str[] key_groups, int[] key_behind"
)
library.define(
    f"attend(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? out, Tensor? lse, {_SAID}) "
    "-> (Tensor, Tensor)",
    tags=ANY_ORDER,
)
library.define(
    "attend_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor out, Tensor lse, "
    f"{_SAID}) -> (Tensor, Tensor, Tensor)",
    tags=ANY_ORDER,
)
library.define(
    "join(Tensor out, Tensor lse, Tensor found, Tensor by, SymInt first, str group, int low) -> (Tensor, Tensor)",
    tags=ANY_ORDER,
)
library.define("add_rows(Tensor x, Tensor rows, SymInt first, str group, int low, int high) -> Tensor", tags=ANY_ORDER)

aten: Any = torch.ops.aten

CPU = "_scaled_dot_product_flash_attention_for_cpu"
GPU = "_scaled_dot_product_flash_attention"

ADDED = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Dtype of the operands -> that of results while blocks are added, where it is another."""


def _place(size: int, groups: Sequence[str], behind: Sequence[int]) -> tuple[int, int]:
    """Where in a length the chunk of a rank begins, and how long it is."""
    start = 0
    for group, back in zip(groups, behind, strict=True):
        n = group_size(group)
        k = (group_rank(group) - back) % n
        start += min(k * -(-size // n), size)
        size = chunk_length(size, n, k)
    return start, size


Span = tuple[int, int]
"""Where something begins, and how long it is."""


def _parts(is_causal: bool, rows: Span, columns: Span) -> Iterator[tuple[Span, Span, bool]]:
    """What there is to compute of a block, by rows and columns counted in it, and whether it is causal.

    A causal part is a square: for others kernels do not agree on which key is the first query's own.
    """
    (a, m), (b, n) = rows, columns
    if not is_causal:
        found = [((0, m), (0, n), False)]
    else:
        first = max(a, b)  # queries before see no key of the block
        end = min(a + m, b + n)  # queries from here on see all of them
        found = [
            ((first - a, max(a + m - first, 0)), (0, min(first - b, n)), False),
            ((first - a, end - first), (first - b, end - first), True),
            ((max(end, first) - a, a + m - max(end, first)), (min(first - b, n), max(b + n - first, 0)), False),
        ]
    for part in found:
        if part[0][1] > 0 and part[1][1] > 0:
            yield part


class _Block:
    """A block of queries by keys, and the kernels that compute its parts."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, *said: Any) -> None:
        is_causal, self.scale, self.kernel, queries, query_groups, query_behind, first, *of_keys = said
        self.mask, self.whole = mask, query.shape[2]
        start, length = _place(queries, query_groups, query_behind)
        self.rows = start + first, min(max(length - first, 0), query.shape[2])
        self.columns = _place(*of_keys)
        empty = query.shape[0] * query.shape[1] * key.shape[1] == 0  # kernels divide by the number of heads
        self.parts = [] if empty else list(_parts(is_causal, self.rows, self.columns))

    def of_mask(self, rows: Span, columns: Span) -> torch.Tensor | None:
        """The mask of a part."""
        mask = self.mask
        if mask is None:
            return None
        if mask.dim() > 1 and mask.shape[-2] == self.whole:
            mask = mask.narrow(-2, *rows)
        return mask if mask.shape[-1] == 1 else mask.narrow(-1, self.columns[0] + columns[0], columns[1])

    def forward(
        self, query: Any, key: Any, value: Any, mask: Any, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The result of a part and its logsumexp, which is -inf where a mask leaves nothing."""
        operator = getattr(aten, self.kernel).default
        if self.kernel != CPU:
            return operator(query, key, value, 0.0, is_causal, scale=self.scale)[:2]
        out, lse = operator(query, key, value, 0.0, is_causal, attn_mask=mask, scale=self.scale)
        if mask is None:
            return out, lse
        seen = (mask > -torch.inf).any(-1)  # of a row without any the kernel says 0
        return out, torch.where(seen, lse, -torch.inf)

    def backward(self, of_rows: Sequence[Any], key: Any, value: Any, mask: Any, causal: bool) -> Any:
        """The gradients of queries, keys and values by a part, whose rows have gradients, queries, results and
        logsumexps."""
        grad, query, out, lse = of_rows
        operator = getattr(aten, f"{self.kernel}_backward").default
        if self.kernel == CPU:
            return operator(grad, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=self.scale)
        unused = [torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)]
        lengths = (None, None, query.shape[2], key.shape[2])
        return operator(
            grad, query, key, value, out, lse.contiguous(), *lengths, 0.0, causal, *unused, scale=self.scale
        )


def _wide(x: torch.Tensor) -> torch.dtype:
    """The dtype in which blocks of `x` are added."""
    return ADDED.get(x.dtype, x.dtype)


def _like(x: torch.Tensor, width: Any, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor (batch, heads, length, width) in the order in which kernels write: heads beside features."""
    batch, heads, length, _ = x.shape
    return x.new_empty((batch, length, heads, width), dtype=dtype).transpose(1, 2)


def _lse_like(x: torch.Tensor, kernel: str) -> torch.Tensor:
    """An empty tensor (batch, heads, length) for a logsumexp, as the kernel makes one."""
    batch, heads, length, _ = x.shape
    if kernel == CPU:
        return x.new_empty((batch, length, heads), dtype=_wide(x)).transpose(1, 2)
    return x.new_empty((batch, heads, length), dtype=torch.float32)


def _attend(
    query: Any, key: Any, value: Any, mask: Any, out: Any, lse: Any, *said: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    with below_autograd():
        block = _Block(query, key, mask, *said)
        made, total = _fake_attend(query, key, value, mask, out, lse, *said)
        if out is None and [rows for rows, *_ in block.parts] == [(0, query.shape[2])]:
            ((_, columns, is_causal),) = block.parts
            k, v = (t.narrow(2, *columns) for t in (key, value))
            found, l = block.forward(query, k, v, block.of_mask((0, block.whole), columns), is_causal)
            return made.copy_(found), total.copy_(l)
        made.zero_() if out is None else made.copy_(out)
        total.fill_(-torch.inf) if lse is None else total.copy_(lse)
        for rows, columns, is_causal in block.parts:
            k, v = (t.narrow(2, *columns) for t in (key, value))
            found, l = block.forward(query.narrow(2, *rows), k, v, block.of_mask(rows, columns), is_causal)
            _merge(made.narrow(2, *rows), total.narrow(2, *rows), found, l)
        return made, total


def _merge(out: torch.Tensor, lse: torch.Tensor, found: torch.Tensor, by: torch.Tensor) -> None:
    """Put a part's result, whose logsumexp is `by`, into that of earlier ones."""
    total = torch.logaddexp(lse, by)
    finite = total.masked_fill(total == -torch.inf, 0)
    out.mul_((lse - finite).exp_().unsqueeze(-1)).add_(found * (by - finite).exp_().unsqueeze(-1))
    lse.copy_(total)


def _join(out: Any, lse: Any, found: Any, by: Any, first: int, group: str, low: int) -> Any:
    with below_autograd():
        out, total = out.clone(), lse.clone()
        length = min(out.shape[2] - first, found.shape[2])
        if group_rank(group) >= low and length > 0:
            rows = [t.narrow(2, first, length) for t in (out, total)]
            _merge(*rows, *(t.narrow(2, 0, length) for t in (found, by)))
        return out, total


def _add_rows(x: Any, rows: Any, first: int, group: str, low: int, high: int) -> Any:
    with below_autograd():
        x = x.clone()
        length = min(x.shape[-2] - first, rows.shape[-2])
        if low <= group_rank(group) < high and length > 0:
            x.narrow(-2, first, length).add_(rows.narrow(-2, 0, length))
        return x


def _attend_backward(grad: Any, query: Any, key: Any, value: Any, mask: Any, out: Any, lse: Any, *said: Any) -> Any:
    with below_autograd():
        block = _Block(query, key, mask, *said)
        made = tuple([t.zero_() for t in _fake_backward(grad, query, key, value, mask, out, lse, *said)])
        for rows, columns, is_causal in block.parts:
            of_rows = [t.narrow(2, *rows) for t in (grad, query, out, lse)]
            k, v = (t.narrow(2, *columns) for t in (key, value))
            found = block.backward(of_rows, k, v, block.of_mask(rows, columns), is_causal)
            for whole, span, part in zip(made, (rows, columns, columns), found):
                whole.narrow(2, *span).add_(part)
        return made


def _fake_attend(query: Any, key: Any, value: Any, mask: Any, out: Any, lse: Any, *said: Any) -> Any:
    return _like(query, value.shape[3], _wide(query)), _lse_like(query, said[2])


def _fake_backward(grad: Any, query: Any, key: Any, value: Any, mask: Any, out: Any, lse: Any, *said: Any) -> Any:
    return tuple([_like(t, t.shape[3], _wide(t)) for t in (query, key, value)])


for _name, _kernel, _fake in (
    ("attend", _attend, _fake_attend),
    ("attend_backward", _attend_backward, _fake_backward),
    ("join", _join, lambda out, lse, *rest: (torch.empty_like(out), torch.empty_like(lse))),
    ("add_rows", _add_rows, lambda x, *rest: torch.empty_like(x)),
):
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dtensor::{_name}", _fake, lib=library)

attend: Any = torch.ops.dtensor.attend.default
attend_backward: Any = torch.ops.dtensor.attend_backward.default

join: Any = torch.ops.dtensor.join.default
add_rows: Any = torch.ops.dtensor.add_rows.default

__all__ = ["ADDED", "CPU", "GPU", "add_rows", "attend", "attend_backward", "join"]
