"""Attention kernels that run on GPUs alone: every candidate of their rules by brute force, on stand-ins for them."""

import pytest
import torch
import torch.nn.functional as F
from torch import library

from dtensor.testing.rules.candidates import case as c
from dtensor.testing.rules.candidates import floats as f
from dtensor.testing.rules.candidates import integers as ints
from tests.rules.checking import check

aten = torch.ops.aten
NAME = "_scaled_dot_product_{}_attention"


def scores(q, k, bias):
    found = q @ k.mT * q.shape[-1] ** -0.5
    return found if bias is None else found + bias


def attended(q, k, v, bias):
    """The result, and the logsumexp of each row of scores; queries of several heads may share those of keys."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    found = scores(q, k, bias)
    return found.softmax(-1) @ v, found.logsumexp(-1)


def gradients(grad, q, k, v, out, lse, bias):
    """Those of queries, keys and values, and of the bias; as in the kernels, also by a part of the keys that `out` and
    `lse` are of."""
    heads, shared = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(shared, 1) for t in (k, v))
    p, of_p = (scores(q, k, bias) - lse[..., : q.shape[2], None]).exp(), grad @ v.mT
    of_scores = p * (of_p - (grad * out).sum(-1, keepdim=True))
    of_q, of_k, of_v = of_scores @ k * q.shape[-1] ** -0.5, of_scores.mT @ q * q.shape[-1] ** -0.5, p.mT @ grad
    of_k, of_v = (t.unflatten(1, (heads, shared)).sum(2) for t in (of_k, of_v))
    return of_q, of_k, of_v, None if bias is None else of_scores.sum_to_size(bias.shape)


def efficient(q, k, v, bias, compute_log_sumexp, *rest, **options):
    out, lse = attended(q, k, v, bias)
    seed = torch.zeros((), dtype=torch.int64)
    # The kernel pads its rows.
    return out, F.pad(lse.float(), (0, -lse.shape[-1] % 32)), seed, seed.clone()


def efficient_backward(grad, q, k, v, bias, out, lse, seed, offset, dropout, mask, *rest, **options):
    found = gradients(grad, q, k, v, out, lse, bias)
    return tuple(t if wanted else None for t, wanted in zip(found, mask))


def seen(q, k, is_causal):
    """What is added to scores; a square, as kernels for GPUs mask others from another corner."""
    assert not is_causal or q.shape[2] == k.shape[2]
    return q.new_full((q.shape[2], k.shape[2]), -torch.inf).triu(1) if is_causal else None


def flash(q, k, v, dropout=0.0, is_causal=False, debug=False, **options):
    out, lse = attended(q, k, v, seen(q, k, is_causal))
    seeds = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return out, lse.float(), None, None, q.shape[2], k.shape[2], *seeds, q.new_empty(0)


def flash_backward(grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, is_causal, *seeds, **options):
    return gradients(grad, q, k, v, out, lse, seen(q, k, is_causal))[:3]


def cudnn_backward(grad, q, k, v, out, lse, seed, offset, bias, *rest, **options):
    return gradients(grad, q, k, v, out, lse, bias)[:3]


@pytest.fixture
def stand_ins():
    own = library.Library("aten", "IMPL")
    try:
        own.impl(NAME.format("efficient"), efficient, "CPU")
        own.impl(f"{NAME.format('efficient')}_backward", efficient_backward, "CPU")
        own.impl(NAME.format("flash"), flash, "CPU")
        own.impl(f"{NAME.format('flash')}_backward", flash_backward, "CPU")
        own.impl(f"{NAME.format('cudnn')}_backward", cudnn_backward, "CPU")
        yield
    finally:
        own._destroy()


def backward(kind):
    return getattr(aten, f"{NAME.format(kind)}_backward").default


def calls():
    """With masks that broadcast, and with fewer heads of keys than of queries where the kernel takes them."""
    seed, ends = (ints(9), ints(9)), [torch.zeros(0, dtype=torch.int32)] * 2
    lengths = (*ends, 3, 3, 0.0, False)
    for heads, of_keys in ((6, 6), (8, 4), (6, 1)):
        q, grad, k, v = (f(4, n, 3, 8) for n in (heads, heads, of_keys, of_keys))
        offered = 3 if of_keys > 1 else 2  # nothing, the batch, the heads
        single = [t.float() for t in (q, k, v)]
        for is_causal in (False, True):
            out, lse = attended(*single, seen(*single[:2], is_causal))
            yield c(aten._scaled_dot_product_flash_attention.default, *single, 0.0, is_causal, at_least=offered + 3)
            out, lse = attended(q, k, v, seen(q, k, is_causal))
            rest = (*ends, 3, 3, 0.0, is_causal)
            yield c(backward("flash"), grad, q, k, v, out, lse, *rest, *seed, at_least=offered + 5)
        out, lse = attended(q, k, v, None)
        for bias in [f(*shape) for shape in ((4, heads, 3, 3), (1, heads, 3, 3), (4, 1, 3, 3), (1, 1, 3, 3))]:
            out, lse = attended(q, k, v, bias)
            yield c(backward("cudnn"), grad, q, k, v, out, lse, *seed, bias, *lengths, at_least=offered + 2)
            if heads != of_keys:
                continue
            for given in (None, bias):
                yield c(getattr(aten, NAME.format("efficient")).default, q, k, v, given, True, at_least=3)
            for of_bias in (True, False):
                rest = (bias, out, lse, *seed, 0.0, [True, True, True, of_bias])
                yield c(backward("efficient"), grad, q, k, v, *rest, at_least=5)


@pytest.mark.parametrize("n", [2, 4])
def test_every_candidate_is_right(stand_ins, n):
    check(calls, n)
