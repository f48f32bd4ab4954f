"""What kernels read and write, against the bytes that Inductor counts for those that it makes."""

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config, metrics
from torch.fx.experimental.proxy_tensor import make_fx

from dtensor.passes.graph import estimate

x, y, w, b = torch.randn(512, 1024), torch.randn(512, 1024), torch.randn(1024, 1024), torch.randn(1024)
table, rows = torch.randn(1000, 64), torch.arange(300) * 7 % 1000


def backward(g, x):
    made = torch.ops.aten.gelu_backward(g, x)
    return made, made.sum(0)


def residual(x, y, w):
    both = x + y
    return F.relu(both @ w) + both


CASES = {
    "softmax": (lambda x: x.softmax(1), (x,), 1.0),
    "norm": (lambda x, b: F.layer_norm(x, (1024,), b, b), (x, b), 1.0),
    "norm between products": (lambda x, w, b: F.layer_norm(x @ w, (1024,), b, b) @ w, (x, w, b), 1.0),
    "cast and scale": (lambda x: x.to(torch.bfloat16) * 2, (x,), 1.0),
    "casts for a product": (lambda x, w: x.to(torch.bfloat16) @ w.to(torch.bfloat16), (x, w), 1.0),
    "clone and add": (lambda x, y: x.t().clone() + y.t(), (x, y), 1.0),
    "lookup": (lambda t, r: F.embedding(r, t) * 2, (table, rows), 1.0),
    "product, relu, residual": (lambda x, w, y: (x @ w).relu() + y, (x, w, y), 1.0),
    "residual across a product": (residual, (x, y, w), 1.0),
    "mean of squares": (lambda x: x.square().mean(), (x,), 1.0),
    "sum over rows": (backward, (x, y), 0.75),
    "concatenation": (lambda x, y: torch.cat([x, y]) * 2, (x, y), 0.5),
    "cross entropy": (lambda x: F.cross_entropy(x, torch.zeros(512, dtype=torch.long)), (x,), 0.5),
}
"""What is computed -> how, from what, and our bytes as a part of Inductor's: on CPUs it reads a result again that it
sums over rows, multiplies what it concatenated in a kernel of its own, and reads logits twice."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_inductors_kernels(name):
    fn, given, part = CASES[name]
    torch._dynamo.reset()
    metrics.reset()
    torch._logging.set_logs(inductor_metrics=True)
    try:
        with config.patch(force_disable_caches=True):
            torch.compile(fn)(*given)
    finally:
        torch._logging.set_logs()
    graph = make_fx(fn, tracing_mode="fake")(*given).graph
    moved = sum([share.moved for share in estimate.moved(graph).values()])
    assert moved == pytest.approx(part * metrics.num_bytes_accessed, rel=1e-2)
