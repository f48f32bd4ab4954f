"""Random numbers: every placement gives those that one device gives with the same seed.

On real processes, as ranks that are threads share one generator.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtensor
from dtensor import (
    AgreementError,
    DeviceMesh,
    DTensor,
    MeshError,
    Partial,
    Replicate,
    Shard,
    ShardingError,
    distribute_tensor,
    init_device_mesh,
    rules,
)
from dtensor.dispatch.decision import decide
from dtensor.layout.layout import Layout
from dtensor.layout.placements import as_placements
from dtensor.mesh.tensor_spec import Spec, contiguous_stride
from dtensor.rules.sampling import sample
from dtensor.testing import run_threads, with_ranks
from dtensor.torch_private.compiling import inductor_config

aten = torch.ops.aten
SHAPES = [(8, 4), (5, 3), (1, 7), (3, 1, 6)]


def own(draw):
    """`draw(x, generator=…)` with a generator of its own, in the same state on all ranks."""
    return lambda x: draw(x, generator=torch.Generator().manual_seed(11))


def filled(x, part):
    """`x` after a view of it was filled."""
    part.normal_()
    return x


DRAWS = {
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_ of probabilities": lambda x: x.bernoulli_(x.clone()),
    "bernoulli_ of a row": lambda x: x.bernoulli_(x[0].clone()),
    "uniform_": lambda x: x.uniform_(-1, 2),
    "normal_": lambda x: x.normal_(1, 3),
    "exponential_": lambda x: x.exponential_(2.0),
    "log_normal_": lambda x: x.log_normal_(0.5, 1.5),
    "cauchy_": lambda x: x.cauchy_(0.5, 2),
    "geometric_": lambda x: x.geometric_(0.3),
    "random_": lambda x: x.random_(),
    "random_.to": lambda x: x.random_(9),
    "random_.from": lambda x: x.random_(3, 9),
    "random_ of integers": lambda x: x.to(torch.int64).random_(0, 5),
    "functional": lambda x: aten.uniform(x, 0.0, 2.0) + aten.exponential(x) + aten.random(x) + aten.geometric(x, 0.3),
    "functional 2": lambda x: aten.cauchy(x) + aten.log_normal(x) + aten.normal_functional(x, 0.0, 1.0),
    "rand_like": torch.rand_like,
    "rand_like f64": lambda x: torch.rand_like(x, dtype=torch.float64),
    "rand_like of a row": lambda x: torch.rand_like(x[0].expand(3, *x.shape[1:])),
    "rand_like transposed": lambda x: torch.rand_like(x.transpose(0, 1)),
    "randn_like": torch.randn_like,
    "randn_like bf16": lambda x: torch.randn_like(x, dtype=torch.bfloat16),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randint_like.low": lambda x: torch.randint_like(x, 2, 9, dtype=torch.int64),
    "randint_like.Tensor": lambda x: torch.randint_like(x, torch.tensor(7)),
    "bernoulli of probabilities": torch.bernoulli,
    "bernoulli.p": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli.Tensor": lambda x: aten.bernoulli.Tensor(x, x),
    "normal of means": lambda x: torch.normal(x, 2.0),
    "normal of deviations": lambda x: torch.normal(2.0, x),
    "normal of both": lambda x: torch.normal(x, x[0]),
    "poisson": lambda x: torch.poisson(x * 4),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 9), x),
    "gamma": lambda x: torch._standard_gamma(x + 0.5),
    "dirichlet": lambda x: torch._sample_dirichlet(x + 0.5),
    "multinomial": lambda x: torch.multinomial(x.flatten(1) + 0.1, 3, replacement=True),
    "multinomial, each once": lambda x: torch.multinomial(x.flatten() + 0.1, 2),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout, in place": lambda x: F.dropout(x, 0.4, inplace=True),
    "dropout bf16": lambda x: F.dropout(x.bfloat16(), 0.3),
    "dropout 1": lambda x: F.dropout(x, 1.0),
    "dropout, not training": lambda x: F.dropout(x, 0.4, training=False),
    "dropout of a part": lambda x: F.dropout(x[:, ::2], 0.4),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "native_dropout bf16": lambda x: torch.native_dropout(x.bfloat16(), 0.3, True)[0],
    "native_dropout transposed": lambda x: torch.native_dropout(x.transpose(0, 1), 0.4, True)[0],
    "native_dropout, not training": lambda x: torch.native_dropout(x, 0.4, False)[1],
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.4, True),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "rrelu_": lambda x: F.rrelu(x - 0.5, training=True, inplace=True),
    "rrelu transposed": lambda x: F.rrelu(x.transpose(0, 1) - 0.5, training=True),
    "rrelu, not training": lambda x: F.rrelu(x - 0.5),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=-1),
    "new_empty": lambda x: x.new_empty((5, 6)).uniform_(),
    "empty_like": lambda x: torch.empty_like(x).exponential_().log(),
    "a view is filled": lambda x: filled(x, x.transpose(0, 1)),
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "trunc_normal_": nn.init.trunc_normal_,
    "two draws": lambda x: x.uniform_() + torch.randn_like(x),
    "generator: uniform_": own(torch.Tensor.uniform_),
    "generator: rand_like": own(torch.rand_like),
    "generator: bernoulli": own(torch.bernoulli),
    "generator: normal": own(lambda x, generator: torch.normal(x, 1.0, generator=generator)),
    "generator: poisson": own(torch.poisson),
    "generator: xavier_normal_": own(nn.init.xavier_normal_),
    "generator: two draws": own(
        lambda x, generator: torch.rand_like(x, generator=generator) + x.normal_(generator=generator)
    ),
}


def same_numbers(mesh, shape, placements, draws=DRAWS, seed=7):
    for name, draw in draws.items():
        values = torch.linspace(0, 1, torch.Size(shape).numel()).view(shape)
        torch.manual_seed(seed)
        expected = draw(values.clone())
        after = torch.get_rng_state()
        placed = distribute_tensor(values, mesh, placements)
        torch.manual_seed(seed)
        found = draw(placed)
        where = (name, shape, placements)
        assert torch.equal(torch.get_rng_state(), after), f"{where}: the generator is elsewhere afterwards"
        assert found.dtype == expected.dtype, where
        assert torch.equal(found.full_tensor(), expected), where


FEATURES = {
    (4, 3, 5): F.dropout1d,
    (3, 4, 2, 5): F.dropout2d,
    (3, 5, 2, 2, 2): F.dropout3d,
    (2, 3, 4, 2): lambda x: torch.rand_like(x.contiguous(memory_format=torch.channels_last)),
}
"""Shape -> what is drawn for it."""


def same_factories(mesh, shape, placements):
    for ours, theirs in ((dtensor.rand, torch.rand), (dtensor.randn, torch.randn)):
        torch.manual_seed(3)
        expected, after = theirs(shape), torch.rand(3)
        torch.manual_seed(3)
        found = ours(shape, device_mesh=mesh, placements=placements)
        assert torch.equal(torch.rand(3), after)
        assert found.placements == tuple(placements)
        assert torch.equal(found.full_tensor(), expected), (shape, placements)


def same_blocks(mesh, placements):
    """Walking the generator in small blocks gives the numbers of one call, for tails of every length."""
    shapes = [(17,), (16,), (31,), (33,), (100,), (5, 13), (9, 3, 5), (129,)]
    for shape, block, draw in itertools.product(shapes, (16, 32, 48), (torch.rand, torch.randn)):
        for dim in range(len(shape)):
            chosen = [Shard(dim) if p == Shard(0) else p for p in placements]
            layout = Layout.of(as_placements(chosen, mesh.ndim, len(shape)), len(shape))
            spec = Spec.make(mesh, layout, shape, contiguous_stride(shape), torch.float32)
            torch.manual_seed(5)
            expected, after = draw(shape), torch.rand(2)
            torch.manual_seed(5)
            local = sample(draw, spec, block)
            assert torch.equal(torch.rand(2), after), (shape, block, draw)
            found = DTensor(local, mesh, layout, shape, spec.stride)
            assert torch.equal(found.full_tensor(), expected), (shape, block, draw, chosen)


def same_large_fills(mesh, placements, monkeypatch):
    """Fills of large tensors are drawn block by block, with the numbers of one call, and in the operand's place."""
    monkeypatch.setattr(rules.random, "BLOCK", 32)
    drawn = []
    monkeypatch.setattr(rules.random, "sample", lambda draw, spec, block: drawn.append(1) or sample(draw, spec, block))
    names = ("uniform_", "normal_", "random_", "random_ of integers", "log_normal_", "cauchy_", "geometric_")
    names += ("rand_like", "rand_like f64", "randn_like", "randn_like bf16", "two draws", "generator: two draws")
    draws = {name: DRAWS[name] for name in names}
    for shape in ((13, 11), (65, 3), (8, 16), (7, 5, 3)):
        same_numbers(mesh, shape, placements, draws)
    assert len(drawn) == 4 * (len(draws) + 2)
    monkeypatch.undo()


GRADIENTS = {
    "dropout": (lambda x: F.dropout(x, 0.4), (5, 3)),
    "dropout bf16": (lambda x: F.dropout(x.bfloat16(), 0.3).float(), (5, 3)),
    "dropout, in place": (lambda x: F.dropout(x * 1, 0.4, inplace=True), (5, 3)),
    "native_dropout": (lambda x: torch.native_dropout(x, 0.4, True)[0], (5, 3)),
    "two": (lambda x: F.dropout(F.dropout(x, 0.2).relu(), 0.3), (8, 6)),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.4, training=True), (5, 3)),
    "feature_alpha_dropout": (lambda x: F.feature_alpha_dropout(x, 0.4, training=True), (5, 3, 2)),
    "dropout2d": (lambda x: F.dropout2d(x, 0.4), (4, 3, 2, 5)),
    "rrelu": (lambda x: F.rrelu(x - 0.5, training=True), (5, 3)),
    "rrelu_": (lambda x: F.rrelu(x - 0.5, training=True, inplace=True), (5, 3)),
    "gumbel_softmax": (F.gumbel_softmax, (5, 3)),
    "noise": (lambda x: x + torch.randn_like(x) * x, (5, 3)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), (4, 2, 6, 8)),
}


def trained(fn, x):
    """Value and gradient after seeding, and the generator's state."""
    torch.manual_seed(3)
    out = fn(x)
    (out * out.detach().cos()).sum().backward()
    return out.detach(), x.grad, torch.get_rng_state()


def same_gradients(mesh, placements, names, **compiling):
    for name in names:
        fn, shape = GRADIENTS[name]
        values = torch.linspace(0, 1, torch.Size(shape).numel()).view(shape)
        expected = trained(fn, values.clone().requires_grad_())
        if compiling:
            torch.compiler.reset()
            fn = torch.compile(fn, fullgraph=True, **compiling)
        out, grad, state = trained(fn, distribute_tensor(values, mesh, placements).requires_grad_())
        where = f"{name} {placements} {compiling}"
        torch.testing.assert_close({where: out.full_tensor()}, {where: expected[0]})
        torch.testing.assert_close({where: grad.full_tensor()}, {where: expected[1]})
        assert torch.equal(state, expected[2]), where


def attention_with_dropout(mesh, placements):
    q, k, v = (torch.linspace(0, i + 1, 2 * 4 * 3 * 8).sin().view(2, 4, 3, 8) for i in range(3))
    torch.manual_seed(1)
    expected = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    found = F.scaled_dot_product_attention(*(distribute_tensor(x, mesh, placements) for x in (q, k, v)), dropout_p=0.5)
    torch.testing.assert_close(found.full_tensor(), expected)


@pytest.mark.parametrize("shapes", [SHAPES[1:3], pytest.param(SHAPES, marks=pytest.mark.nightly)], ids=["few", "all"])
@with_ranks(2)
def test_on_two_ranks(rank, shapes):
    mesh = init_device_mesh("cpu", (2,))
    for shape in shapes:
        for p in [Replicate(), *map(Shard, range(len(shape)))]:
            same_numbers(mesh, shape, [p])
            same_factories(mesh, shape, [p])
    for shape, draw in FEATURES.items():
        for p in [Replicate(), *map(Shard, range(len(shape)))]:
            same_numbers(mesh, shape, [p], {"features": draw})
    for p in (Replicate(), Shard(0)):
        same_blocks(mesh, [p])
    for p in (Shard(0), Shard(1)):
        same_large_fills(mesh, [p], pytest.MonkeyPatch())
    for p in (Shard(0), Shard(1), *([Replicate()] if shapes == SHAPES else [])):
        same_gradients(mesh, [p], GRADIENTS)
        attention_with_dropout(mesh, [p])
    parts = DTensor.from_local(torch.ones(4) * rank, mesh, [Partial()])
    torch.manual_seed(2)
    expected = torch.rand(4)
    torch.manual_seed(2)
    assert torch.equal(torch.rand_like(parts).full_tensor(), expected)
    torch.manual_seed(2)
    assert torch.equal(parts.uniform_().full_tensor(), expected)
    assert parts.placements == (Partial(),)


@pytest.mark.nightly
@with_ranks(4)
def test_on_two_axes(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)]):
        same_numbers(mesh, (5, 3), placements)
        same_factories(mesh, (5, 3), placements)
    same_blocks(mesh, [Shard(0), Shard(0)])
    same_gradients(mesh, [Shard(0), Shard(1)], ("dropout", "rrelu_", "attention"))
    attention_with_dropout(mesh, [Shard(0), Shard(1)])


MORE = ("two", "alpha_dropout", "dropout2d", "rrelu")


@pytest.mark.parametrize("more", [(), pytest.param(MORE, marks=pytest.mark.nightly)], ids=["few", "all"])
@with_ranks(2)
def test_compiled(rank, more):
    mesh = init_device_mesh("cpu", (2,))
    same_gradients(mesh, [Shard(0)], ("dropout bf16", "rrelu_", "noise", "attention", *more), backend="aot_eager")
    same_gradients(mesh, [Shard(1)], ("two", "rrelu"), backend="aot_eager")
    # Random numbers of Inductor's own are others than torch's.
    with inductor_config.patch(fallback_random=True):
        same_gradients(mesh, [Shard(0)], ("two",))
    draws = {name: DRAWS[name] for name in ("normal_", "bernoulli_ of probabilities", "multinomial", "functional")}
    draws = {name: torch.compile(draw, backend="aot_eager", fullgraph=True) for name, draw in draws.items()}
    for seed in (1, 2):
        same_numbers(mesh, (5, 3), [Shard(0)], draws, seed)


@with_ranks(2)
def test_seeds_and_states(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))
    dtensor.random.manual_seed(5, mesh)
    dtensor.random.check_states(mesh)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))
    with pytest.raises(AgreementError, match=r"different seeds .*\{0: 0, 1: 1\}; replicas would differ"):
        dtensor.random.manual_seed(rank, mesh)
    dtensor.random.check_states(mesh)
    # Stages of a pipeline may have seeds of their own.
    dtensor.random.manual_seed(rank, mesh["tp"])
    assert torch.initial_seed() == rank
    with pytest.raises(ShardingError, match="the generators are in different states on the ranks of the mesh"):
        dtensor.random.check_states(mesh)
    dtensor.random.manual_seed(3)
    dtensor.random.check_states(mesh)
    one = DeviceMesh("cpu", [0])
    if rank == 0:
        dtensor.random.manual_seed(1, one)
    else:
        with pytest.raises(MeshError, match="manual_seed: rank 1 is not in"):
            dtensor.random.manual_seed(1, one)


def fused_dropout(rank, dropout):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(2, 4, 3, 8), mesh, [Shard(1)])
    func = aten._scaled_dot_product_flash_attention.default
    return decide(func, (x, x, x, dropout), {}).outputs[0].layout.text


def test_fused_attention_with_dropout_runs_whole():
    """The kernels count their random numbers from the start of what they are given."""
    assert run_threads(fused_dropout, 2, 0.5) == ["R", "R"]
    assert run_threads(fused_dropout, 2, 0.0) == ["S(1)", "S(1)"]


@with_ranks(4)
def test_rrelu_in_place_on_a_partial_shard(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    x = torch.linspace(-2, 2, 8)
    torch.manual_seed(3)
    expected = F.rrelu(x.clone(), 0.1, 0.9, training=True)
    part = distribute_tensor(x, mesh, [Replicate(), Shard(0)]).to_local() * (rank // 2)
    y = DTensor.from_local(part, mesh, [Partial(), Shard(0)])
    dtensor.random.manual_seed(3)
    F.rrelu_(y, 0.1, 0.9, training=True)
    torch.testing.assert_close(y.full_tensor(), expected)
