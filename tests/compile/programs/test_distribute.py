"""`distribute_tensor` inside of a compiled function, and placements that outlast a graph break."""

import torch

from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.testing import with_ranks


@with_ranks(2)
def test_distribute_tensor(rank):
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    w = distribute_tensor(torch.randn(3, 3), mesh, [Shard(0)]).requires_grad_()
    h = distribute_tensor(torch.randn(5, 3), mesh, [Replicate()])
    y = torch.randn(5, 3) + rank  # the values of rank 0 are taken
    leaf, outside = torch.randn(5, 3).requires_grad_(), [Replicate()]

    def as_a_term(h, y):
        return (h @ w) + distribute_tensor(y, mesh, [Replicate()])

    def placements_from_outside(h, y):
        return (h @ w) + distribute_tensor(y, mesh, outside)

    def later(h, y):
        a = h @ w
        z = distribute_tensor(y * 2, mesh, (Shard(-2),))
        return a + z

    def in_parts(h, y):
        return (h @ w) * distribute_tensor(y, mesh, [Partial()])

    def of_this_rank(h, y):
        return (h @ w) + distribute_tensor(y - rank, mesh, [Shard(1)], src_data_rank=None)

    def of_the_other_rank(h, y):
        return (h @ w) + distribute_tensor(y, mesh, [Shard(1)], src_data_rank=1)

    def after_a_break(h, y):
        placements = [Shard(0), Partial("max")][:1]
        a = h @ w
        torch._dynamo.graph_break()
        assert type(placements[0]) is Shard
        return a.redistribute(placements=placements) + distribute_tensor(y, mesh, placements)

    def a_leaf(h, y):
        a = h @ w
        return a + distribute_tensor(leaf, mesh, [Replicate()])

    whole = as_a_term, placements_from_outside, later, in_parts, of_this_rank, of_the_other_rank
    for f in (*whole, after_a_break, a_leaf):
        want = f(h, y)
        (grad,) = torch.autograd.grad(want.sum(), w)
        torch._dynamo.reset()
        got = torch.compile(f, backend="dtensor", fullgraph=f in whole, options={"inner": "aot_eager"})(h, y)
        assert isinstance(got, DTensor), f
        assert got.placements == want.placements, f
        torch.testing.assert_close(got.full_tensor(), want.full_tensor())
        torch.testing.assert_close(torch.autograd.grad(got.sum(), w)[0].full_tensor(), grad.full_tensor())
