"""Graphs of torch DTensor and of hand-written functional collectives under backend="dtensor"."""

import warnings
from collections import Counter

import pytest
import torch
import torch.distributed.tensor as peer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed._tensor import common_dtensor as reference

from dtensor.compile import statistics
from dtensor.passes import Raise
from dtensor.testing import fake_ranks, with_ranks
from dtensor.torch_private.compiling import aot_backend, boxed
from dtensor.torch_private.core import functional_collectives as funcol
from dtensor.torch_private.partitioning import min_cut_partition


def compiled(f, inner="aot_eager", **options):
    return torch.compile(f, backend="dtensor", fullgraph=True, options={"inner": inner, **options})


def traced(s, *directions):
    """Collectives in the first graph of these directions, as they came."""
    return Counter(c.op for c in next(r for r in s.records if r.direction in directions).traced)


def ops(found):
    return Counter(c.op for c in found)


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


class Block(nn.Module):
    """Two row-sharded products, added: two sums over ranks where one would do. Torch's DTensor."""

    def __init__(self, mesh, width=8):
        super().__init__()
        torch.manual_seed(0)
        cut, whole = [peer.Shard(0)], [peer.Replicate()]
        self.mesh = mesh
        self.left = nn.Parameter(peer.distribute_tensor(torch.randn(width, width), mesh, cut))
        self.right = nn.Parameter(peer.distribute_tensor(torch.randn(width, width), mesh, cut))
        self.bias = nn.Parameter(peer.distribute_tensor(torch.randn(width), mesh, whole))

    def forward(self, x, y):
        whole = [peer.Replicate()]
        a = (x @ self.left).redistribute(placements=whole)
        b = (y @ self.right).redistribute(placements=whole)
        return torch.relu(a + b + self.bias)


def step(model, x, y):
    model.zero_grad()
    out = model(x, y)
    (out * out).sum().backward()
    return [t.full_tensor().detach() for t in (out, *(p.grad for p in model.parameters()))]


@with_ranks(2)
def test_a_model_of_torch_dtensor_trains(rank):
    mesh = init_device_mesh("cpu", (2,))
    for width in (8, 7):
        torch.compiler.reset()
        model = Block(mesh, width)
        x, y = (peer.distribute_tensor(torch.randn(4, width), mesh, [peer.Shard(1)]) for _ in range(2))
        expected = step(model, x, y)
        with statistics() as s:
            found = step(compiled(model), x, y)
        close(found, expected)
        assert traced(s, "joint")["all_reduce"] == 2
        assert ops(s.forward) == {"all_reduce": 1}


@with_ranks(2)
@pytest.mark.nightly
def test_torchs_transformer_gets_the_counts_of_ours(rank):
    """As `test_number_of_collectives` in test_training, but for norms' gradients: torch leaves them partial."""
    mesh = init_device_mesh("cpu", (2,))
    tokens = torch.arange(16).view(2, 8)
    for sequence, layers in ((False, 2), (True, 1)):
        torch.compiler.reset()
        torch.manual_seed(0)
        args = reference.ModelArgs(n_layers=layers, dropout_p=0.0, vocab_size=16)
        model = reference.Transformer.parallelize(reference.Transformer(args), mesh, sequence)

        def train(run, model=model):
            model.zero_grad()
            out = run(tokens)
            (out.full_tensor() if isinstance(out, peer.DTensor) else out).square().sum().backward()
            grads = [p.grad for p in model.parameters()]
            return [out.detach(), *(g.full_tensor() if isinstance(g, peer.DTensor) else g for g in grads)]

        with implicit_replication(), sdpa_kernel(SDPBackend.MATH):
            expected = train(model)
            with statistics() as s:
                found = train(compiled(model))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        n = 2 * layers + 1
        if sequence:
            wanted = {"all_gather": n + 1, "reduce_scatter": n}, {"all_gather": n, "reduce_scatter": n}
        else:
            wanted = {"all_gather": 1, "all_reduce": n}, {"all_reduce": n}
            assert traced(s, "joint")["all_reduce"] == 6 * layers + 3
        assert (ops(s.forward), ops(s.backward)) == wanted


def twice(x):
    a = x.redistribute(placements=[peer.Replicate()])
    b = x.redistribute(placements=[peer.Replicate()])
    return [(a * 2 + torch.relu(b)).to_local()]


def uneven(a, b, x):
    shard = [peer.Shard(0)]
    total = a.redistribute(placements=shard) + b.redistribute(placements=shard)
    other = x.redistribute(placements=[peer.Shard(1)]) * 2
    return total.to_local(), other.to_local(), x.redistribute(placements=[peer.Replicate()]).to_local() + 1


@with_ranks(2)
def test_redistributions_of_torch_dtensor(rank):
    """What is gathered twice is gathered once. Padding, which is cut off on some ranks only, is left alone: all ranks
    must run the same collectives."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,))
    x = peer.distribute_tensor(torch.arange(24.0).view(4, 6), mesh, [peer.Shard(1)])
    y = peer.distribute_tensor(torch.randn(5, 3), mesh, [peer.Shard(0)])
    a, b = (peer.DTensor.from_local(torch.randn(5, 3), mesh, [peer.Partial()], run_check=False) for _ in range(2))
    for f, args, before, after in (
        (twice, (x,), {"all_gather": 2}, {"all_gather": 1}),
        (uneven, (a, b, y), {"reduce_scatter": 2, "all_gather": 2}, {"reduce_scatter": 2, "all_gather": 2}),
    ):
        expected = f(*args)
        with statistics() as s, torch.no_grad():
            found = compiled(f, disable=["bucket"])(*args)
        close(found, expected)
        assert (traced(s, "inference"), ops(s.forward)) == (before, after)


@with_ranks(2)
def test_rows_sent_to_one_rank_alone(rank):
    """Rank 0 sends three rows to rank 1 and gets one: what ranks send differs, and they agree all the same."""
    group = init_device_mesh("cpu", (2,)).get_group().group_name
    sent, received = ([0, 3], [0, 1]) if rank == 0 else ([1, 0], [3, 0])
    x = torch.full((sum(sent), 2), float(rank))
    found = compiled(lambda x: funcol.all_to_all_single(x, received, sent, group) + 1)(x)
    assert torch.equal(found, torch.full((sum(received), 2), 2.0 - rank))


PLACEMENTS = (peer.Shard(0), peer.Shard(1), peer.Partial(), peer.Replicate())


def raised_on(rank, world, shape):
    """What is made, on one rank, of the collectives of all redistributions of torch's DTensor."""

    def f(x, y, p, r):
        by = dict(zip(PLACEMENTS, (x, y, p, r)))
        moves = [(src, dst) for src in PLACEMENTS for dst in PLACEMENTS if src != dst and not dst.is_partial()]
        return [by[src].redistribute(placements=[dst]).to_local() * 2 for src, dst in moves]

    def keep(gm, _):
        Raise()(gm.graph)
        calls = [str(node.target) for node in gm.graph.nodes]
        found.append([call for call in calls if "wait" not in call and call.startswith(("dtensor.", "_c10d_"))])
        return boxed(gm.forward)

    found = []
    with fake_ranks(world, rank), torch.no_grad():
        mesh = init_device_mesh("cpu", (world,))
        shards = [peer.distribute_tensor(torch.zeros(shape), mesh, [peer.Shard(dim)]) for dim in (0, 1)]
        wholes = [peer.DTensor.from_local(torch.zeros(shape), mesh, [p], run_check=False) for p in PLACEMENTS[2:]]
        torch.compile(f, backend=aot_backend(min_cut_partition, keep, keep, keep), fullgraph=True)(*shards, *wholes)
    torch.compiler.reset()
    return found


@pytest.mark.parametrize(
    ("world", "shape", "kept"),
    [
        *[(2, (4, 6), 0), (2, (4, 5), 4), (2, (5, 3), 6), (3, (1, 3), 4)],
        *[
            pytest.param(*at_night, marks=pytest.mark.nightly)
            for at_night in ((2, (5, 4), 4), (3, (6, 3), 0), (3, (4, 4), 6))
        ],
    ],
)
def test_all_ranks_raise_the_same(world, shape, kept):
    """Where a length does not divide, rank 0 sees full shards only: what it does must follow from what all see."""
    (graph,), *others = [raised_on(rank, world, shape) for rank in range(world)]
    assert others == [[graph]] * (world - 1)
    assert len(graph) == 7
    assert sum("_c10d_" in call for call in graph) == kept


class Gathered(nn.Module):
    """Parameters that lie in shards and are gathered when they are used, as SimpleFSDP does it, by hand."""

    def __init__(self, group, rank):
        super().__init__()
        torch.manual_seed(1)
        self.group = group
        whole = [torch.randn(8, 6), torch.randn(6, 4)]
        self.up = nn.Parameter(whole[0].chunk(2, 0)[rank].clone())
        self.down = nn.Parameter(whole[1].chunk(2, 1)[rank].clone())
        self.whole = whole

    def forward(self, x):
        up = funcol.all_gather_tensor_autograd(self.up, 0, self.group)
        down = funcol.all_gather_tensor_autograd(self.down, 1, self.group)
        h = torch.tanh(x @ up) @ down
        # The activations, too, are summed over the ranks in shards of rows.
        return funcol.reduce_scatter_tensor_autograd(h, "sum", 0, self.group)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@with_ranks(2)
def test_parameters_gathered_by_hand(rank, inner):
    mesh = init_device_mesh("cpu", (2,))
    model = Gathered(mesh.get_group().group_name, rank)
    xs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(r)) for r in range(2)]

    # One device: the sum of both ranks' activations; each rank's loss is that of its rows.
    up, down = (w.clone().requires_grad_() for w in model.whole)
    total = sum(torch.tanh(x @ up) @ down for x in xs)
    (total * total).sum().backward()

    with statistics() as s:
        out = compiled(model, inner, disable=["bucket"])(xs[rank])
        (out * out).sum().backward()
    close([out], [total.chunk(2, 0)[rank]])
    close([model.up.grad, model.down.grad], [up.grad.chunk(2, 0)[rank], down.grad.chunk(2, 1)[rank]])
    joint = next(r for r in s.records if r.direction == "joint")
    assert next(p for p in joint.passes if p.name == "raise").rewrites == 6
    assert [c.gather_dim for c in s.forward if c.op == "all_gather"] == [0, 1]
    assert ops(s.forward) == {"all_gather": 2, "reduce_scatter": 1}
    # The gradient of the scattered rows is gathered; the one parameter that the backward reads, it reads at once.
    assert ops(s.backward) == {"all_gather": 1, "reduce_scatter": 2}


def sums(group):
    return lambda x, y: funcol.all_reduce(x, "sum", group) + funcol.all_reduce(y, "sum", group)


def test_only_who_asks_has_others_collectives_changed(fake_mesh):
    f = sums(fake_mesh(2).get_group(0).group_name)
    x = torch.ones(4)
    for options, expected in (({}, 1), ({"disable": ["raise"]}, None), ({"passes": ["raise", "lower"]}, 2)):
        torch.compiler.reset()
        with statistics() as s:
            compiled(f, **options)(x, x + 1)
        assert (len(s.forward) if s.records else None) == expected
    torch.compiler.reset()
    with statistics() as s:
        torch.compile(f, fullgraph=True)(x, x + 1)
    assert s.records == []


def test_plain_compile_raises_nothing_beside_our_operators(fake_mesh):
    group = fake_mesh(2).get_group(0).group_name
    f = sums(group)
    x = torch.ones(4)
    with statistics() as s:
        torch.compile(lambda a, b: f(a, b) * torch.ops.dtensor.all_reduce(a, "sum", group), fullgraph=True)(x, x + 1)
    # Nor do they share buckets.
    assert [c.op for c in s.forward] == ["all_reduce"] * 3
    assert "raise" not in [p.name for r in s.records for p in r.passes]
