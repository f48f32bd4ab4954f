"""Operations and bytes of operators, against torch's own counts, and the same from a graph and from a tape."""

import warnings
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils.flop_counter import FlopCounterMode

from dtensor.parallel.search.recording import record
from dtensor.parallel.search.repeats import steps_of
from dtensor.passes.graph import estimate
from dtensor.prices import operators

aten = torch.ops.aten

CONSTANT = aten.lift_fresh_copy.default
"""What stands in a graph before a tensor that code of the model makes of numbers."""


class Called(nn.Module):
    """Calls a function on tensors; all that it computes leaves it."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, *xs):
        return self.fn(*xs)


def of_tape(fn, xs, training=False):
    """Operations, bytes and kernels of a function as the search counts them."""
    steps = steps_of(record(Called(fn), xs, training=training), alike=False)
    moved = sum([s.count * (sum(s.moved[0]) + sum(s.moved[1])) for s in steps.steps])
    fused = [name(s.like.func) for s in steps.steps if not s.border and operators.is_fused(s.like.func)]
    return sum([s.count * s.flops for s in steps.steps]), moved, sum([s.count * s.launches for s in steps.steps]), fused


def of_graph(fn, xs):
    """The same, as reports count them in a graph."""
    graph = make_fx(fn, tracing_mode="fake")(*xs).graph
    found = estimate.moved(graph)
    fused = [name(n.target) for n in found if operators.is_fused(n.target) and n.target != CONSTANT]
    sums = (sum([s.moved for s in found.values()]), sum([s.launches for s in found.values()]))
    return estimate.flops(graph), *sums, fused


def name(func):
    return func._schema.name


def counted(fn, *xs):
    """Operations by torch's own counter."""
    with FlopCounterMode(display=False) as mode:
        fn(*xs)
    return mode.get_total_flops()


def attended(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 32, requires_grad=True)
image, kernel = torch.randn(2, 3, 8, 8, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
q, k = (torch.randn(2, 4, 32, 16, requires_grad=True) for _ in range(2))


@pytest.mark.parametrize(
    ("fn", "xs"),
    [
        (lambda x, w: x @ w, (x, w)),
        (lambda x, w: F.linear(x, w.t(), w[0]), (x, w)),
        (lambda a, b: a @ b.mT, (q, k)),
        (F.conv2d, (image, kernel)),
        (lambda x: x.relu().sum(), (x,)),
    ],
    ids=["mm", "addmm", "bmm", "convolution", "pointwise"],
)
def test_operations_are_those_of_torchs_counter(fn, xs):
    """In the forward and with its gradients."""
    plain = tuple([t.detach() for t in xs])
    assert of_graph(fn, plain)[0] == of_tape(fn, plain)[0] == counted(fn, *plain)

    def trained(*xs):
        return torch.autograd.grad(fn(*xs).sum(), xs)

    assert of_graph(trained, xs)[0] == counted(trained, *xs)
    weights = nn.ParameterList(xs)

    class Trained(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = weights

        def forward(self, x):
            return fn(*self.weights).sum() + x

    steps = steps_of(record(Trained(), (torch.zeros(()),)))
    assert sum([s.count * s.flops for s in steps.steps]) == counted(trained, *xs)


def test_attention_counts_on_every_device_and_skips_half_if_causal():
    shape = torch.Size((2, 4, 32, 16))
    work = 2 * prod(shape) * 32
    flash = aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_flash_attention_backward.default
    cpu = (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    )
    for forward, backward in (flash, cpu):
        assert operators.flops(forward, [shape] * 3, {}, [shape]) == 2 * work
        assert operators.flops(forward, [shape] * 3, {"is_causal": True}, [shape]) == work
        more = [shape] * 6 if backward is cpu[1] else [shape] * 6 + [None] * 4
        assert operators.flops(backward, [*more, 0.0, False], {}, [shape]) == 5 * work
        assert operators.flops(backward, [*more, 0.0, True], {}, [shape]) == 2.5 * work
    on_gpu = flash[0](*[torch.empty(shape, device="meta")] * 3)
    assert on_gpu[0].shape == shape
    with FlopCounterMode(display=False) as mode:
        flash[0](*[torch.empty(shape, device="meta")] * 3)
    assert mode.get_total_flops() == 2 * work
    keys = torch.Size((2, 4, 32, 8))  # values may be narrower than keys
    assert operators.flops(flash[0], [shape, shape, keys], {}, [shape]) == 1.5 * work
    plain = tuple([t.detach() for t in (q, k, k)])
    assert of_graph(attended, plain)[0] == of_tape(attended, plain)[0] == 2 * work


def test_a_lookup_reads_the_rows_that_it_returns():
    table, rows = torch.randn(1000, 16), torch.arange(4)
    expected = 4 * 8 + 2 * 4 * 16 * 4
    assert of_graph(lambda t, r: F.embedding(r, t), (table, rows))[1] == expected
    assert of_tape(lambda t, r: F.embedding(r, t), (table, rows))[1] == expected


def differences(ops):
    """Operators whose price depends on who asks, and how many were compared."""
    wrong, count = {}, 0
    for op in ops:
        try:
            sample = next(iter(op.sample_inputs("cpu", torch.float32)))
        except (StopIteration, TypeError):
            continue
        places, xs = [], []

        def take(a, places=places, xs=xs):
            if isinstance(a, torch.Tensor):
                xs.append(a.detach())
                return ("tensor", len(xs) - 1)
            return a

        given = [take(a) for a in (sample.input, *sample.args)]

        def fn(*xs, op=op, given=given, sample=sample):
            out = op(
                *[xs[a[1]] if isinstance(a, tuple) and a[:1] == ("tensor",) else a for a in given], **sample.kwargs
            )
            return [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                graph, tape = of_graph(fn, tuple(xs)), of_tape(fn, tuple(xs))
            except Exception:  # it cannot be traced: values decide what it computes, or it takes other tensors
                continue
        count += 1
        if graph[:3] != pytest.approx(tape[:3]) or graph[3] != tape[3]:
            wrong[op.name] = graph, tape
    return wrong, count


def test_a_graph_and_a_tape_say_the_same_of_an_operator():
    wrong, count = differences(op_db[::16])
    assert not wrong
    assert count > 20


@pytest.mark.nightly
def test_a_graph_and_a_tape_say_the_same_of_every_operator():
    wrong, count = differences(op_db)
    assert not wrong
    assert count > 400
