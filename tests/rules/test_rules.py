"""Every candidate of every rule, by brute force: shards and parts in, the operator on each rank, the pieces joined.

Soundness: whatever a rule allows on one mesh axis gives the dense result, for cuts that divide and cuts that do not.
Completeness, for a smaller table: whatever it refuses is wrong, or stands in `REFUSED` with the reason.
"""

import itertools

import pytest
import torch

from dtensor.rules.rule import candidates
from dtensor.testing.rules.candidates import (
    REDUCE,
    Case,
    OneAxis,
    State,
    as_list,
    call_and_rule,
    cut,
    is_right,
    mapped,
    tensors,
)
from dtensor.testing.rules.candidates import booleans as mask
from dtensor.testing.rules.candidates import case as c
from dtensor.testing.rules.candidates import floats as f
from dtensor.testing.rules.candidates import integers as ints
from tests.rules.checking import check

aten = torch.ops.aten


def pointwise_cases():
    x, y, b, row = f(5, 6), f(5, 6), f(5, 1), f(6)
    yield from [c(op, x, y, at_least=5) for op in (aten.add.Tensor, aten.sub.Tensor)]
    yield c(aten.add.Tensor, x, row, at_least=5, alpha=2)
    yield c(aten.mul.Tensor, x, b, at_least=7)
    yield c(aten.mul.Tensor, f(1, 6), b, at_least=7)
    yield c(aten.div.Tensor, x, row, at_least=5)
    yield c(aten.div.Tensor_mode, x, y, rounding_mode="floor")
    yield c(aten.div.Tensor, torch.tensor(2.0, dtype=torch.float64), x)
    yield from [
        c(op, x, at_least=3) for op in (aten.relu.default, aten.gelu.default, aten.silu.default, aten.exp.default)
    ]
    yield from [c(op, x, at_least=5) for op in (aten.neg.default, aten.clone.default)]
    yield c(aten.add.Scalar, x, 2.0, at_least=3)
    yield c(aten.mul.Scalar, x, 2.0, at_least=5)
    yield c(aten.pow.Tensor_Scalar, x, 2, at_least=3)
    yield c(aten.where.self, mask(5, 6), x, row, at_least=5)
    yield c(aten.masked_fill.Scalar, x, mask(5, 6), 0, at_least=5)
    yield c(aten.masked_fill.Scalar, x, mask(6), float("-inf"), at_least=3)
    yield c(aten.masked_fill.Tensor, x, mask(5, 6), f(), at_least=5)
    yield c(aten.lerp.Scalar, x, y, 0.3, at_least=5)
    yield c(aten.lerp.Tensor, x, y, f(6), at_least=3)
    yield c(aten.addcmul.default, x, y, row, at_least=7, value=0.5)
    yield c(aten.addcdiv.default, x, y, row, at_least=5, value=0.5)
    yield c(aten.maximum.default, x, row, at_least=3)
    yield c(aten.max.other, x, row, at_least=3)
    yield c(aten.clamp.default, x, 0.6, 0.9, at_least=3)
    yield c(aten.eq.Tensor, x, y, at_least=3)
    yield c(aten._to_copy.default, f(5, 6).float(), at_least=5, dtype=torch.float64)
    yield c(aten._to_copy.default, x, at_least=3, dtype=torch.bfloat16)
    yield from [c(op, x, y, at_least=5) for op in (aten.gelu_backward.default, aten.silu_backward.default)]
    yield c(aten.threshold_backward.default, x, y - 1, 0, at_least=5)
    yield c(aten.native_dropout_backward.default, x, mask(5, 6), 2.0, at_least=5)
    yield c(aten.add_.Tensor, x, row, at_least=5)
    yield c(aten.mul_.Tensor, x, row, at_least=5)
    yield c(aten.copy_.default, x, row, at_least=5)
    yield c(aten.zero_.default, x, at_least=3)
    yield c(aten.fill_.Scalar, x, 3.0, at_least=3)
    yield from [c(op, x, at_least=3) for op in (aten.zeros_like.default, aten.ones_like.default)]
    yield c(aten.full_like.default, x, 3.0, at_least=3)
    yield c(aten.new_zeros.default, x, [5, 6], at_least=3)
    yield c(aten.new_ones.default, x, [7])
    yield c(aten.new_full.default, x, [5, 6], 2.0, at_least=3)
    yield c(aten.add.Tensor, f(1, 3), f(1, 3), at_least=5)


def matmul_cases():
    yield c(aten.mm.default, f(5, 6), f(6, 3), at_least=8)
    yield c(aten.bmm.default, f(4, 5, 6), f(4, 6, 3), at_least=9)
    yield c(aten.mv.default, f(5, 6), f(6), at_least=7)
    yield c(aten.dot.default, f(5), f(5), at_least=6)
    for bias in (f(3), f(5, 3), f(1, 3), f(5, 1), f()):
        yield c(aten.addmm.default, bias, f(5, 6), f(6, 3), at_least=8, beta=0.5, alpha=2)
    yield c(aten.baddbmm.default, f(4, 5, 3), f(4, 5, 6), f(4, 6, 3), at_least=9)
    yield c(aten.addmv.default, f(5), f(5, 6), f(6), at_least=7)
    yield from [c(aten.addmv.default, bias, f(2, 6), f(6), at_least=7) for bias in (f(), f(1))]


def reduction_cases():
    x = f(5, 6, 2)
    for op in (aten.sum, aten.mean):
        yield c(op.default, x, at_least=6)
        for dim, keep in itertools.product(([0], [-1], [0, 2]), (False, True)):
            yield c(op.dim if op is aten.mean else op.dim_IntList, x, dim, keep, at_least=6)
    for op in (aten.amax, aten.amin):
        yield c(op.default, x, [1], at_least=4)
        yield c(op.default, x, [0, 1], True, at_least=4)
        yield c(op.default, x, at_least=4)
        yield c(op.default, f(1, 3), [0], at_least=3)
    yield from [c(op, x, at_least=4) for op in (aten.max.default, aten.min.default, aten.prod.default)]
    yield c(aten.max.default, f(1), at_least=2)
    yield c(aten.prod.dim_int, x, 0, at_least=4)
    yield c(aten.max.dim, x, 1, at_least=3)
    yield c(aten.argmax.default, x, 0, at_least=3)
    yield c(aten.argmax.default, x)
    yield c(aten.any.dim, mask(5, 6), 0, at_least=2)
    yield c(aten.all.default, mask(5, 6))
    yield c(aten.count_nonzero.dim_IntList, mask(5, 6).double(), [0], at_least=3)
    for keep in (False, True):
        yield c(aten.var.correction, x, [1], at_least=3, correction=1, keepdim=keep)
        yield c(aten.logsumexp.default, x, [2], keep, at_least=3)
    yield c(aten.var_mean.correction, x, [0], at_least=3)
    yield c(aten.var.correction, x)
    for op in (aten._softmax, aten._log_softmax):
        yield c(op.default, x, -1, False, at_least=3)
    for op in (aten._softmax_backward_data, aten._log_softmax_backward_data):
        yield c(op.default, x, f(5, 6, 2), 1, torch.float64, at_least=5)
    yield c(aten.cumsum.default, x, 1, at_least=5)
    yield c(aten.flip.default, x, [0, -1], at_least=4)
    yield c(aten.roll.default, x, [1], [1], at_least=5)
    yield c(aten.roll.default, x, [1])
    yield c(aten.sort.default, x, 0, at_least=3)
    yield c(aten.topk.default, x, 2, 1, at_least=3)


def norm_cases():
    x, w, b = f(5, 4, 6), f(6), f(6)
    mean, rstd = x.mean(-1, True), 1 / x.std(-1, keepdim=True)
    yield c(aten.native_layer_norm.default, x, [6], w, b, 1e-5, at_least=3)
    yield c(aten.native_layer_norm.default, x, [4, 6], None, None, 1e-5, at_least=2)
    yield c(aten._fused_rms_norm.default, x, [6], w, 1e-5, at_least=3)
    backward = aten.native_layer_norm_backward.default
    yield c(backward, f(5, 4, 6), x, [6], mean, rstd, w, b, [True, True, True], at_least=5)
    yield c(backward, f(5, 4, 6), x, [6], mean, rstd, w, None, [True, True, False], at_least=5)
    for wanted in ([True, False, True], [False, True, True], [True, False, False]):
        yield c(backward, f(5, 4, 6), x, [6], mean, rstd, w, b, wanted, at_least=5)


def view_cases():
    x = f(4, 6, 1, 5)
    for shape in ([24, 5], [4, 2, 3, 5], [4, 30], [4, 6, 5], [2, 2, 6, 5], [8, 3, 5], [6, 4, 5]):
        yield c(aten.view.default, x, shape, at_least=4)
    yield c(aten._unsafe_view.default, x, [24, 5], at_least=4)
    yield c(aten.view.dtype, f(4, 6), torch.int64, at_least=3)
    yield c(aten.view.dtype, f(4, 6), torch.int32, at_least=2)
    yield c(aten.view.dtype, f(4, 6), torch.complex128, at_least=2)
    yield c(aten.t.default, f(5, 6), at_least=5)
    yield c(aten.transpose.int, x, 0, -1, at_least=7)
    yield c(aten.permute.default, x, [3, 0, 2, 1], at_least=7)
    yield c(aten.unsqueeze.default, x, -1, at_least=7)
    yield from [c(op, *a, at_least=5) for op, *a in ((aten.squeeze.default, x), (aten.squeeze.dim, x, 2))]
    yield c(aten.squeeze.dim, f(2, 3), 0, at_least=5)
    yield c(aten.squeeze.default, f(2, 3), at_least=5)
    yield c(aten.squeeze.dims, x, [0, 2], at_least=5)
    yield c(aten.expand.default, f(5, 1), [3, 5, 6], at_least=4)
    yield c(aten.select.int, x, 1, 2, at_least=6)
    yield c(aten.slice.Tensor, x, 1, 1, 4, at_least=6)
    yield c(aten.slice.Tensor, x, 1, 0, 9223372036854775807, at_least=7)
    yield c(aten.slice_backward.default, f(4, 3), [4, 6], 1, 1, 4, 1, at_least=4)
    yield c(aten.slice_backward.default, f(4, 6), [4, 6], 1, 0, 9223372036854775807, 1, at_least=5)
    yield c(aten.select_backward.default, f(4), [4, 6], 1, 2, at_least=4)
    yield c(aten.split.Tensor, x, 4, 1, at_least=6)
    yield c(aten.split_with_sizes.default, x, [2, 4], 1, at_least=6)
    yield c(aten.split_with_sizes.default, x, [6], 1, at_least=6)
    yield c(aten.unbind.int, f(5, 6), 1, at_least=4)
    yield c(aten.cat.default, [f(5, 2), f(5, 3), f(5, 4)], 1, at_least=4)
    yield c(aten.stack.default, [f(5, 2), f(5, 2)], 1, at_least=5)
    yield c(aten.diagonal.default, f(5, 6), at_least=3)
    yield from [c(op, f(5, 6, 4), at_least=4) for op in (aten.tril.default, aten.triu.default)]
    yield c(aten.constant_pad_nd.default, f(5, 6), [1, 2], at_least=4)
    yield from [c(aten.constant_pad_nd.default, f(5, 6, 2), [0, 0, -1, 2], x, at_least=3) for x in (3.0, -2.0)]


def indexing_cases():
    table, ids = f(7, 6), ints(7, 5, 3)
    yield c(aten.embedding.default, table, ids, at_least=7)
    yield c(aten.embedding.default, table, ids, 2, at_least=7)
    for freq in (False, True):
        yield c(aten.embedding_dense_backward.default, f(5, 3, 6), ids, 7, 2, freq, at_least=4 if freq else 6)
    yield c(aten.index_select.default, table, 0, ints(7, 5), at_least=5)
    yield c(aten.index_select.default, table, 0, torch.tensor(3), at_least=4)
    yield c(aten.gather.default, f(5, 6), 1, ints(6, 5, 4), at_least=5)
    yield c(aten.gather.default, f(5, 6), 1, ints(6, 3, 4), at_least=4)
    yield c(aten.scatter_add.default, f(5, 6), 1, ints(6, 5, 4), f(5, 4), at_least=4)
    yield c(aten.scatter.value, f(5, 6), 1, ints(6, 5, 4), 2.0, at_least=2)
    yield c(aten.scatter.src, f(5, 6), 1, torch.arange(4).expand(5, 4).contiguous(), f(5, 4), at_least=4)
    for include in (True, False):
        args = (f(5, 6), 1, ints(6, 5, 4), f(5, 4), "sum")
        yield c(aten.scatter_reduce.two, *args, at_least=5 if include else 4, include_self=include)
    yield c(aten.scatter_reduce.two, f(5, 6), 1, ints(6, 5, 4), f(5, 4), "amax", at_least=2)
    yield c(aten.index_fill.int_Tensor, f(5, 6), 1, torch.tensor([1, 4]), f(), at_least=4)
    yield c(aten.index_add.default, f(5, 6), 1, ints(6, 4), f(5, 4), at_least=4)


def loss_cases():
    scores, target, weight = f(5, 4), ints(4, 5), f(4)
    target[1] = -100
    for reduction, w in itertools.product((0, 1, 2), (None, weight)):
        yield c(aten.nll_loss_forward.default, scores, target, w, reduction, -100, at_least=3)
        grad = f(5) if reduction == 0 else f()
        total = torch.tensor(2.5, dtype=torch.float64)
        yield c(aten.nll_loss_backward.default, grad, scores, target, w, reduction, -100, total, at_least=5)
        yield c(aten.nll_loss2d_forward.default, f(5, 4, 2, 3), ints(4, 5, 2, 3), w, reduction, -100, at_least=5)
    for reduction in (0, 1, 2):
        grad = f(5, 4) if reduction == 0 else f()
        yield c(aten.mse_loss.default, scores, f(5, 4), reduction, at_least=3)
        yield c(aten.mse_loss_backward.default, grad, scores, f(5, 4), reduction, at_least=7)
        yield c(aten.smooth_l1_loss.default, scores, f(5, 4), reduction, at_least=3)
        yield c(aten.huber_loss_backward.default, grad, scores, f(5, 4), reduction, 1.0, at_least=5)


def attention_cases():
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    for batch, heads, causal, shape in (
        (5, 6, True, None),
        (4, 5, False, (4, 5, 3, 3)),
        (4, 6, False, (1, 6, 3, 3)),
        (4, 3, False, (3, 3)),
        (1, 4, True, None),
    ):
        q, k, v, grad = (f(batch, heads, 3, 8) for _ in range(4))
        bias = None if shape is None else f(*shape)
        yield c(flash, q, k, v, 0.0, causal, at_least=3, attn_mask=bias)
        out, lse = flash(q, k, v, 0.0, causal, attn_mask=bias)
        yield c(backward, grad, q, k, v, out, lse, 0.0, causal, at_least=5, attn_mask=bias)


GROUPS = [
    pointwise_cases,
    matmul_cases,
    reduction_cases,
    norm_cases,
    view_cases,
    indexing_cases,
    loss_cases,
    attention_cases,
]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("group", GROUPS)
def test_every_candidate_is_right(group, n):
    check(group, n)


REFUSED = {
    ("aten.native_layer_norm.default", (None, "sum", "sum")): "linear in the parameters, but the statistics are not",
}
"""(operator, operand states) -> why a right combination is not among the candidates."""


def states_of(x: torch.Tensor) -> list[State]:
    return [None, *range(x.dim())] + (["sum"] if x.dtype.is_floating_point else [])


def refusal_cases():
    x = f(4, 6)
    yield c(aten.add.Tensor, x, f(4, 6))
    yield c(aten.add.Tensor, x, f(6))
    yield c(aten.mul.Tensor, x, f(4, 1))
    yield c(aten.div.Tensor, x, f(4, 6))
    yield c(aten.add.Scalar, x, 1.5)
    yield from [c(op, x - 1) for op in (aten.relu.default, aten.gelu.default, aten.neg.default)]
    yield c(aten.where.self, mask(4, 6), x, f(4, 6))
    yield c(aten.mm.default, x, f(6, 8))
    yield c(aten.addmm.default, f(8), x, f(6, 8))
    yield c(aten.bmm.default, f(2, 4, 6), f(2, 6, 8))
    yield from [
        c(op, x, [1]) for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.logsumexp.default)
    ]
    yield c(aten.prod.dim_int, x, 1)
    yield c(aten.var.correction, x, [1])
    yield c(aten._softmax.default, x, 1, False)
    yield c(aten._softmax_backward_data.default, x, f(4, 6), 1, torch.float64)
    yield c(aten.cumsum.default, x, 1)
    yield c(aten.native_layer_norm.default, x, [6], f(6), f(6), 1e-5)
    yield c(aten.transpose.int, f(2, 4, 6), 0, 2)
    yield c(aten.unsqueeze.default, x, 1)
    yield c(aten.tril.default, f(2, 4, 4))
    yield c(aten.cat.default, [x, f(4, 2)], 1)
    yield c(aten.embedding.default, x, ints(4, 2, 8))
    yield c(aten.gather.default, x, 1, ints(6, 4, 2))


def works(case: Case, states, n: int, dense: list) -> bool:
    """Whether the plain operator on the pieces gives, rank by rank, pieces of every dense output in some state."""
    pieces = [cut(x, s, n) for x, s in zip(tensors((case.args, case.kwargs)), states)]
    locals_ = []
    for rank in range(n):
        supply = iter([p[rank] for p in pieces])
        try:
            locals_.append(as_list(case.func(*mapped(case.args, lambda _, s=supply: next(s)), **case.kwargs)))
        except (RuntimeError, IndexError):
            return False
    return all(
        any(is_right([r[i] for r in locals_], s, out) for s in [None, *range(out.dim()), *REDUCE])
        for i, out in enumerate(dense)
    )


def test_what_is_refused_is_wrong_or_has_a_reason():
    torch.manual_seed(0)
    seen = set()
    for case in refusal_cases():
        _, rule = call_and_rule(case, OneAxis(2))
        allowed = {found.inputs for found in candidates(rule)}
        dense = as_list(case.func(*case.args, **case.kwargs))
        operands = tensors((case.args, case.kwargs))
        for states in itertools.product(*map(states_of, operands)):
            if states not in allowed and works(case, states, 2, dense):
                seen.add((str(case.func), states))
    assert seen == set(REFUSED)
