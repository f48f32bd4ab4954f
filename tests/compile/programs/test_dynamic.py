"""Symbolic sizes: a view keeps its shard under a guard on divisibility, and one graph serves all sizes that pass it."""

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from dtensor import DTensor, Partial, Replicate, Shard, distribute_model, distribute_tensor, init_device_mesh
from dtensor.compile import statistics
from dtensor.mesh.caches import clear_caches
from dtensor.testing import ModelArgs, Transformer, fake_ranks, with_ranks
from dtensor.torch_private.symbolic_sizes import binary_products


@pytest.fixture
def mesh(fake_mesh):
    return fake_mesh(2)


def rows(mesh, n):
    return DTensor.from_local(torch.arange(n / 2 * 6).view(n // 2, 6), mesh, [Shard(0)])


VIEWS = {
    "split": lambda x: x.view(x.shape[0] // 2, 2, 6),
    "merge": lambda x: x.view(x.shape[0] * 6),
    "flatten and back": lambda x: (x + 1).flatten().view(-1, 3, 2).transpose(1, 2),
    "heads": lambda x: x.view(x.shape[0] // 4, 4, 3, 2).transpose(1, 2).reshape(x.shape[0] // 4, 3, 8),
}


@pytest.mark.parametrize("name", VIEWS)
def test_one_graph_for_sizes_that_divide(mesh, name):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(VIEWS[name], backend=counter, fullgraph=True)
    for n in (8, 16, 24, 40, 64):
        x = rows(mesh, n)
        found = compiled(x)
        assert found.placements == (Shard(0),)
        assert torch.equal(found.to_local(), VIEWS[name](x.to_local()))
    assert counter.frame_count <= 2


def test_another_graph_where_the_guard_fails(mesh):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(VIEWS["split"], backend=counter, fullgraph=True)
    for n in (8, 16, 24):
        compiled(rows(mesh, n))
    graphs = counter.frame_count
    found = compiled(rows(mesh, 10))
    # The five rows are not cut evenly: the shard moves to the columns, which is cheaper than a gather.
    assert (found.shape, found.placements) == ((5, 2, 6), (Shard(2),))
    assert counter.frame_count == graphs + 1


def test_a_forward_asks_no_tangent_for_a_length(mesh):
    """Of the inputs none tells how long the part of the rows is that the second norm is of; its tangent would."""
    x = distribute_tensor(torch.ones(9, 2), mesh, [Shard(1)]).requires_grad_()
    f = torch.compile(
        lambda x: (F.normalize(x, dim=0), F.normalize(x, dim=1)), backend="aot_eager", fullgraph=True, dynamic=True
    )
    columns, rows = f(x)
    assert (columns.placements, rows.placements) == ((Shard(1),), (Shard(0),))
    (columns.sum() + rows.sum()).backward()
    assert x.grad.shape == (9, 2)


def test_a_forward_asks_no_tangent_for_a_product_of_lengths(mesh):
    """The first result is as long as all that this rank has, and nothing else is: its tangent was asked."""

    def program(x, y):
        x = x.reshape(-1)
        return torch.outer(x, y), x.sort(0).values

    f = torch.compile(program, backend="aot_eager", fullgraph=True)
    y = distribute_tensor(torch.ones(9), mesh, [Shard(0)]).requires_grad_()
    for n in (0, 4, 6):
        x = distribute_tensor(torch.ones(n, 9), mesh, [Shard(0)]).requires_grad_()
        a, b = f(x, y)
        (a.sum() + b.sum()).backward()
        assert (a.shape, b.shape, x.grad.shape) == ((9 * n, 9), (9 * n,), (n, 9))


@pytest.mark.parametrize("rank", [0, 3])
def test_the_rows_of_a_part_of_a_part(rank):
    """Three rows over two axes of two: the first part of the first part has one, like its rank, the last has none."""

    def ordered(x):
        return torch.take_along_dim(x, x.argsort(1), 1)

    torch.compiler.reset()
    clear_caches()  # they know process groups of other tests by name
    with fake_ranks(4, rank):
        mesh = init_device_mesh("cpu", (2, 2))
        f = torch.compile(ordered, backend="aot_eager", fullgraph=True, dynamic=True)
        for n in (8, 3, 5):
            x = DTensor.from_local(
                distribute_tensor(torch.ones(n, 4), mesh, [Shard(0), Replicate()]).to_local(),
                mesh,
                [Shard(0), Partial()],
                shape=(n, 4),
                stride=(4, 1),
            )
            assert f(x).to_local().shape == ordered(x).to_local().shape


@pytest.mark.parametrize("backend", ["dtensor", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_a_graph_from_the_cache_serves_the_sizes_it_was_made_for(fake_mesh, backend):
    """Guards of a cached graph are written in global sizes, which its callers pass; also after a restart."""
    mesh = fake_mesh(2, 2)

    def gathered(x):
        return x.redistribute(placements=[Replicate(), Shard(0)]) + 1

    with fresh_cache():
        for hits in (0, 2):
            torch.compiler.reset()
            counters.clear()
            compiled = torch.compile(gathered, backend=backend, fullgraph=True, dynamic=True)
            for n in (8, 12, 6, 16):
                x = distribute_tensor(torch.arange(float(n)), mesh, [Shard(0), Shard(0)])
                assert compiled(x).to_local().shape == gathered(x).to_local().shape
            assert counters["inductor"]["fxgraph_cache_hit"] == hits


IMAGES = ((4, 9), (3, 7), (5, 8))
"""Number and size."""


@pytest.mark.parametrize("computed", [False, True])
@with_ranks(2)
def test_a_view_that_is_cut_comes_in(rank, computed):
    """Torch makes fake views from fake bases, and the sizes of locals twice."""
    mesh = init_device_mesh("cpu", (2,))
    w = distribute_tensor(torch.sin(torch.arange(60.0)).view(5, 12), mesh, [Replicate()])
    run = torch.compile(lambda x: F.linear(x, w), backend="dtensor", dynamic=True, options={"inner": "aot_eager"})
    for n in (2, 4, 3):
        x = torch.cos(torch.arange(6.0 * n * 12)).view(6, n, 12)
        base = distribute_tensor(x, mesh, [Shard(1)])
        base = base * 1 if computed else base
        expected = F.linear(x.transpose(0, 1), w.full_tensor())
        torch.testing.assert_close(run(base.transpose(0, 1)).full_tensor(), expected)


def check_images(plain, plan, inner, sizes, channels=3, order=torch.contiguous_format):
    """What is computed of images, and the gradients, are those of the plain model."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = distribute_model(copy.deepcopy(plain), mesh, plan, outputs={})
    run = torch.compile(model, backend="dtensor", dynamic=True, options={"inner": inner})
    for n, size in sizes:
        x = torch.sin(torch.arange(n * channels * size**2).double()).view(n, channels, size, size)
        x = x.contiguous(memory_format=order)
        found, expected = run(x), plain(x)
        torch.testing.assert_close(found, expected)
        found.sin().sum().backward(), expected.sin().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@pytest.mark.parametrize(
    ("order", "inner", "layers"),
    [
        pytest.param(torch.channels_last, "aot_eager", 3, id="channels_last", marks=pytest.mark.nightly),
        pytest.param(torch.channels_last, "aot_eager", 5, id="deeper", marks=pytest.mark.nightly),
        pytest.param(torch.contiguous_format, "inductor", 5, id="inductor", marks=pytest.mark.nightly),
    ],
)
@with_ranks(2)
def test_images_of_any_number_and_size(rank, order, inner, layers):
    """Norms of groups of channels, forward and backward. By day of sharded channels; partial ones are in the test of
    strides."""
    torch.manual_seed(0)
    first, norm, then = nn.Conv2d(3, 12, 3, padding=1), nn.GroupNorm(4, 12), nn.Conv2d(12, 6, 3, stride=2)
    plain = nn.Sequential(first, norm, nn.SiLU(), then, nn.GroupNorm(3, 6))[:layers].double().to(memory_format=order)
    plan = {"[01].*": {"tp": Shard(0)}} | ({"3.weight": {"tp": Shard(1)}} if layers > 3 else {})
    check_images(plain, plan, inner, IMAGES[: layers - 1], order=order)


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [IMAGES[:1], IMAGES[:2]])
@with_ranks(2)
def test_inductor_does_not_ask_for_strides_of_what_is_sent(rank, sizes):
    """It would ask in which order in memory what an all-to-all sends is, and torch has no answer: that of two strides
    one divides the other it writes with their quotient, which it cannot bound."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.GroupNorm(3, 6)).double()
    check_images(plain, {"0.weight": {"tp": Shard(1)}}, "inductor", sizes, channels=4)


@pytest.mark.nightly
@pytest.mark.parametrize(("inner", "grad"), [("aot_eager", False), ("aot_eager", True), ("inductor", False)])
@with_ranks(2)
def test_sequence_of_any_even_length(rank, inner, grad):
    """Shards of a length that is a symbol: half of it is the same expression in whatever made them.

    Under Inductor, which takes minutes for more, the forward only.
    """
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = Transformer(ModelArgs(dropout_p=0.0, vocab_size=32, max_seq_len=32, n_layers=1))
    model = Transformer.parallelize(model, mesh, True)
    compiled = torch.compile(model, backend="dtensor", fullgraph=True, options={"inner": inner})
    with statistics() as s, torch.set_grad_enabled(grad):
        for length in (16, 12, 24):
            tokens = torch.arange(2 * length).view(2, length) % 32
            torch.testing.assert_close(compiled(tokens), model(tokens))
    assert s.graphs == 2


def test_a_product_of_three_sizes_is_a_product_of_two_products():
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    a.meta["val"], b.meta["val"] = 3, 5
    graph.output(graph.call_function(operator.mul, (2, a, b)))
    binary_products(graph)
    made = graph.find_nodes(op="call_function", target=operator.mul)
    assert [len(node.args) for node in made] == [2, 2]
    assert made[0].meta["val"] == 6
    gm = torch.fx.GraphModule({}, graph)
    assert gm(3, 5) == torch.fx.Interpreter(gm).run(3, 5) == 30


@pytest.mark.nightly
def test_sequence_parallel_in_any_batch(mesh):
    args = ModelArgs(dropout_p=0.0, vocab_size=13, max_seq_len=8, n_layers=1, dim=12, n_heads=2, weight_tying=False)
    model = Transformer.parallelize(Transformer(args).eval(), mesh, True)
    compiled = torch.compile(model, backend="dtensor", options={"inner": "aot_eager"}, fullgraph=True, dynamic=True)
    with torch.no_grad():
        assert compiled(torch.zeros(4, 8, dtype=torch.int64)).shape == (4, 8, 13)
