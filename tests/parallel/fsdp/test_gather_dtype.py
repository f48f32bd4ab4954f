"""Parameters of `fully_shard`, and gradients, that are sent in fewer bits than they are computed in."""

import pytest
import torch
from torch import nn

from dtensor import Shard, init_device_mesh
from dtensor.comm.row_encoding import decode_rows, encode_rows
from dtensor.parallel import ColwiseParallel, MixedPrecisionPolicy, RowwiseParallel, fully_shard, parallelize_module
from dtensor.testing import CountCollectives, with_ranks, with_threads

FLOAT8 = MixedPrecisionPolicy(gather_dtype=torch.float8_e4m3fn, reduce_dtype=torch.float8_e4m3fn)


def rounded(x, dim=0, sent=torch.float8_e4m3fn):
    """`x` as it arrives."""
    return decode_rows(encode_rows(x, dim, sent), list(x.shape), dim, sent, x.dtype) if x.dim() > 1 else x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("sent", "step"), [(torch.float8_e4m3fn, 2**-4), (torch.float8_e5m2, 2**-3)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rows_are_rounded_by_a_scale_of_their_own(dtype, sent, step, dim):
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = (x.movedim(dim, 0) * 10.0 ** torch.arange(-3, x.shape[dim] - 3).view(-1, 1, 1)).movedim(0, dim).to(dtype)
    x.select(dim, 1).zero_()
    message = encode_rows(x, dim, sent)
    assert message.dtype == torch.uint8
    assert message.shape == (x.shape[dim], x.numel() // x.shape[dim] + 4)
    found = decode_rows(message, list(x.shape), dim, sent, dtype)
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert found.select(dim, 1).eq(0).all()
    most = x.abs().amax([d for d in range(3) if d != dim], keepdim=True).double()
    error = (found.double() - x.double()).abs()
    assert (error <= x.double().abs() * step * 1.1 + most * 1e-4).all()
    torch.testing.assert_close(found.abs().amax().double(), x.abs().amax().double(), rtol=1e-2, atol=0)


def test_what_is_not_finite_arrives_so_and_short_tensors_as_they_are():
    x = torch.ones(3, 4)
    x[0, 1], x[1, 2] = float("nan"), float("inf")
    found = rounded(x)
    assert found[:2].isfinite().sum() == 0
    assert torch.equal(found[2], x[2])
    for y in (torch.randn(5), torch.randn(5, dtype=torch.bfloat16)):
        shape = list(y.shape)
        assert torch.equal(
            decode_rows(encode_rows(y, 0, torch.float8_e4m3fn), shape, 0, torch.float8_e4m3fn, y.dtype), y
        )


def full(grad):
    assert grad is not None
    return grad


def model_of():
    """Of ten and three rows, of which the last of four ranks has one and none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 10), nn.GELU(), nn.Linear(10, 3))


@with_ranks(4, timeout=240)
def test_a_step_is_that_of_rounded_parameters(rank):
    """Forward and gradients are those of a model whose weights are rounded; gradients are not. Also where shards are
    uneven, over a mesh that replicates as well, and cut along another dim."""
    for shape, dim, dtype in (((4,), 0, None), ((4,), 1, None), ((2, 2), 0, torch.bfloat16)):
        mesh = init_device_mesh("cpu", shape)
        policy = MixedPrecisionPolicy(param_dtype=dtype, gather_dtype=torch.float8_e4m3fn)
        model, plain = model_of(), model_of()
        places = [Shard(min(dim, p.dim() - 1)) for p in plain.parameters()]
        fully_shard(model, mesh, mp_policy=policy, shard_placement_fn=lambda p: Shard(min(dim, p.dim() - 1)))  # noqa: B023
        with torch.no_grad():
            for p, place in zip(plain.parameters(), places):
                p.copy_(rounded(p if dtype is None else p.to(dtype), place.dim))
        plain.to(dtype or torch.float32)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
        for run in (model, torch.compile(model, backend="dtensor", options={"inner": "aot_eager"}, fullgraph=True)):
            model.zero_grad()
            plain.zero_grad()
            out, wanted = run(x), plain(x.to(dtype or x.dtype))
            torch.testing.assert_close(out, wanted)
            out.float().square().mean().backward()
            wanted.float().square().mean().backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.distributed.all_reduce(q.grad)
                grad, expected = p.grad.full_tensor(), (full(q.grad) / 4).float()
                torch.testing.assert_close(grad, expected, rtol=0.02, atol=1e-3 if dtype else 1e-6)


@with_ranks(4, timeout=240)
def test_gradients_are_means_of_rounded_ones(rank):
    """Each rank's rows are rounded once, and added up in float32; eager and compiled, uneven, over other meshes. Under
    `set_requires_gradient_sync(False)` nothing is rounded."""
    for shape, dim in (((4,), 0), ((4,), 1), ((2, 2), 0)):
        mesh = init_device_mesh("cpu", shape)
        model, plain = model_of(), model_of()
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float8_e4m3fn)
        fully_shard(model, mesh, mp_policy=policy, shard_placement_fn=lambda p: Shard(min(dim, p.dim() - 1)))  # noqa: B023
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
        plain(x).square().mean().backward()
        grads = [rounded(full(p.grad), min(dim, p.dim() - 1)) for p in plain.parameters()]
        exact = [full(p.grad) for p in plain.parameters()]
        for grad in [*grads, *exact]:
            torch.distributed.all_reduce(grad)
            grad /= 4
        for run in (model, torch.compile(model, backend="dtensor", options={"inner": "aot_eager"}, fullgraph=True)):
            model.zero_grad()
            run(x).square().mean().backward()
            for p, grad in zip(model.parameters(), grads, strict=True):
                assert p.grad.placements == p.placements
                assert p.grad.dtype == torch.float32
                torch.testing.assert_close(p.grad.full_tensor(), grad, rtol=1e-4, atol=1e-6)
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        model(x).square().mean().backward()
        model.set_requires_gradient_sync(True)
        model(x).square().mean().backward()
        for p, grad in zip(model.parameters(), exact, strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), 2 * grad)


@with_ranks(4, timeout=240)
def test_beside_tensor_parallel(rank):
    """A rank's part of a row has a scale of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, whole = model_of(), model_of()
    for m in (model, whole):
        parallelize_module(m, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh["dp"], mp_policy=FLOAT8)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(model, backend="dtensor", options={"inner": "aot_eager"}, fullgraph=True)
    found = model(x)
    torch.testing.assert_close(found, whole(x), rtol=0.1, atol=0.05)
    assert not torch.equal(found, whole(x))
    torch.testing.assert_close(compiled(x), found)
    compiled(x).square().mean().backward()
    assert all(p.grad.placements == p.placements for p in model.parameters())


@with_threads(2)
def test_bytes(rank):
    """A byte for each element and four for a row, of four for each element; in 16 bits a half. Gradients are sent as
    they were."""
    mesh = init_device_mesh("cpu", (2,))
    for dtype, sent in ((torch.float8_e4m3fn, 64 * (256 + 4)), (torch.bfloat16, 64 * 256 * 2)):
        model = nn.Linear(256, 128, bias=False)
        fully_shard(model, mesh, mp_policy=MixedPrecisionPolicy(gather_dtype=dtype))
        with CountCollectives() as forward:
            out = model(torch.ones(2, 256))
        with CountCollectives() as backward:
            out.sum().backward()
        assert out.dtype == torch.float32
        assert [(c.op, c.bytes) for c in forward.collectives] == [("all_gather", sent)]
        assert [(c.op, c.bytes) for c in backward.collectives] == [("reduce_scatter", 64 * 256 * 4)]
    assert 64 * (256 + 4) <= 0.26 * 64 * 256 * 4
    model = nn.Linear(256, 128, bias=False)
    fully_shard(model, mesh, mp_policy=FLOAT8)
    out = model(torch.ones(2, 256))
    with CountCollectives() as backward:
        out.sum().backward()
    assert [(c.op, c.bytes) for c in backward.collectives] == [("all_to_all", 64 * (256 + 4))]


def test_refusals():
    with pytest.raises(
        ValueError, match=r"nothing is sent as torch.float8_e8m0fnu; write gather_dtype=torch.float8_e4"
    ):
        MixedPrecisionPolicy(gather_dtype=torch.float8_e8m0fnu)


@with_threads(1)
def test_gradients_of_a_global_view_are_refused(rank):
    with pytest.raises(ValueError, match=r"reduce_dtype=torch.float8_e4m3fn.*write reduce_dtype=torch.bfloat16, or"):
        fully_shard(nn.Linear(2, 2), init_device_mesh("cpu", (1,)), mp_policy=FLOAT8, activations="global")


@pytest.mark.nightly
@with_ranks(2, timeout=600)
def test_losses_of_two_hundred_steps(rank):
    """Under Inductor, within one percent of those in full precision."""
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for policy in (MixedPrecisionPolicy(), FLOAT8):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(32, 32), nn.Flatten(), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 32))
        fully_shard(model, mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step, losses = torch.compile(model, backend="dtensor", fullgraph=True), []
        for k in range(200):
            tokens = torch.randint(32, (64, 4), generator=torch.Generator().manual_seed(2 * k + rank))
            out = nn.functional.cross_entropy(step(tokens), tokens.sum(1) % 32)
            out.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(out.item())
        found.append(torch.tensor(losses))
    assert ((found[1] - found[0]).abs() / found[0]).max() < 0.01
