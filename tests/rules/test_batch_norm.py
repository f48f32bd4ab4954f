"""Batch and group norm: every candidate by brute force, and the running statistics, which the operators write."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dtensor import Partial, Replicate, Shard, distribute_module, distribute_tensor
from dtensor.testing import with_threads
from dtensor.testing.rules.candidates import case as c
from dtensor.testing.rules.candidates import floats as f
from tests.rules.checking import check

aten = torch.ops.aten


def batch_norm_cases():
    x, w, b, mean, var = f(5, 4, 3), f(4), f(4), f(4), f(4)
    # Nothing, channels, batch, space.
    for training in (True, False):
        yield c(aten.native_batch_norm.default, x, w, b, mean, var, training, 0.1, 1e-5, at_least=4)
        yield c(aten._native_batch_norm_legit.default, x, w, None, mean, var, training, 0.1, 1e-5, at_least=4)
        functional = aten._native_batch_norm_legit_functional.default
        yield c(functional, x, w, b, mean, var, training, 0.1, 1e-5, at_least=4)
    yield c(aten._native_batch_norm_legit.no_stats, x, None, None, True, 0.1, 1e-5, at_least=4)
    yield c(aten._native_batch_norm_legit_no_training.default, x, w, b, mean, var, 0.1, 1e-5, at_least=4)
    yield c(aten._batch_norm_with_update.default, x, w, b, mean, var, 0.1, 1e-5, at_least=4)
    yield c(aten._batch_norm_with_update_functional.default, x, w, b, mean, var, 0.1, 1e-5, at_least=4)
    yield c(aten._batch_norm_no_update.default, x, w, b, mean, var, 0.1, 1e-5, at_least=4)
    _, saved, rstd = aten.native_batch_norm.default(x, w, b, None, None, True, 0.1, 1e-5)
    backward = aten.native_batch_norm_backward.default
    for mask in ([True, True, True], [True, False, False], [False, True, True]):
        yield c(backward, f(5, 4, 3), x, w, mean, var, saved, rstd, True, 1e-5, mask, at_least=6)
        yield c(backward, f(5, 4, 3), x, w, mean, var, f(0), f(0), False, 1e-5, mask, at_least=6)
        general, nothing = aten.batch_norm_backward.default, torch.zeros(0, dtype=torch.uint8)
        yield c(general, f(5, 4, 3), x, w, mean, var, saved, rstd, True, 1e-5, mask, nothing, at_least=6)


def batch_norm_of_images_cases():
    """Two dimensions of space, and none; parameters of which some are missing."""
    w, b, mean, var = f(4), f(4), f(4), f(4)
    for shape, kept in (((5, 4, 2, 3), 5), ((5, 4), 3), ((1, 4, 5), 4), ((2, 4), 3)):
        x = f(*shape)
        for training in (True, False):
            for weight, bias in ((w, b), (w, None), (None, None)):
                yield c(aten.native_batch_norm.default, x, weight, bias, mean, var, training, 0.1, 1e-5, at_least=kept)
        _, saved, rstd = aten.native_batch_norm.default(x, w, b, None, None, True, 0.1, 1e-5)
        backward = aten.native_batch_norm_backward.default
        for weight in (w, None):
            given = (mean, var, saved, rstd, True, 1e-5, [True, True, True])
            yield c(backward, f(*shape), x, weight, *given, at_least=kept + 2)


def group_norm_cases():
    for groups, channels, at_least in ((6, 12, 3), (1, 4, 2), (4, 4, 3)):
        x, w, b = f(5, channels, 3, 2), f(channels), f(channels)
        sizes = (5, channels, 6, groups)
        yield c(aten.native_group_norm.default, x, w, b, *sizes, 1e-5, at_least=at_least)
        yield c(aten.native_group_norm.default, x, None, None, *sizes, 1e-5, at_least=at_least)
        _, mean, rstd = aten.native_group_norm.default(x, w, b, *sizes, 1e-5)
        backward = aten.native_group_norm_backward.default
        for mask in ([True, True, True], [True, False, False]):
            yield c(backward, f(*x.shape), x, mean, rstd, w, *sizes, mask, at_least=at_least + 2)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("group", [batch_norm_cases, batch_norm_of_images_cases, group_norm_cases])
def test_every_candidate_is_right(group, n):
    check(group, n)


def batch():
    return torch.sin(torch.arange(5 * 4 * 3.0)).reshape(5, 4, 3) * 3 + 1


@with_threads(3)
def test_running_statistics_are_those_of_the_whole_batch(rank):
    mesh = init_device_mesh("cpu", (3,))
    x, dense, placed = batch(), nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    distribute_module(placed, mesh)
    for placement in (Shard(0), Shard(2), Replicate()):
        expected, found = dense(x), placed(distribute_tensor(x, mesh, [placement]))
        assert found.placements == (placement,)
        torch.testing.assert_close(found.full_tensor(), expected)
        torch.testing.assert_close(placed.running_mean.full_tensor(), dense.running_mean)
        torch.testing.assert_close(placed.running_var.full_tensor(), dense.running_var)
        assert placed.num_batches_tracked.full_tensor() == dense.num_batches_tracked


@with_threads(2)
def test_statistics_sharded_by_channel_stay_so(rank):
    mesh = init_device_mesh("cpu", (2,))
    mean, var = torch.zeros(4), torch.ones(4)
    placed = [distribute_tensor(t, mesh, [Shard(0)]) for t in (mean, var)]
    out = F.batch_norm(distribute_tensor(batch(), mesh, [Replicate()]), *placed, training=True)
    torch.testing.assert_close(out.full_tensor(), F.batch_norm(batch(), mean, var, training=True))
    assert out.placements == (Shard(1),)
    assert [t.placements for t in placed] == [(Shard(0),), (Shard(0),)]
    torch.testing.assert_close(placed[0].full_tensor(), mean)
    torch.testing.assert_close(placed[1].full_tensor(), var)


@with_threads(2)
def test_running_statistics_keep_their_layout(rank):
    """They are written in the layout that the operator runs in, and moved back."""
    mesh = init_device_mesh("cpu", (2,))
    expected = [torch.zeros(4), torch.ones(4)]
    F.batch_norm(batch(), *expected, training=True)
    mean = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    var = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    F.batch_norm(distribute_tensor(batch(), mesh, [Shard(0)]), mean, var, training=True)
    assert (mean.placements, var.placements) == ((Shard(0),), (Replicate(),))
    for found, wanted in zip((mean, var), expected):
        torch.testing.assert_close(found.full_tensor(), wanted)


@with_threads(2)
def test_evaluation_communicates_nothing_and_gives_partial_gradients(rank):
    mesh = init_device_mesh("cpu", (2,))
    dense, placed = nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4).eval()
    distribute_module(placed, mesh)
    out = placed(distribute_tensor(batch(), mesh, [Shard(0)]))
    dense(batch()).square().sum().backward()
    out.square().sum().backward()
    assert out.placements == (Shard(0),)
    torch.testing.assert_close(placed.weight.grad.full_tensor(), dense.weight.grad)
    backward = aten.native_batch_norm_backward.default
    given = [distribute_tensor(batch(), mesh, [Shard(0)])] * 2
    vectors = [distribute_tensor(torch.ones(4), mesh, [Replicate()])] * 5
    made = backward(*given, *vectors, False, 1e-5, [True, True, True])
    assert [o.placements for o in made] == [(Shard(0),), (Partial(),), (Partial(),)]


@with_threads(2)
def test_instance_norm(rank):
    mesh = init_device_mesh("cpu", (2,))
    found = F.instance_norm(distribute_tensor(batch(), mesh, [Shard(0)]))
    torch.testing.assert_close(found.full_tensor(), F.instance_norm(batch()))


@pytest.mark.parametrize("of_parameters", [torch.float32, None], ids=["wide", "narrow"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@with_threads(2)
def test_narrow_values_are_normalised_by_wide_statistics(rank, dtype, of_parameters):
    """Of values far from zero the mean has few digits in their dtype, and what differs from it none."""
    mesh = init_device_mesh("cpu", (2,))
    x = ((torch.arange(512.0).reshape(2, 4, 64) / 37).sin() + 100).to(dtype)
    grad = (torch.arange(512.0).reshape(2, 4, 64) / 11).cos().to(dtype)
    exact, placed = nn.BatchNorm1d(4, dtype=torch.float64), nn.BatchNorm1d(4, dtype=of_parameters or dtype)
    distribute_module(placed, mesh)
    given = x.double().requires_grad_(), distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    expected, found = exact(given[0]), placed(given[1])
    expected.backward(grad.double())
    found.backward(distribute_tensor(grad, mesh, [Shard(0)]))
    assert found.dtype == dtype
    close = {"rtol": 0.02, "atol": 0.02, "check_dtype": False}
    torch.testing.assert_close(found.full_tensor(), expected, **close)
    if of_parameters is not None:  # else the mean that is saved is narrow, as the kernel's is
        torch.testing.assert_close(placed.running_mean.full_tensor(), exact.running_mean, **close)
        torch.testing.assert_close(placed.running_var.full_tensor(), exact.running_var, **close)
        torch.testing.assert_close(given[1].grad.full_tensor(), given[0].grad, **close)
        torch.testing.assert_close(placed.weight.grad.full_tensor(), exact.weight.grad, **close)


@with_threads(2)
def test_nothing_reserved_is_no_channel(rank):
    """What a forward reserves is empty, and stands for nothing: it is not broadcast from the one channel."""
    mesh = init_device_mesh("cpu", (2,))

    def whole(*shape):
        return distribute_tensor(torch.ones(shape), mesh, [Replicate()])

    _, mean, rstd, reserved = aten._batch_norm_with_update(whole(2, 1), *[whole(1)] * 4, 0.5, 1e-5)
    given = (whole(2, 1), whole(2, 1), whole(1), whole(1), whole(1), mean, rstd, True, 1e-5, [True] * 3, reserved)
    assert [g.shape for g in aten.batch_norm_backward(*given)] == [(2, 1), (1,), (1,)]
    assert (whole(1) + whole(0)).shape == (0,)
