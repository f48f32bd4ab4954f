"""clip_grad_norm_ on sharded gradients, against torch's on one device; how much it communicates."""

from math import inf, nan

import pytest
import torch
from torch import nn

from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.parallel import clip_grad_norm_
from dtensor.testing import CountCollectives, with_ranks, with_threads

GRADS = [torch.sin(torch.arange(n * 3.0) + n).view(n, 3) for n in (4, 5, 1, 2)]


def dense(p, max_norm, dtype=torch.float32):
    parameters = [nn.Parameter(torch.zeros_like(g, dtype=dtype)) for g in GRADS]
    for x, g in zip(parameters, GRADS):
        x.grad = g.to(dtype, copy=True)
    return nn.utils.clip_grad_norm_(parameters, max_norm, p), [x.grad for x in parameters]


def placed(meshes, placements, dtype=torch.float32):
    """Parameters with the gradients of `dense`, one after the other on the meshes given; None is plain."""
    made = []
    for g, mesh, where in zip(GRADS, meshes, placements):

        def put(x, m=mesh, w=where):
            return x.clone() if m is None else distribute_tensor(x, m, w)

        made.append(nn.Parameter(put(torch.zeros_like(g, dtype=dtype))))
        made[-1].grad = put(g.to(dtype))
    return made


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


@pytest.mark.parametrize("p", [2.0, 1, 3.0, inf])
@with_threads(4)
def test_it_is_that_of_one_device_with_one_reduction(rank, p):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    grid = [Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(0)], [Replicate(), Replicate()]
    one = [Shard(0)], [Shard(1)], [Replicate()], [Shard(0)]
    everywhere = {
        "one mesh": ([mesh] * 4, grid),
        "a slice": ([mesh, mesh["tp"], mesh, mesh["dp"]], [grid[0], one[1], grid[2], one[3]]),
        "two slices": ([mesh["dp"], mesh["tp"], mesh["dp"], None], one),
    }
    for max_norm in (0.5, 100.0):
        norm, grads = dense(p, max_norm)
        for name, (meshes, placements) in everywhere.items():
            parameters = placed(meshes, placements)
            with CountCollectives() as counted:
                found = clip_grad_norm_(parameters, max_norm, p)
            torch.testing.assert_close(found, norm)
            assert [c.op for c in counted.collectives] == ["all_reduce"], name
            for x, g in zip(parameters, grads):
                torch.testing.assert_close(whole(x.grad), g)


@with_threads(2)
def test_meshes_that_have_nothing_to_do_with_each_other(rank):
    one, other = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    parameters = placed([one, other, one, None], [[Shard(0)], [Replicate(), Shard(1)], [Shard(0)], None])
    norm, grads = dense(2.0, 0.5)
    with CountCollectives() as counted:
        torch.testing.assert_close(clip_grad_norm_(parameters, 0.5), norm)
    assert [c.op for c in counted.collectives] == ["all_reduce"] * 2
    for x, g in zip(parameters, grads):
        torch.testing.assert_close(whole(x.grad), g)


@with_threads(2)
def test_parts_of_a_sum_are_reduced_first_and_stay_so(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, None))
    x.grad = DTensor.from_local(torch.full((3,), 1.0 + rank), mesh, [Partial()])
    assert clip_grad_norm_(x, 1.0).item() == pytest.approx(27**0.5)
    assert x.grad.placements == (Replicate(),)
    torch.testing.assert_close(x.grad.to_local(), torch.full((3,), 3 / 27**0.5))


@with_threads(2)
def test_half_precision_nothing_to_clip_and_what_is_not_finite(rank):
    mesh = init_device_mesh("cpu", (2,))
    parameters = placed([mesh] * 4, [[Shard(0)]] * 4, torch.bfloat16)
    torch.testing.assert_close(clip_grad_norm_(parameters, 1.0), dense(2.0, 1.0)[0], rtol=1e-2, atol=0)
    assert clip_grad_norm_([], 1.0).item() == 0
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item() == 0
    parameters = placed([mesh] * 4, [[Shard(0)]] * 4)
    if rank == 1:
        parameters[0].grad.to_local()[0] = nan
    with pytest.raises(RuntimeError, match=r"norm of order 2.0 of the gradients is nan.*error_if_nonfinite=False"):
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="norm_type is positive, or inf; got 0"):
        clip_grad_norm_(parameters, 1.0, 0)


@with_ranks(2)
def test_compiled_is_eager(rank):
    mesh = init_device_mesh("cpu", (2,))
    norm, grads = dense(2.0, 0.5)
    parameters = placed([mesh] * 4, [[Shard(0)], [Shard(1)], [Shard(0)], [Replicate()]])
    options = {"inner": "aot_eager"}
    clip = torch.compile(lambda: clip_grad_norm_(parameters, 0.5), backend="dtensor", fullgraph=True, options=options)
    torch.testing.assert_close(clip(), norm)
    for x, g in zip(parameters, grads):
        torch.testing.assert_close(whole(x.grad), g)


@with_threads(2)
def test_torchs_own_names_ours_beside_plain_parameters(rank):
    mesh = init_device_mesh("cpu", (2,))

    def mixed():
        return placed([mesh, None, mesh, None], [[Shard(0)], None, [Shard(0)], None])

    for foreach in (False, True):
        with pytest.raises(RuntimeError, match=r"write dtensor.parallel.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(mixed(), 1.0, foreach=foreach)
    expected, _ = dense(2.0, 1.0)
    torch.testing.assert_close(clip_grad_norm_(mixed(), 1.0), expected)
