"""Convolution, pooling, resampling and padding: every candidate by brute force, and modules against one device."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dtensor import Partial, Replicate, Shard, distribute_module, distribute_tensor
from dtensor.rules.families.spatial import UPSAMPLED
from dtensor.testing import with_threads
from dtensor.testing.rules.candidates import case as c
from dtensor.testing.rules.candidates import floats as f
from dtensor.testing.rules.candidates import integers as ints
from tests.rules.checking import check

aten = torch.ops.aten


def conv(x, w, b, groups=1, transposed=False, at_least=1):
    one = [1] * (w.dim() - 2)
    rest = (one, one, one, transposed, [0] * len(one), groups)
    yield c(aten.convolution.default, x, w, b, *rest, at_least=at_least + 4)
    out = aten.convolution.default(x, w, b, *rest)
    for mask in ([True, True, b is not None], [True, False, b is not None], [False, True, False]):
        sizes = None if b is None else [b.shape[0]]
        yield c(aten.convolution_backward.default, f(*out.shape), x, w, sizes, *rest, mask, at_least=at_least + 2)


def convolution_cases():
    # Nothing, batch, input channels, output channels.
    yield from conv(f(4, 5, 6), f(6, 5, 3), f(6), at_least=4)
    yield from conv(f(5, 4, 4, 5), f(3, 4, 2, 2), f(3), at_least=4)
    yield from conv(f(4, 6, 4, 5), f(6, 5, 2, 2), f(5), transposed=True, at_least=4)
    yield from conv(f(4, 1, 5), f(2, 1, 3), None, at_least=4)
    rest = ([1], [0], [1], False, [0], 1, False, False, False, False)
    yield c(aten._convolution.default, f(4, 5, 6), f(6, 5, 3), f(6), *rest, at_least=8)
    # Nothing, batch, groups: the channels of a group stay together.
    yield from conv(f(4, 6, 5), f(6, 1, 3), f(6), groups=6, at_least=3)
    yield from conv(f(2, 12, 5), f(18, 2, 3), f(18), groups=6, at_least=3)
    yield from conv(f(2, 12, 5), f(12, 3, 3), f(18), groups=6, transposed=True, at_least=3)


def pooling_cases():
    """Every operator of `POOLS`, with a batch and without."""
    for lead, spatial, small, window in (
        ((4, 5), (6, 8), (3, 4), ([2, 3], [2, 2], [0, 1])),
        ((3,), (6, 8), (3, 4), ([2, 3], [2, 2], [0, 1])),
        ((2, 3), (4, 4, 6), (2, 2, 3), ([2, 2, 2], [2, 2, 2], [0, 0, 0])),
    ):
        d, kept, x, by = len(spatial), len(lead) + 1, f(*lead, *spatial), f(*lead, *small)
        op = {
            name: getattr(aten, name.format(d)).default
            for kind in ("max_pool{}d_with_indices", "avg_pool{}d", "_adaptive_avg_pool{}d", "adaptive_max_pool{}d")
            for name in (kind, f"{kind}_backward")
        }
        yield c(op["max_pool{}d_with_indices"], x, *window, at_least=kept)
        _, where = op["max_pool{}d_with_indices"](x, *window)
        backward = op["max_pool{}d_with_indices_backward"]
        yield c(backward, by, x, *window, [1] * d, False, where, at_least=kept + 2)
        yield c(op["avg_pool{}d"], x, *window, at_least=kept + 2)
        yield c(op["avg_pool{}d_backward"], by, x, *window, False, True, None, at_least=kept + 2)
        yield c(op["_adaptive_avg_pool{}d"], x, small, at_least=kept + 2)
        yield c(op["_adaptive_avg_pool{}d_backward"], by, x, at_least=kept + 2)
        yield c(op["adaptive_max_pool{}d"], x, small, at_least=kept)
        _, where = op["adaptive_max_pool{}d"](x, small)
        yield c(op["adaptive_max_pool{}d_backward"], by, x, where, at_least=kept + 2)
        rest = (list(spatial), *([[2] * d, [0] * d] if d == 3 else []))
        yield c(getattr(aten, f"max_unpool{d}d").default, by, where, *rest, at_least=kept + 2)
        if len(lead) == 2:
            fractional, samples = getattr(aten, f"fractional_max_pool{d}d").default, torch.rand(*lead, d).double()
            sizes = ([2] * d, small)
            yield c(fractional, x, *sizes, samples, at_least=3)
            _, where = fractional(x, *sizes, samples)
            backward = getattr(aten, f"fractional_max_pool{d}d_backward").default
            yield c(backward, by, x, *sizes, where, at_least=kept + 2)


def resampling_cases():
    for form, numbers in UPSAMPLED.items():
        for spatial in [((6,), (4, 6), (2, 4, 3))[d - 1] for d in numbers]:
            name, big = form.format(len(spatial)), [2 * s for s in spatial]
            if not hasattr(aten, name):
                continue  # not in every version of torch
            corners = [] if "nearest" in name else [False]
            yield c(getattr(aten, name).default, f(4, 5, *spatial), big, *corners, at_least=5)
            backward = getattr(aten, f"{name}_backward").default
            yield c(backward, f(4, 5, *big), big, [4, 5, *spatial], *corners, at_least=5)
    for d, deep in ((2, 0), (3, 1)):
        grid, x = torch.rand(4, *[3] * deep, 6, 5, d).double() * 2 - 1, f(4, 3, *[3] * deep, 4, 4)
        forward, backward = (getattr(aten, f"grid_sampler_{d}d{end}").default for end in ("", "_backward"))
        yield c(forward, x, grid, 0, 0, False, at_least=7 + deep)
        for mask in ([True, True], [False, True]):
            out = f(4, 3, *[3] * deep, 6, 5)
            yield c(backward, out, x, grid, 0, 0, False, mask, at_least=7 + deep)


def rearranging_cases():
    for lead in ((4, 3), (2,)):
        kept = len(lead) + 1
        for pad, spatial in (([1, 2], (5,)), ([1, 2, 2, 1], (4, 5)), ([1, 0, 1, 2, 0, 1], (3, 4, 2))):
            for kind in ("reflection", "replication"):
                name = f"{kind}_pad{len(spatial)}d"
                x = f(*lead, *spatial)
                out = getattr(aten, name).default(x, pad)
                yield c(getattr(aten, name).default, x, pad, at_least=kept + 2)
                yield c(getattr(aten, f"{name}_backward").default, f(*out.shape), x, pad, at_least=kept + 2)
    for op in (aten.pixel_shuffle, aten.channel_shuffle):
        yield c(op.default, ints(9, 4, 8, 2, 6), 2, at_least=6)
    # Channels, both spatial dimensions and the batch: everything but the block that is moved.
    yield c(aten.pixel_shuffle.default, f(4, 24, 2, 6), 2, at_least=7)
    yield c(aten.pixel_unshuffle.default, f(4, 6, 4, 12), 2, at_least=7)
    yield c(aten.channel_shuffle.default, f(4, 6, 5, 3), 2, at_least=6)
    window = ([2, 2], [1, 1], [0, 0], [1, 1])
    for lead in ((4, 6), (6,)):
        yield c(aten.im2col.default, f(*lead, 4, 5), *window, at_least=len(lead) + 3)
        yield c(aten.col2im.default, f(*lead[:-1], 24, 12), [4, 5], *window, at_least=len(lead) + 3)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("group", [convolution_cases, pooling_cases, resampling_cases, rearranging_cases])
def test_every_candidate_is_right(group, n):
    check(group, n)


@with_threads(2)
def test_a_sharded_image_is_put_together_first(rank):
    """A kernel reaches over the cut: the result on the parts alone would be wrong, silently."""
    mesh = init_device_mesh("cpu", (2,))
    x, w = torch.arange(32.0).reshape(1, 1, 4, 8), torch.ones(1, 1, 3, 3)
    placed = distribute_tensor(x, mesh, [Shard(2)])
    out = F.conv2d(placed, distribute_tensor(w, mesh, [Replicate()]), padding=1)
    assert torch.equal(out.full_tensor(), F.conv2d(x, w, padding=1))


@with_threads(2)
def test_input_channels_give_a_partial_result(rank):
    mesh = init_device_mesh("cpu", (2,))
    x, w = torch.ones(2, 4, 5), torch.ones(3, 4, 3)
    out = F.conv1d(distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(w, mesh, [Shard(1)]), torch_bias(mesh))
    assert out.placements == (Partial(),)
    assert torch.equal(out.full_tensor(), F.conv1d(x, w, torch.tensor([1.0, 2.0, 3.0])))


def torch_bias(mesh):
    return distribute_tensor(torch.tensor([1.0, 2.0, 3.0]), mesh, [Replicate()])


CONVNET = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(8, 8, 3, groups=4),
    nn.GroupNorm(4, 8),
    nn.Upsample(scale_factor=2, mode="bilinear"),
    nn.AdaptiveAvgPool2d(2),
    nn.Flatten(),
    nn.Linear(32, 5),
)


@with_threads(2)
def test_a_convnet_on_a_sharded_batch_is_the_one_of_one_device(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = torch.sin(torch.arange(5 * 3 * 8 * 8.0)).reshape(5, 3, 8, 8)
    dense, placed = copy.deepcopy(CONVNET), copy.deepcopy(CONVNET)
    distribute_module(placed, mesh)
    for _ in range(2):
        expected, found = dense(x), placed(distribute_tensor(x, mesh, [Shard(0)]))
        assert found.placements == (Shard(0),)
        torch.testing.assert_close(found.full_tensor(), expected)
        expected.square().sum().backward()
        found.square().sum().backward()
    for (name, d), p in zip(dense.named_parameters(), placed.parameters()):
        torch.testing.assert_close(
            p.grad.full_tensor(), d.grad, msg=lambda m, n=name: f"{n}: {m}", rtol=1e-4, atol=1e-4
        )
    for d, p in zip(dense.buffers(), placed.buffers()):
        torch.testing.assert_close(p.full_tensor(), d)
