"""Caches of compiled code: hits where all is alike, and never a graph that was made for something else."""

import os

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.testing import with_ranks


def whole(x):
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)


def local_sum(x, mesh):
    return DTensor.from_local(x, mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


def anew(f):
    torch.compiler.reset()
    return torch.compile(f, fullgraph=True)


@with_ranks(4)
def test_what_a_graph_depends_on_is_in_the_key(rank, tmp_path):
    """Reduction, layout, mesh and this rank's uneven shard: local tensors look alike, graphs differ. They hold
    collectives alone, so that no kernel takes time to compile.

    Ranks share a cache, as those of a machine do.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    line = init_device_mesh("cpu", (4,))
    mine = torch.full((4,), float(rank))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    for axis, other in ((dp, rank ^ 2), (tp, rank ^ 1)):
        for op, expected in (("sum", rank + other), ("max", max(rank, other)))[: 2 if axis is dp else 1]:
            x = DTensor.from_local(mine, axis, [Partial(op)])
            assert anew(whole)(x).to_local().tolist() == [float(expected)] * 4
        x = DTensor.from_local(mine, axis, [Shard(0)])
        assert anew(whole)(x).to_local().tolist() == [float(v) for v in sorted((rank, other)) for _ in range(4)]
        assert anew(local_sum)(mine, axis).tolist() == [float(rank + other)] * 4
    x = distribute_tensor(torch.arange(5.0), line, [Replicate()])
    cut = anew(lambda x: x.redistribute(placements=[Shard(0)]))(x)
    assert cut.to_local().tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0], []][rank]


@with_ranks(2)
def test_both_caches_hit(rank):
    """Forward and backward, static and symbolic sizes."""
    mesh = init_device_mesh("cpu", (2,))
    w = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]).requires_grad_()

    def f(x, w):
        return (x @ w.T).redistribute(placements=[Replicate()])

    with fresh_cache(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("DTENSOR_SHARE_COMPILES", "0")
        for hits in (0, 2):
            counters.clear()
            torch.compiler.reset()
            compiled = torch.compile(f, backend="dtensor", fullgraph=True)
            for n in (4, 6, 10):
                x = distribute_tensor(torch.ones(n, 8), mesh, [Replicate()])
                y = compiled(x, w)
                assert y.to_local().tolist() == [[8.0] * 8] * n
                w.grad = None
                y.sum().backward()
                assert w.grad.to_local().tolist() == [[float(n)] * 8] * 4
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits
            assert counters["aot_autograd"]["autograd_cache_bypass"] == 0
