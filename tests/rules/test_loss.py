"""Losses: every candidate by brute force, with and without a reduction."""

import pytest
import torch

from dtensor import Shard, distribute_tensor, init_device_mesh
from dtensor.testing import with_threads
from dtensor.testing.rules.candidates import case as c
from dtensor.testing.rules.candidates import floats as f
from dtensor.testing.rules.candidates import integers as ints
from tests.rules.checking import check

aten = torch.ops.aten


def elementwise_cases():
    x, y = f(5, 4) / 2, f(5, 4) / 2
    for reduction in (0, 1, 2):
        grad = f(5, 4) if reduction == 0 else f()
        for weight in (None, f(5, 4), f(4)):
            yield c(aten.binary_cross_entropy.default, x, y, weight, reduction, at_least=3)
            yield c(aten.binary_cross_entropy_backward.default, grad, x, y, weight, reduction, at_least=5)
        yield c(aten.binary_cross_entropy_with_logits.default, x, y, None, f(4), reduction, at_least=3)
        yield c(aten.soft_margin_loss.default, x, y, reduction, at_least=3)
        yield c(aten.soft_margin_loss_backward.default, grad, x, y, reduction, at_least=5)
        yield c(aten.mse_loss.default, x, y, reduction, at_least=3)
        yield c(aten.l1_loss.default, x, y, reduction, at_least=3)
        for way in (grad, f(5, 4)):  # the second: where a gradient is differentiated again
            yield c(aten.mse_loss_backward.default, way, x, y, reduction, at_least=5)
            yield c(aten.smooth_l1_loss_backward.default, way, x, y, reduction, 0.3, at_least=5)
            yield c(aten.huber_loss_backward.default, way, x, y, reduction, 0.3, at_least=5)


def margin_cases():
    for samples in ((5,), (1,)):
        x, y = f(*samples, 4), ints(4, *samples)
        many = torch.tensor([[0, 2, -1, -1]]).expand(*samples, 4).contiguous()
        for reduction in (0, 1, 2):
            grad = f(*samples) if reduction == 0 else f()
            for weight in (None, f(4)):
                yield c(aten.multi_margin_loss.default, x, y, 1, 1.0, weight, reduction, at_least=2)
                yield c(aten.multi_margin_loss_backward.default, grad, x, y, 1, 1.0, weight, reduction, at_least=4)
            yield c(aten.multilabel_margin_loss_forward.default, x, many, reduction, at_least=2)
            is_target = aten.multilabel_margin_loss_forward.default(x, many, reduction)[1]
            backward = aten.multilabel_margin_loss_backward.default
            yield c(backward, grad, x, many, reduction, is_target, at_least=4)
    yield c(aten.multi_margin_loss.default, f(4), torch.tensor(2), 1, 1.0, None, 1)


def class_cases():
    x = f(5, 4)
    for dim in (0, 1):
        yield c(aten._log_softmax.default, x, dim, False, at_least=3)
        yield c(aten._log_softmax_backward_data.default, x, x.log_softmax(dim), dim, x.dtype, at_least=5)
    yield c(aten._log_softmax.default, f(), 0, False)
    yield c(aten._log_softmax.default, f(6), -1, False, at_least=2)
    yield c(aten._log_softmax_backward_data.default, f(6), f(6).log_softmax(0), -1, torch.float64, at_least=4)
    target = torch.tensor([0, 3, 1, -100, 2])
    for reduction in (0, 1, 2):
        grad, total = (f(5) if reduction == 0 else f()), torch.tensor(3.5, dtype=torch.float64)
        for weight in (None, f(4)):
            space = grad[:, None, None].expand(5, 2, 3).contiguous() if reduction == 0 else grad
            wide, many = f(5, 4, 2, 3), target[:, None, None].expand(5, 2, 3).contiguous()
            backward = aten.nll_loss2d_backward.default
            yield c(backward, space, wide, many, weight, reduction, -100, total, at_least=7)
            yield c(aten.nll_loss_forward.default, f(4), torch.tensor(2), weight, reduction, -100, at_least=2)


def infinite_cases():
    """Classes that cannot be, and samples of which none counts."""
    x, target, none = f(5, 4), torch.tensor([1, 2, 1, -100, 2]), torch.full((5,), -100)
    x[:, [0, 3]] = float("-inf")
    zero = torch.zeros((), dtype=torch.float64)
    for reduction in (0, 1, 2):
        yield c(aten.nll_loss_forward.default, x, target, None, reduction, -100, at_least=3)
        yield c(aten.nll_loss_forward.default, x, none, f(4), reduction, -100, at_least=3)
        grad = f(5) if reduction == 0 else f()
        yield c(aten.nll_loss_backward.default, grad, x, none, None, reduction, -100, zero, at_least=5)


def linear_cases():
    x, rows = f(5, 3), torch.tensor([0, 3, 1, -1, 2])
    forward, backward = torch.ops.dtensor.linear_lse.default, torch.ops.dtensor.linear_lse_backward.default
    for classes in (4, 6):
        w = f(classes, 3)
        for bias in (None, f(classes)):
            yield c(forward, x, w, bias, rows, -1, 2, at_least=3)
            lse, _ = forward(x, w, bias, rows, -1, 2)
            yield c(backward, f(5), f(5), x, w, bias, rows, -1, lse, 2, at_least=5)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("group", [elementwise_cases, margin_cases, class_cases, infinite_cases, linear_cases])
def test_every_candidate_is_right(group, n):
    check(group, n)


@pytest.mark.parametrize("dim", [0, 1])
@with_threads(2)
def test_narrow_numbers_stay_so_and_are_summed_as_wide_ones(rank, dim):
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(24.0).reshape(4, 6).sin().bfloat16().requires_grad_()
    grad = torch.arange(24.0).reshape(4, 6).cos().bfloat16()
    placed = distribute_tensor(x.detach(), mesh, [Shard(dim)]).requires_grad_()
    expected, found = x.log_softmax(dim), placed.log_softmax(dim)
    expected.backward(grad)
    found.backward(distribute_tensor(grad, mesh, [Shard(dim)]))
    assert (found.dtype, found.placements) == (torch.bfloat16, (Shard(dim),))
    assert found._local_tensor.dtype == placed.grad._local_tensor.dtype == torch.bfloat16
    close = {"rtol": 0.01, "atol": 0.01}
    torch.testing.assert_close(found.full_tensor(), expected, **close)
    torch.testing.assert_close(placed.grad.full_tensor(), x.grad, **close)
