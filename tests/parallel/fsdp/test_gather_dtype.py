"""Parameters of `fully_shard`, and gradients, that are sent in fewer bits than they are computed in."""

import threading

import pytest
import torch
from torch import nn

import dtensor.compile
from dtensor import DTensor, Partial, Shard, init_device_mesh
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


def model_of():
    """Of ten and three rows, of which the last of four ranks has one and none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 10), nn.GELU(), nn.Linear(10, 3))


BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
LOCK = threading.Lock()
"""Threads share the default generator."""


def sharded(mesh, dim, **policy):
    """A model, its copy that is not sharded, and by which dims its parameters are cut."""
    with LOCK:
        model, plain = model_of(), model_of()
    dims = [min(dim, p.dim() - 1) for p in model.parameters()]
    cut = lambda p: Shard(min(dim, p.dim() - 1))  # noqa: E731
    return fully_shard(model, mesh, mp_policy=MixedPrecisionPolicy(**policy), shard_placement_fn=cut), plain, dims


def runs(model, compiled):
    return (
        torch.compile(model, backend="dtensor", options={"inner": "aot_eager"}, fullgraph=True) if compiled else model
    )


def loss(out):
    return out.float().square().mean()


def gradients(model, dtype=torch.float32):
    """Of each parameter, those on the four batches."""
    found = [torch.autograd.grad(loss(model(x.to(dtype))), list(model.parameters())) for x in BATCHES]
    return [torch.stack(list(of)) for of in zip(*found)]


def check_rounded_parameters(rank, compiled):
    for shape, dim, dtype in (((4,), 0, None), ((4,), 1, None), ((2, 2), 0, torch.bfloat16)):
        mesh = init_device_mesh("cpu", shape)
        model, plain, dims = sharded(mesh, dim, param_dtype=dtype, gather_dtype=torch.float8_e4m3fn)
        with torch.no_grad():
            for p, d in zip(plain.parameters(), dims):
                p.copy_(rounded(p if dtype is None else p.to(dtype), d))
        plain.to(dtype or torch.float32)
        out = runs(model, compiled)(BATCHES[rank])
        torch.testing.assert_close(out, plain(BATCHES[rank].to(dtype or torch.float32)))
        loss(out).backward()
        for p, grads in zip(model.parameters(), gradients(plain, dtype or torch.float32), strict=True):
            expected = grads.float().mean(0)
            torch.testing.assert_close(p.grad.full_tensor(), expected, rtol=0.02, atol=1e-3 if dtype else 1e-6)


def check_rounded_gradients(rank, compiled):
    for dim in (0, 1):
        model, plain, dims = sharded(init_device_mesh("cpu", (4,)), dim, reduce_dtype=torch.float8_e4m3fn)
        grads, run = gradients(plain), runs(model, compiled)
        loss(run(BATCHES[rank])).backward()
        for p, d, each in zip(model.parameters(), dims, grads, strict=True):
            assert p.grad.placements == p.placements
            assert p.grad.dtype == torch.float32
            expected = torch.stack([rounded(grad, d) for grad in each]).mean(0)
            torch.testing.assert_close(p.grad.full_tensor(), expected, rtol=1e-4, atol=1e-6)
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        loss(run(BATCHES[rank])).backward()
        model.set_requires_gradient_sync(True)
        loss(run(BATCHES[rank])).backward()
        for p, each in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), 2 * each.mean(0))


def check_rounded_means(rank, compiled):
    for shape in ((4, 1), (2, 2)):
        model, plain, _ = sharded(init_device_mesh("cpu", shape), 0, reduce_dtype=torch.float8_e4m3fn)
        loss(runs(model, compiled)(BATCHES[rank])).backward()
        for p, each in zip(model.parameters(), gradients(plain), strict=True):
            assert p.grad.placements == p.placements
            found, grad = p.grad.full_tensor(), each.mean(0)
            everyone = DTensor.from_local(found, init_device_mesh("cpu", (4,)), [Partial("max")]).full_tensor()
            assert torch.equal(found, everyone)
            torch.testing.assert_close(found, grad, rtol=0.15, atol=0.03 * float(grad.abs().max()))


def check_beside_tensor_parallel(rank, compiled):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with LOCK:
        model, whole = model_of(), model_of()
    for m in (model, whole):
        parallelize_module(m, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh["dp"], mp_policy=FLOAT8)
    x = BATCHES[0]
    out = runs(model, compiled)(x)
    torch.testing.assert_close(out, whole(x), rtol=0.1, atol=0.05)
    assert not torch.equal(out, whole(x))
    loss(out).backward()
    assert all(p.grad.placements == p.placements for p in model.parameters())


CHECKS = {
    "forward and gradients are those of rounded parameters; gradients are not": check_rounded_parameters,
    "gradients are means of rounded ones, but those of several backwards": check_rounded_gradients,
    "over an axis that replicates means are rounded as well, alike on all ranks": check_rounded_means,
    "beside tensor parallelism, a rank's part of a row has a scale of its own": check_beside_tensor_parallel,
}
"""Where shards are uneven, or empty, over meshes that replicate as well, and cut along another dim."""


@pytest.mark.parametrize("what", CHECKS)
@with_threads(4)
def test_four_ranks(rank, what):
    CHECKS[what](rank, False)


@pytest.mark.nightly
@pytest.mark.parametrize("what", CHECKS)
@with_ranks(4, timeout=240)
def test_four_ranks_compiled(rank, what):
    CHECKS[what](rank, True)


@with_ranks(2, timeout=240)
def test_a_whole_step_is_that_of_eager_mode(rank):
    mesh, found = init_device_mesh("cpu", (2,)), []
    for whole in (False, True):
        model, _, _ = sharded(mesh, 0, gather_dtype=torch.float8_e4m3fn, reduce_dtype=torch.float8_e4m3fn)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, model=model, optimizer=optimizer):
            loss(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()

        step = dtensor.compile.step(step, options={"inner": "aot_eager"}) if whole else step
        for _ in range(3):
            step(BATCHES[rank])
        found.append([p.full_tensor() for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@with_threads(2)
def test_bytes(rank):
    """A byte for each element and four for a row, of four for each element; in 16 bits a half. Gradients are sent as
    they were."""
    mesh = init_device_mesh("cpu", (2,))
    half, exact = 64 * 256 * 2, 64 * 256 * 4
    for dtype, sent in ((torch.float8_e4m3fn, 64 * (256 + 4)), (torch.bfloat16, half), (torch.float64, exact)):
        model = nn.Linear(256, 128, bias=False)
        fully_shard(model, mesh, mp_policy=MixedPrecisionPolicy(gather_dtype=dtype))
        with CountCollectives() as forward:
            out = model(torch.ones(2, 256))
        with CountCollectives() as backward:
            out.sum().backward()
        assert out.dtype == torch.float32
        assert [(c.op, c.bytes) for c in forward.collectives] == [("all_gather", sent)]
        assert [(c.op, c.bytes) for c in backward.collectives] == [("reduce_scatter", exact)]
    assert 64 * (256 + 4) / exact <= 0.26
    model = nn.Linear(256, 128, bias=False)
    fully_shard(model, mesh, mp_policy=FLOAT8)
    out = model(torch.ones(2, 256))
    with CountCollectives() as backward:
        out.sum().backward()
    assert [(c.op, c.bytes) for c in backward.collectives] == [("all_to_all", 64 * (256 + 4))]
    model = nn.Linear(256, 128, bias=False)
    fully_shard(model, init_device_mesh("cpu", (2, 1)), mp_policy=FLOAT8)
    with CountCollectives() as replicated:
        model(torch.ones(2, 256)).sum().backward()
    sent = [(c.op, c.bytes) for c in replicated.collectives]
    assert sent == [("all_to_all", 64 * (256 + 4)), ("all_gather", 64 * (256 + 4))]


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
