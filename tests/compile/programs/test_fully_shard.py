"""Fully sharded models compiled: what is communicated when, what is kept, and the numbers of eager mode."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtensor import DTensor, Shard, init_device_mesh
from dtensor.compile import statistics
from dtensor.parallel import ColwiseParallel, MixedPrecisionPolicy, RowwiseParallel, fully_shard, parallelize_module
from dtensor.testing import CountCollectives, with_ranks
from tests.testing.generated import products_while_under_way, starts_and_waits

LAYERS, WIDTH = 3, 16


class Layer(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Deep(nn.Module):
    """Layers that are recomputed in the backward where `context` says what of them is kept."""

    def __init__(self, width=WIDTH, context=None, layers=LAYERS):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])
        self.context = context

    def forward(self, x):
        for layer in self.layers:
            again = {} if self.context is None else {"context_fn": self.context, "use_reentrant": False}
            x = checkpoint(layer, x, **again) if again else layer(x)
        return x


def by_layer(mesh, model=None, **options):
    model = model or Deep()
    for layer in model.layers:
        fully_shard(layer, mesh, **options)
    return fully_shard(model, mesh, **options)


def data(rank=0, rows=8, width=WIDTH):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rank))


def ops(found):
    return dict(Counter(c.op for c in found))


def over(found):
    """Counts by operator and number of ranks."""
    return dict(Counter(f"{c.op} {c.group_size}" for c in found))


def train(model, x, **options):
    """What a compiled step communicates, in one graph."""
    torch.compiler.reset()
    options = {"inner": "aot_eager", **options}
    compiled = torch.compile(model, backend="dtensor", fullgraph=True, options=options)
    with statistics() as s:
        compiled(x).square().sum().backward()
    assert (s.graphs, s.graph_breaks) == (1, 0)
    return s


WEIGHTS = 3 * LAYERS
AGAIN = WEIGHTS - 1 - 2
"""There is no gradient of the input, so that nothing needs the first norm but its sum; the last two are kept."""


def test_each_parameter_is_gathered_and_gathered_again(fake_mesh):
    s = train(by_layer(fake_mesh(4)), data(), disable=["bucket"])
    assert ops(s.forward) == {"all_gather": WEIGHTS}
    assert ops(s.backward) == {"all_gather": AGAIN, "reduce_scatter": WEIGHTS}


def test_small_ones_travel_together(fake_mesh):
    s = train(by_layer(fake_mesh(4)), data())
    assert ops(s.forward) == {"all_gather": 1}
    assert ops(s.backward) == {"all_gather": 1, "reduce_scatter": 1}


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_what_is_gathered_can_be_kept(fake_mesh, inner):
    s = train(by_layer(fake_mesh(4), reshard_after_forward=False), data(), inner=inner, disable=["bucket"])
    assert ops(s.forward) == {"all_gather": WEIGHTS}
    assert ops(s.backward) == {"reduce_scatter": WEIGHTS}


def test_kept_in_one_layer_only(fake_mesh):
    mesh, model = fake_mesh(4), Deep()
    fully_shard(model.layers[1], mesh, reshard_after_forward=False)
    s = train(fully_shard(model, mesh), data(), disable=["bucket"])
    assert ops(s.backward) == {"all_gather": AGAIN - 3, "reduce_scatter": WEIGHTS}


def test_hybrid(fake_mesh):
    mesh = fake_mesh(2, 4)
    s = train(by_layer(mesh), data(), disable=["bucket"])
    assert over(s.forward) == {"all_gather 4": WEIGHTS}
    assert over(s.backward) == {"all_gather 4": AGAIN, "reduce_scatter 4": WEIGHTS, "all_reduce 2": WEIGHTS}
    s = train(by_layer(mesh), data())
    assert over(s.forward) == {"all_gather 4": 1}
    assert over(s.backward) == {"all_gather 4": 1, "reduce_scatter 4": 1, "all_reduce 2": 1}
    scattered, reduced = (next(c.bytes for c in s.backward if c.op == op) for op in ("reduce_scatter", "all_reduce"))
    # Of n bytes, each of 4 ranks sends 3/4 n; of the n/4 that are left to it, as much again goes over 2 replicas.
    assert scattered == 3 * reduced


def bytes_of(found, op):
    return sum(c.bytes for c in found if c.op == op)


def test_mixed_precision_casts_before_gathers(fake_mesh):
    mesh = fake_mesh(4)
    full = train(by_layer(mesh), data())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    half = train(by_layer(mesh, mp_policy=policy), data())
    assert 2 * bytes_of(half.forward, "all_gather") == bytes_of(full.forward, "all_gather")
    assert 2 * bytes_of(half.backward, "all_gather") == bytes_of(full.backward, "all_gather")
    assert bytes_of(half.backward, "reduce_scatter") == bytes_of(full.backward, "reduce_scatter")
    default = train(by_layer(mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), data())
    assert bytes_of(default.backward, "reduce_scatter") == bytes_of(full.backward, "reduce_scatter")
    lower = train(by_layer(mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)), data())
    assert 2 * bytes_of(lower.backward, "reduce_scatter") == bytes_of(full.backward, "reduce_scatter")


@pytest.mark.nightly
def test_no_reduction_while_gradients_accumulate(fake_mesh):
    model = by_layer(fake_mesh(2, 2))
    model.set_requires_gradient_sync(False)
    assert ops(train(model, data()).backward) == {"all_gather": 1}
    model.zero_grad()
    model.set_requires_all_reduce(False)
    assert ops(train(model, data()).backward) == {"all_gather": 1, "reduce_scatter": 1}


def test_a_cycle_of_backwards_takes_one_graph_and_one_reduction(fake_mesh):
    model = by_layer(fake_mesh(4))
    torch.compiler.reset()
    compiled = torch.compile(model, backend="dtensor", fullgraph=True, options={"inner": "aot_eager"})
    with statistics() as s:
        for _ in range(2):
            model.zero_grad()
            for last in (False, False, True):
                model.set_requires_gradient_sync(last)
                loss = compiled(data()).square().sum()
                with CountCollectives() as counted:
                    loss.backward()
                assert ops(counted.collectives).get("reduce_scatter", 0) == last * WEIGHTS
            assert {p.grad.placements for p in model.parameters()} == {(Shard(0),)}
    assert s.graphs == 1
    assert ops(s.backward) == {"all_gather": 1}


def test_a_tied_weight_is_gathered_once(fake_mesh):
    model = nn.Sequential(nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 8, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model, fake_mesh(4))
    s = train(model, torch.arange(8))
    assert ops(s.forward) == {"all_gather": 1}
    assert ops(s.backward) == {"all_gather": 1, "reduce_scatter": 1}


class Products(nn.Module):
    def __init__(self, width):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(2 * LAYERS)])

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            x = layer(x) if k % 2 else torch.relu(layer(x))
        return x


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_weights_are_gathered_one_ahead(fake_mesh, shape):
    model = fully_shard(Products(64), fake_mesh(*shape))
    torch.compiler.reset()
    options = {"disable": ["bucket"]}
    compiled = torch.compile(model, backend="dtensor", fullgraph=True, options=options)
    _, codes = run_and_get_code(lambda: compiled(data(width=64)).square().sum().backward())
    forward, backward = map(starts_and_waits, codes)
    # From the second on, each is started before the one ahead of it is waited for, and the product is in between:
    # never more than two whole weights are held.
    assert forward == "SS" + "WmS" * (2 * LAYERS - 2) + "WmWm"
    if len(shape) == 1:
        # A product lies between each start and its wait, but for the last gradient's, after which there is none.
        *under_way, last = products_while_under_way(codes[1])
        assert min(under_way) > 0
        assert last == 0
    else:
        # What was scattered a layer ago arrives; its sum over replicas starts then, and is waited for at the end.
        assert backward.count("WSSSWmm") == 2 * LAYERS - 4
        assert backward.endswith("S" + "W" * 2 * LAYERS)


def two_dimensional(mesh, order, data_axes="dp"):
    model = Deep()
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    if order == "styles first":
        parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh[data_axes])
    if order == "styles last":
        parallelize_module(model, mesh["tp"], plan)
    return model


@pytest.mark.parametrize("order", ["styles first", pytest.param("styles last", marks=pytest.mark.nightly)])
def test_beside_tensor_parallelism(fake_mesh, order):
    mesh = fake_mesh(4, 2, names=("dp", "tp"))
    s = train(two_dimensional(mesh, order), data(), disable=["bucket"])
    assert over(s.forward) == {"all_gather 4": WEIGHTS, "all_reduce 2": LAYERS}
    assert over(s.backward) == {
        "all_gather 4": AGAIN,
        "reduce_scatter 4": WEIGHTS,
        "all_reduce 2": LAYERS,
    }
    s = train(two_dimensional(mesh, order), data())
    assert over(s.forward) == {"all_gather 4": 1, "all_reduce 2": LAYERS}
    assert over(s.backward) == {"all_gather 4": 1, "reduce_scatter 4": 1, "all_reduce 2": LAYERS}


def test_hybrid_beside_tensor_parallelism(fake_mesh):
    mesh = fake_mesh(3, 4, 2, names=("replicate", "shard", "tp"))
    s = train(two_dimensional(mesh, "styles first", ("replicate", "shard")), data())
    assert over(s.forward) == {"all_gather 4": 1, "all_reduce 2": LAYERS}
    assert over(s.backward) == {"all_gather 4": 1, "reduce_scatter 4": 1, "all_reduce 3": 1, "all_reduce 2": LAYERS}


def keep_products(ctx, op, *args, **kwargs):
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective():
    return create_selective_checkpoint_contexts(keep_products)


def everything():
    return create_selective_checkpoint_contexts([])


@pytest.mark.parametrize("context", [selective, everything, pytest.param(None, marks=pytest.mark.nightly)])
def test_checkpointed_layers(fake_mesh, context):
    model = fully_shard(Deep(context=context), fake_mesh(4))
    s = train(model, data(), disable=["bucket"])
    assert ops(s.forward) == {"all_gather": WEIGHTS}
    assert ops(s.backward)["reduce_scatter"] == WEIGHTS
    # Nothing is gathered three times.
    assert AGAIN <= ops(s.backward)["all_gather"] <= WEIGHTS


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_random_numbers_are_those_of_the_forward_in_a_checkpointed_layer(fake_mesh, inner):
    model = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Dropout(0.5)), fake_mesh(1))

    def run(x):
        return checkpoint(model, x, use_reentrant=False)

    x = data().requires_grad_()
    out = torch.compile(run, backend="dtensor", fullgraph=True, options={"inner": inner})(x)
    out.sum().backward()
    assert 0 < (out == 0).sum() < out.numel()
    # Linear in x, so that this is the output itself if the same elements were dropped.
    torch.testing.assert_close(torch.mul(x.grad, x).sum(), out.sum())


POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


VARIANTS = {
    "checkpointed": lambda mesh: (fully_shard(Deep(WIDTH + 1, selective), mesh._flatten()), WIDTH + 1),
    "hsdp, bf16": lambda mesh: (by_layer(mesh, Deep(layers=1), mp_policy=POLICY), WIDTH),
    "2d": lambda mesh: (two_dimensional(mesh, "styles last"), WIDTH),
}


@pytest.mark.parametrize(
    "name", ["hsdp, bf16", *[pytest.param(name, marks=pytest.mark.nightly) for name in ("checkpointed", "2d")]]
)
@with_ranks(4)
def test_numbers_on_real_ranks(rank, name):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, width = VARIANTS[name](mesh)
    x = data(rank // 2 if name == "2d" else rank, width=width)
    model(x).square().mean().backward()
    single = Deep(width, layers=len(model.layers))
    ranks = range(2) if name == "2d" else range(4)
    torch.stack([single(data(r, width=width)).square().mean() for r in ranks]).mean().backward()
    loose = {"atol": 0.05, "rtol": 0.05} if "bf16" in name else {"atol": 1e-5, "rtol": 1e-4}
    found = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, backend="dtensor", fullgraph=True, options={"inner": "aot_eager"})
    compiled(x).square().mean().backward()
    for n, p in model.named_parameters():
        assert isinstance(p.grad, DTensor)
        assert p.grad.placements == p.placements == found[n].placements
        want = single.get_parameter(n).grad
        for grad in (found[n], p.grad):
            torch.testing.assert_close(grad.full_tensor(), want, **loose)


@with_ranks(2)
def test_numbers_of_a_cycle_of_backwards(rank):
    model, single = by_layer(init_device_mesh("cpu", (2,))), Deep()
    compiled = torch.compile(model, backend="dtensor", fullgraph=True, options={"inner": "aot_eager"})
    for _ in range(2):
        model.zero_grad()
        single.zero_grad()
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            compiled(data(2 * step + rank)).square().mean().backward()
            torch.stack([single(data(2 * step + r)).square().mean() for r in range(2)]).mean().backward()
        for name, p in model.named_parameters():
            assert p.grad.placements == p.placements
            torch.testing.assert_close(p.grad.full_tensor(), single.get_parameter(name).grad)
