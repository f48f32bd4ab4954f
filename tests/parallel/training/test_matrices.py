"""Whole matrices that are sharded: what `map_matrices` computes, sends and refuses; Muon by it, bit for bit."""

import pytest
import torch
from torch import nn

from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.parallel import map_matrices
from dtensor.testing import CountCollectives, with_ranks, with_threads

SHAPES = [(6, 4)] * 3 + [(4, 6)] * 2 + [(7, 3)]


def values(shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def sharded(mesh, *placements):
    return [distribute_tensor(x, mesh, p) for x, p in zip(values(), placements, strict=True)]


def gram(x):
    return (x @ x.t()) @ x


def check(mesh, placements):
    given = sharded(mesh, *placements)
    found = map_matrices(gram, given)
    for x, y, z in zip(values(), given, found):
        assert isinstance(z, DTensor)
        assert tuple(z.placements) == tuple(y.placements)
        assert torch.equal(z.full_tensor(), gram(x))


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_placement(ranks):
    @with_threads(ranks)
    def run(rank):
        mesh = init_device_mesh("cpu", (ranks,))
        rows, columns = [Shard(0)], [Shard(1)]
        check(mesh, [rows] * 6)
        check(mesh, [rows, columns, rows, columns, [Replicate()], columns])

    run()


@with_threads(4)
def test_two_axes(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    both, one = [Shard(0), Shard(1)], [Replicate(), Shard(0)]
    check(mesh, [both, both, [Shard(0), Shard(0)], one, one, [Shard(1), Replicate()]])


@with_threads(2)
def test_plain_and_sharded_matrices_keep_their_order(rank):
    mesh = init_device_mesh("cpu", (2,))
    a, b, c, *_ = values()
    found = map_matrices(gram, [a, distribute_tensor(b, mesh, [Shard(0)]), c])
    assert torch.equal(found[0], gram(a))
    assert torch.equal(found[1].full_tensor(), gram(b))
    assert torch.equal(found[2], gram(c))
    assert map_matrices(gram, []) == []


@with_threads(2)
def test_sums_are_added_up_first(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = values()[0]
    (found,) = map_matrices(gram, [DTensor.from_local(x, mesh, [Partial()])])
    assert tuple(found.placements) == (Replicate(),)
    assert torch.equal(found.full_tensor(), gram(2 * x))


@with_threads(2)
def test_several_tensors_at_once(rank):
    """As Shampoo needs it: a gradient and a state of another shape, both of which are returned."""
    mesh = init_device_mesh("cpu", (2,))
    grads = values([(4, 3)] * 3)
    states = values([(4, 4)] * 3, seed=1)

    def update(grad, state):
        state = state + grad @ grad.t()
        return state @ grad, state

    new, kept = map_matrices(
        update,
        [distribute_tensor(x, mesh, [Shard(0)]) for x in grads],
        [distribute_tensor(x, mesh, [Shard(1)]) for x in states],
    )
    for grad, state, a, b in zip(grads, states, new, kept):
        assert (a.placements[0], b.placements[0]) == (Shard(0), Shard(1))
        assert torch.equal(a.full_tensor(), update(grad, state)[0])
        assert torch.equal(b.full_tensor(), update(grad, state)[1])


@with_threads(4)
def test_bytes_and_work(rank):
    """Eight matrices on four ranks: each computes two; an all-to-all there and one back for each four."""
    mesh = init_device_mesh("cpu", (4,))
    given = [distribute_tensor(x, mesh, [Shard(0)]) for x in values([(8, 8)] * 8)]
    calls = []
    with CountCollectives() as counted:
        found = map_matrices(lambda x: calls.append(x) or x * 2, given)
        assert torch.equal(found[5].to_local(), given[5].to_local() * 2)
    assert len(calls) == 2
    assert [c.op for c in counted.collectives] == ["all_to_all"] * 4
    assert sum(c.bytes for c in counted.collectives) == 2 * 8 * (8 * 8 * 4) // 4 * 3 // 4


@with_threads(4)
def test_replicated_matrices_are_divided_too(rank):
    """Of eight matrices, replicated over one axis and sharded over the other, each of four ranks computes two."""
    mesh = init_device_mesh("cpu", (2, 2))
    given = [distribute_tensor(x, mesh, [Replicate(), Shard(0)]) for x in values([(8, 8)] * 8)]
    calls = []
    with CountCollectives() as counted:
        found = map_matrices(lambda x: calls.append(x) or x * 2, given)
        assert all(torch.equal(y.to_local(), x.to_local() * 2) for x, y in zip(given, found))
    assert len(calls) == 2
    assert sorted({c.op for c in counted.collectives}) == ["all_gather", "all_to_all"]


@with_threads(2)
def test_refusals(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(values()[0], mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"lists of one length.*got 1, 2"):
        map_matrices(gram, [x], [x, x])
    with pytest.raises(ValueError, match=r"lists of one length.*got none"):
        map_matrices(gram)
    with pytest.raises(TypeError, match="one holds 3"):
        map_matrices(gram, [3])
    with pytest.raises(ValueError, match=r"only some of them are DTensors; write distribute_tensor"):
        map_matrices(lambda a, b: a, [x], [values()[0]])
    with pytest.raises(ValueError, match=r"shape of its first argument.*\[6, 4\].*\(6, 6\)"):
        map_matrices(lambda a: a @ a.t(), [x])


def train(parameters, gradients, compiled=None):
    optimizer = torch.optim.Muon(parameters, lr=0.1)
    step = optimizer.step if compiled is None else torch.compile(optimizer.step, backend="dtensor", options=compiled)
    for k in range(3):
        for p, grad in zip(parameters, gradients(k)):
            p.grad = grad
        step()


def muon(mesh, placements, compiled=None):
    """Parameters of Muon after three steps on one device and sharded; gradients are the same."""
    plain = [nn.Parameter(x) for x in values()]
    ours = [nn.Parameter(x) for x in sharded(mesh, *placements)]
    train(plain, lambda k: values(seed=k + 1))
    train(ours, lambda k: [distribute_tensor(x, mesh, p) for x, p in zip(values(seed=k + 1), placements)], compiled)
    return plain, ours


@with_threads(4)
def test_muon_has_the_bits_of_one_device(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    both, one = [Shard(0), Shard(1)], [Replicate(), Shard(0)]
    for placements in ([both] * 6, [one, both, one, [Shard(0), Shard(0)], one, [Replicate(), Replicate()]]):
        for a, b in zip(*muon(mesh, placements)):
            assert torch.equal(a, b.full_tensor())


@pytest.mark.nightly
@with_ranks(2)
def test_muon_compiled_has_the_bits_of_one_device(rank):
    mesh = init_device_mesh("cpu", (2,))
    for a, b in zip(*muon(mesh, [[Shard(0)]] * 6, {"inner": "aot_eager"})):
        assert torch.equal(a, b.full_tensor())


@with_threads(2)
def test_muon_sends_a_quarter_of_what_its_parameters_are(rank):
    mesh = init_device_mesh("cpu", (2,))
    parameters = [nn.Parameter(distribute_tensor(x, mesh, [Shard(0)])) for x in values([(8, 8)] * 6)]
    optimizer = torch.optim.Muon(parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    with CountCollectives() as counted:
        optimizer.step()
    assert {c.op for c in counted.collectives} == {"all_to_all"}
    assert sum(c.bytes for c in counted.collectives) == 6 * 64 * 4 // 4
