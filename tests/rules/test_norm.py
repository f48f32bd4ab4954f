"""Norms: the gradients of weight and bias come in the layout of weight and bias, each by one reduction."""

import pytest
import torch
import torch.nn.functional as F

from dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.testing import CountCollectives, with_threads

BATCH, FEATURES = 4, 6

NORMS = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, (FEATURES,), w, bias=b),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (FEATURES,), weight=w),
    "group_norm": lambda x, w, b: F.group_norm(x.transpose(1, 2), 2, w, b),
    "batch_norm": lambda x, w, b: F.batch_norm(x.flatten(0, 1), None, None, weight=w, bias=b, training=True),
    "instance_norm": lambda x, w, b: F.instance_norm(x.transpose(1, 2), None, None, w, b),
}

R = Replicate()


def run(f, x, w, b):
    """Gradients of weight and bias, and what was communicated in the backward."""
    x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
    out = f(x, w, b)
    seed = torch.linspace(-1, 1, out.numel()).view(out.shape)
    loss = (out * (seed if x.__class__ is torch.Tensor else distribute_tensor(seed, x.device_mesh))).sum()
    with CountCollectives() as counted:
        loss.backward()
    return [t.grad for t in (w, b) if t.grad is not None], [c.op for c in counted.collectives]


@pytest.mark.parametrize("name", NORMS)
@with_threads(4)
def test_gradients_come_home(rank, name):
    f = NORMS[name]
    drawn = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(s, generator=drawn) for s in ((BATCH, 5, FEATURES), (FEATURES,), (FEATURES,)))
    expected, _ = run(f, x, w, b)
    mesh = init_device_mesh("cpu", (2, 2))
    cut = [Shard(0), R if name in ("group_norm", "batch_norm", "instance_norm") else Shard(1)]
    weights = [[R, R]] if name == "batch_norm" else [[R, R], [R, Shard(0)]]
    for places in weights:
        found, ops = run(f, *(distribute_tensor(t, mesh, p) for t, p in ((x, cut), (w, places), (b, places))))
        assert [g.placements for g in found] == [tuple(places)] * len(expected)
        for a, e in zip(found, expected, strict=True):
            torch.testing.assert_close(a.full_tensor(), e)
        if places == [R, R] and name in ("layer_norm", "rms_norm", "group_norm"):
            assert ops == ["all_reduce"] * len(expected)


@with_threads(2)
def test_what_a_weight_is_computed_from_gets_its_gradient_there(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])
    scale = distribute_tensor(torch.zeros(6), mesh, [Shard(0)]).requires_grad_()
    with CountCollectives() as counted:
        F.rms_norm(x, (6,), (1 + scale).redistribute(placements=[R])).sum().backward()
    assert scale.grad is not None
    assert scale.grad.placements == (Shard(0),)
    whole = x.full_tensor()
    expected = (whole * (whole.square().mean(1, keepdim=True) + torch.finfo(torch.float32).eps).rsqrt()).sum(0)
    torch.testing.assert_close(scale.grad.full_tensor(), expected)
    assert [c.op for c in counted.collectives] == ["all_gather", "all_reduce"]
