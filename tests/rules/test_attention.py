"""scaled_dot_product_attention on ranks, by the fused and by the math path, against dense torch."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtensor import DTensor, MixedTensorError, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.testing import CountCollectives, run_threads, with_ranks, with_threads

PATHS = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

by_day_every_fifth = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.nightly)])
"""Of products of lists of which none has a multiple of five, so that all of each list is met."""


def t(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def inputs(batch, heads, keys, length=5, width=8):
    shapes = ((batch, heads, length, width), (batch, keys, length, width), (batch, keys, length, width))
    return [t(seed, *shape).requires_grad_() for seed, shape in enumerate(shapes)]


def check(mesh, dense, places, mask=None, mask_place=None, **options):
    """Forward, gradients of q, k, v, and of a mask that takes one."""
    leaves = [x.detach().clone().requires_grad_() for x in dense]
    bias = None if mask is None else mask.detach().clone().requires_grad_(mask.requires_grad)
    expected = F.scaled_dot_product_attention(*leaves, attn_mask=bias, **options)
    weight = t(9, *expected.shape)
    (expected * weight).sum().backward()
    placed = [distribute_tensor(x.detach(), mesh, p).requires_grad_() for x, p in zip(dense, places)]
    given = None if mask is None else distribute_tensor(mask.detach(), mesh, mask_place)
    if given is not None:
        given.requires_grad_(mask.requires_grad)
    out = F.scaled_dot_product_attention(*placed, attn_mask=given, **options)
    torch.testing.assert_close(out.full_tensor(), expected)
    (out * distribute_tensor(weight, mesh)).sum().backward()
    for x, leaf in zip(placed, leaves):
        torch.testing.assert_close(x.grad.full_tensor(), leaf.grad, msg=lambda m: f"{places} {options}\n{m}")
    if bias is not None and bias.requires_grad:
        torch.testing.assert_close(given.grad.full_tensor(), bias.grad)


def all_placements(rank, every):
    mesh = init_device_mesh("cpu", (2,))
    single = [Replicate(), *map(Shard, range(4))]
    places = [([p],) * 3 for p in single] + [([a], [b], [b]) for a, b in itertools.permutations(single[:4], 2)]
    heads = ((4, 4), (3, 3), (4, 2), (6, 3))
    for (of_query, of_key), place, causal in [*itertools.product(heads, places, (False, True))][::every]:
        check(mesh, inputs(3, of_query, of_key), place, is_causal=causal, enable_gqa=of_query != of_key)


@by_day_every_fifth
@pytest.mark.parametrize("path", PATHS)
def test_placements_causal_and_grouped(path, every):
    with sdpa_kernel(path):
        run_threads(all_placements, 2, every)


MASKS = [(5, 5), (1, 5), (4, 5, 5), (1, 5, 5), (2, 4, 5, 5), (2, 1, 5, 5), (1, 4, 1, 5)]


def all_masks(rank, path, every):
    mesh = init_device_mesh("cpu", (2,))
    dense = inputs(2, 4, 4)
    of_operands = (Replicate(), Shard(0), Shard(1), Shard(2))
    of_masks = (Replicate(), Shard(-1), Shard(0))
    given = [*itertools.product(MASKS, (None, False, True), of_operands, of_masks)]
    for shape, gradient, place, mask_place in given[::every]:
        if path is SDPBackend.FLASH_ATTENTION and (gradient or len(shape) == 3):
            continue  # no fused path takes those
        mask = t(3, *shape) > 0.3 if gradient is None else t(3, *shape).requires_grad_(gradient)
        if gradient is None:
            mask[..., 0] = True
        check(mesh, dense, [[place]] * 3, mask, [mask_place])


@by_day_every_fifth
@pytest.mark.parametrize("path", PATHS)
def test_masks(path, every):
    with sdpa_kernel(path):
        run_threads(all_masks, 2, path, every)


def two_axes(rank, path):
    mesh = init_device_mesh("cpu", (2, 2))
    for places in ([Shard(0), Shard(1)], [Shard(1), Shard(1)], [Shard(1), Shard(2)], [Replicate(), Shard(1)]):
        for heads, keys in ((4, 4), (4, 2), (3, 3)):
            check(mesh, inputs(2, heads, keys), [places] * 3, is_causal=True, enable_gqa=heads != keys)


@pytest.mark.parametrize("path", PATHS)
def test_two_axes(path):
    with sdpa_kernel(path):
        run_threads(two_axes, 4, path)


@with_threads(2)
def test_three_dimensions(rank):
    mesh = init_device_mesh("cpu", (2,))
    dense = [t(seed, 4, 5, 8) for seed in range(3)]
    for p in (Replicate(), Shard(0), Shard(1), Shard(2)):
        check(mesh, dense, [[p]] * 3, is_causal=True)
        check(mesh, dense, [[p]] * 3, t(4, 4, 5, 5), [Shard(0)])


def sharded_heads(rank, path):
    mesh = init_device_mesh("cpu", (2,))
    for heads, keys, dim in ((4, 4, 1), (4, 2, 1), (4, 4, 0)):
        placed = [distribute_tensor(x.detach(), mesh, [Shard(dim)]).requires_grad_() for x in inputs(2, heads, keys)]
        with CountCollectives() as count:
            out = F.scaled_dot_product_attention(*placed, is_causal=True, enable_gqa=heads != keys)
            out.backward(torch.ones_like(out))
        assert count.collectives == []
        assert ("Flash" in type(out.grad_fn).__name__) == (path is SDPBackend.FLASH_ATTENTION)
        assert out.placements == (Shard(dim),)
        assert [x.grad.placements for x in placed] == [(Shard(dim),)] * 3


@pytest.mark.parametrize("path", PATHS)
def test_sharded_heads_and_batch_do_not_communicate(path):
    with sdpa_kernel(path):
        run_threads(sharded_heads, 2, path)


def plain_mask(rank, path):
    mesh = init_device_mesh("cpu", (2,))
    placed = [distribute_tensor(x.detach(), mesh, [Shard(1)]) for x in inputs(2, 4, 4)]
    with pytest.raises(MixedTensorError, match=r"argument 'attn_mask' is a plain tensor of shape \[5, 5\]"):
        F.scaled_dot_product_attention(*placed, attn_mask=torch.zeros(5, 5, dtype=torch.float64))
    with pytest.raises(MixedTensorError, match="argument 'key' is a plain tensor"):
        F.scaled_dot_product_attention(placed[0], t(1, 2, 4, 5, 8), placed[2])
    assert isinstance(F.scaled_dot_product_attention(*placed), DTensor)


@pytest.mark.parametrize("path", PATHS)
def test_plain_operands_are_named(path):
    with sdpa_kernel(path):
        run_threads(plain_mask, 2, path)


@pytest.mark.parametrize("compiled", [False, True])
@with_ranks(2)
def test_autocast(rank, compiled):
    """Queries and keys that rotary embeddings have made float32 again beside values in bfloat16."""
    mesh = init_device_mesh("cpu", (2,))
    full = [torch.sin(torch.arange(256.0) * (k + 1)).view(2, 4, 4, 8) for k in range(3)]
    full[2] = full[2].bfloat16()
    run = F.scaled_dot_product_attention
    run = torch.compile(run, backend="dtensor", options={"inner": "aot_eager"}) if compiled else run
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.scaled_dot_product_attention(*full)
        found = run(*[distribute_tensor(x, mesh, [Shard(1)]) for x in full])
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found.full_tensor(), expected)
