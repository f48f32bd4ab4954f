"""`fully_shard` in eager mode: numbers of one device, names, dtypes, accumulation, copies, and what it refuses."""

import copy
import inspect
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.errors import MeshError, PlacementError
from dtensor.parallel import (
    ColwiseParallel,
    FullyShardedModule,
    MixedPrecisionPolicy,
    RowwiseParallel,
    fully_shard,
    materialize,
    parallelize_module,
)
from dtensor.testing import CountCollectives, with_threads

VOCAB, WIDTH, BATCH = 7, 6, 8
LOCK = threading.Lock()
"""Threads share the default generator: what draws from it is done one at a time."""


class Net(nn.Module):
    """Sizes that do not divide, a tied weight, a scalar, and modules of several kinds; linear layers in a list."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.layers: Any = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
        )
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.out = nn.Linear(WIDTH, VOCAB, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, tokens):
        x = self.emb(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale
        return self.out(x)


def make(seed=0):
    with LOCK:
        torch.manual_seed(seed)
        return Net()


def tokens(seed=1):
    return torch.randint(0, VOCAB, (BATCH, 3), generator=torch.Generator().manual_seed(seed))


def loss(model, t):
    return nn.functional.cross_entropy(model(t).flatten(0, 1), t.flatten())


def gradients(seed=1):
    model = make()
    loss(model, tokens(seed)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def check_gradients(model, wanted, **tolerances):
    for name, p in model.named_parameters():
        assert p.grad.placements == p.placements, name
        assert p.grad.dtype == p.dtype
        torch.testing.assert_close(p.grad.full_tensor(), wanted[name], **tolerances)


def by_parts(model, mesh, **options):
    for layer in model.layers:
        fully_shard(layer, mesh, **options)
    return fully_shard(model, mesh, **options)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4), (4, 1)])
@pytest.mark.parametrize("shard", [fully_shard, by_parts])
@with_threads(4)
def test_gradients_are_those_of_one_device(rank, shape, shard):
    mesh = init_device_mesh("cpu", shape)
    model = shard(make(), mesh)
    replicated = (Replicate(),) * len(shape)
    for name, p in model.named_parameters():
        whole = name == "scale" or shape[-1] == 1
        assert p.placements == (replicated if whole else (*replicated[1:], Shard(0)))
    loss(model, tokens().chunk(4)[rank]).backward()
    check_gradients(model, gradients())


@with_threads(2)
def test_every_rank_takes_the_values_of_the_first(rank):
    mesh, model = init_device_mesh("cpu", (2,)), make(seed=rank)
    mine = copy.deepcopy(model.state_dict())
    fully_shard(model, mesh)
    first = make().state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), first[name])
    other = make(seed=rank)
    fully_shard(other, mesh, src_data_rank=None)
    assert torch.equal(other.emb.weight.to_local(), mine["emb.weight"].chunk(2)[rank])


@with_threads(2)
def test_users_see_their_own_names_and_classes(rank):
    plain, model = make(), make()
    assert fully_shard(model, init_device_mesh("cpu", (2,))) is model
    assert [*model.state_dict()] == [*plain.state_dict()]
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert isinstance(model, Net)
    assert isinstance(model, FullyShardedModule)
    assert isinstance(model.layers[0][1], nn.Linear)
    assert type(model.layers[0][1]) is type(model.layers[1][1])
    assert type(model.layers[0][1]).__name__ == "FSDPLinear"
    assert str(inspect.signature(model.forward)) == str(inspect.signature(plain.forward))
    assert model.out.weight is model.emb.weight
    # Outside of a forward it is the parameter itself.
    assert model.out.weight is dict(model.named_parameters())["emb.weight"]


@with_threads(2)
def test_a_parameter_is_whole_and_plain_inside_the_forward(rank):
    seen = []

    class Reads(nn.Linear):
        def forward(self, x):
            seen.append(self.weight)
            return super().forward(x)

    model = fully_shard(Reads(3, 5), init_device_mesh("cpu", (2,)))
    model(torch.ones(1, 3))
    assert type(seen[0]) is torch.Tensor
    assert seen[0].shape == (5, 3)
    assert isinstance(model.weight, DTensor)


@with_threads(2)
def test_state_dict_round_trip(rank):
    mesh = init_device_mesh("cpu", (2,))
    model, other = fully_shard(make(), mesh), fully_shard(make(seed=3), mesh)
    other.load_state_dict(model.state_dict())
    t = tokens().chunk(2)[rank]
    assert torch.equal(model(t), other(t))


@with_threads(4)
def test_training_is_that_of_one_device(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    single, model = make(), fully_shard(make(), mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (single, model)]
    for step in range(4):
        t = tokens(step)
        for m, part, optimizer in zip((single, model), (t, t.chunk(4)[rank]), optimizers):
            optimizer.zero_grad()
            loss(m, part).backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.3)
            optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.full_tensor(), single.get_parameter(name))


@with_threads(2)
def test_frozen_parameters_get_no_gradient(rank):
    model = make()
    model.emb.weight.requires_grad_(False)
    fully_shard(model, init_device_mesh("cpu", (2,)))
    loss(model, tokens().chunk(2)[rank]).backward()
    assert model.emb.weight.grad is None
    assert not model.emb.weight.requires_grad
    assert model.layers[0][1].weight.grad is not None


@with_threads(2)
def test_ignored_parameters_stay_plain(rank):
    model = make()
    fully_shard(model, init_device_mesh("cpu", (2,)), ignored_params=[model.scale])
    assert type(model.scale) is nn.Parameter
    loss(model, tokens().chunk(2)[rank]).backward()
    single = make()
    loss(single, tokens().chunk(2)[rank]).backward()
    torch.testing.assert_close(model.scale.grad, single.scale.grad)
    torch.testing.assert_close(model.emb.weight.grad.full_tensor(), gradients()["emb.weight"])


@with_threads(2)
def test_cut_along_another_dimension(rank):
    model = make()
    fully_shard(model, init_device_mesh("cpu", (2,)), shard_placement_fn=lambda p: Shard(-1) if p.dim() == 2 else None)
    assert model.emb.weight.placements == (Shard(1),)
    assert model.layers[0][0].weight.placements == (Shard(0),)
    loss(model, tokens().chunk(2)[rank]).backward()
    check_gradients(model, gradients())


@with_threads(2)
def test_activations_over_the_data_mesh(rank):
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(make(), mesh, activations="global")
    t = distribute_tensor(tokens(), mesh, [Shard(0)])
    found = loss(model, t)
    torch.testing.assert_close(found.full_tensor(), loss(make(), tokens()))
    found.backward()
    check_gradients(model, gradients())


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
SINCE_2_15 = hasattr(TorchPolicy(), "param_dtype_override_fn")


@pytest.mark.parametrize(
    ("policy", "reduced"),
    [
        (BF16, torch.float32),
        (MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16), torch.bfloat16),
        (TorchPolicy(param_dtype=torch.bfloat16), torch.float32 if SINCE_2_15 else torch.bfloat16),
        (MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64), torch.float32),
        (TorchPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), torch.float32),
    ],
)
@with_threads(2)
def test_mixed_precision(rank, policy, reduced):
    mesh, seen = init_device_mesh("cpu", (2,)), []
    with LOCK:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    wanted = copy.deepcopy(model)
    model[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    fully_shard(model, mesh, mp_policy=policy)
    x = torch.ones(2, 4)
    with CountCollectives() as forward:
        out = model(x)
    with CountCollectives() as backward:
        out.square().sum().backward()
    wanted(x).square().sum().backward()
    assert seen == [torch.bfloat16]
    assert out.dtype == (policy.output_dtype or torch.bfloat16)
    # 32 elements in each weight, of which each of two ranks sends one half: the cast comes before the gather.
    assert [(c.op, c.bytes) for c in forward.collectives] == [("all_gather", 32)] * 2
    assert [(c.op, c.bytes) for c in backward.collectives] == [("reduce_scatter", 16 * reduced.itemsize)] * 2
    for p, want in zip(model.parameters(), wanted.parameters()):
        assert p.dtype == p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad.full_tensor(), want.grad, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("names", [("dp",), ("dp", "tp")])
@with_threads(4)
def test_gradients_alone_are_sent_in_fewer_bits(rank, names):
    """The parts are rounded, not their sum: `reduce_dtype` alone halves the bytes, beside tensor parallelism, too."""
    mesh = init_device_mesh("cpu", (4,) if len(names) == 1 else (2, 2), mesh_dim_names=names)
    with LOCK:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    wanted = copy.deepcopy(model)
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh["dp"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    x = torch.ones(2, 4)
    out = model(x)
    with CountCollectives() as backward:
        out.square().sum().backward()
    wanted(x).square().sum().backward()
    sent = [c.bytes for c in backward.collectives if c.op == "reduce_scatter"]
    assert sent == [32 * 3 // 4 * 2 if len(names) == 1 else 16 // 2 * 2] * 2
    for p, want in zip(model.parameters(), wanted.parameters()):
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad.full_tensor(), want.grad, atol=0.1, rtol=0.05)


@with_threads(2)
def test_inputs_are_left_alone_if_asked(rank):
    mesh, model = init_device_mesh("cpu", (2,)), nn.Linear(4, 4).to(torch.float64)
    fully_shard(model, mesh, mp_policy=MixedPrecisionPolicy(torch.float32, cast_forward_inputs=False))
    with pytest.raises(RuntimeError, match="same dtype"):
        model(torch.ones(2, 4, dtype=torch.float64))
    assert model(torch.ones(2, 4)).dtype == torch.float32


REDUCTIONS = ("reduce_scatter", "all_reduce")


def reductions(counted):
    return sum(c.op in REDUCTIONS for c in counted.collectives)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@with_threads(4)
def test_a_cycle_of_backwards_is_reduced_once(rank, shape):
    model = by_parts(make(), init_device_mesh("cpu", shape))
    steps = [tokens(seed).chunk(4)[rank] for seed in (1, 2, 3)]
    found = [gradients(seed) for seed in (1, 2, 3)]
    with CountCollectives() as alone:
        loss(model, steps[0]).backward()
    for _ in range(2):
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        with CountCollectives() as counted:
            for t in steps[:2]:
                loss(model, t).backward()
        assert {c.op for c in counted.collectives} == {"all_gather"}
        assert model.emb.weight.grad.placements == (Partial("avg"),) * len(shape)
        with CountCollectives() as counted:
            model.set_requires_gradient_sync(True)
        assert not counted.collectives
        with CountCollectives() as counted:
            loss(model, steps[2]).backward()
        # Two parameters are used twice; of ten, one without dimensions is replicated: one reduction for all axes.
        assert reductions(alone) == 10 * len(shape) + 2
        assert reductions(counted) == 9 * len(shape) + 1
        check_gradients(model, {name: sum(g[name] for g in found) for name in found[0]})
    # And each backward reduces its own again.
    with CountCollectives() as counted:
        loss(model, steps[0]).backward()
    assert reductions(counted) == reductions(alone)
    check_gradients(model, {name: sum(g[name] for g in (*found, found[0])) for name in found[0]})


@with_threads(2)
def test_what_the_last_backward_does_not_use_is_reduced_too(rank):
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    for part in model.values():
        fully_shard(part, init_device_mesh("cpu", (2,)))
        part.set_requires_gradient_sync(False)
    both = fully_shard(nn.Sequential(*model.values()), init_device_mesh("cpu", (2,)))
    x = torch.ones(1, 2) + rank
    both(x).sum().backward()
    wanted = model["b"].weight.grad.full_tensor()
    both.set_requires_gradient_sync(True)
    model["a"](x).sum().backward()
    assert model["b"].weight.grad.placements == model["a"].weight.grad.placements == (Shard(0),)
    assert torch.equal(model["b"].weight.grad.full_tensor(), wanted)


@with_threads(2)
def test_the_switch_is_turned_back_before_a_backward(rank):
    model = by_parts(make(), init_device_mesh("cpu", (2,)))
    steps = [tokens(seed).chunk(2)[rank] for seed in (1, 2, 3)]
    found = [gradients(seed) for seed in (1, 2, 3)]
    model.set_requires_gradient_sync(False)
    loss(model, steps[0]).backward()
    model.set_requires_gradient_sync(True)
    model.set_requires_gradient_sync(False)
    loss(model, steps[1]).backward()
    assert model.emb.weight.grad.placements == (Partial("avg"),)
    model.set_requires_gradient_sync(True)
    again = copy.deepcopy(model)
    for m in (model, pickle.loads(pickle.dumps(model)), again):
        loss(m, steps[2]).backward()
    check_gradients(model, {name: sum(g[name] for g in found) for name in found[0]})
    check_gradients(again, found[2])


@with_threads(2)
def test_optimizers_take_what_was_not_reduced(rank):
    """Where a cycle ends without a last backward."""
    single, model = make(), fully_shard(make(), init_device_mesh("cpu", (2,)))
    model.set_requires_gradient_sync(False)
    loss(model, tokens().chunk(2)[rank]).backward()
    model.set_requires_gradient_sync(True)
    loss(single, tokens()).backward()
    for m in (single, model):
        torch.optim.AdamW(m.parameters(), lr=0.1).step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.full_tensor(), single.get_parameter(name))


@with_threads(4)
def test_gradients_scattered_and_not_reduced_over_replicas(rank):
    model = fully_shard(make(), init_device_mesh("cpu", (2, 2)))
    model.set_requires_all_reduce(False)
    with CountCollectives() as counted:
        loss(model, tokens(1).chunk(4)[rank]).backward()
    assert "all_reduce" not in {c.op for c in counted.collectives if c.bytes > 8}
    assert model.emb.weight.grad.placements == (Partial("avg"), Shard(0))
    model.set_requires_all_reduce(True)
    with CountCollectives() as counted:
        loss(model, tokens(2).chunk(4)[rank]).backward()
    used = len(list(model.parameters()))
    assert [c.op for c in counted.collectives][-used:] == ["all_reduce"] * used
    check_gradients(model, {name: sum(gradients(seed)[name] for seed in (1, 2)) for name in gradients()})


@with_threads(2)
def test_sync_of_one_unit(rank):
    model = by_parts(make(), init_device_mesh("cpu", (2,)))
    model.set_requires_gradient_sync(False, recurse=False)
    loss(model, tokens().chunk(2)[rank]).backward()
    assert model.emb.weight.grad.placements == (Partial("avg"),)
    assert model.layers[0][1].weight.grad.placements == (Shard(0),)


class Built(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.up, self.norm = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 5), nn.BatchNorm1d(5)

    def forward(self, tokens):
        return self.norm(self.up(self.emb(tokens)))


@with_threads(3)
def test_a_model_on_the_meta_device_gets_the_values_of_one_device(rank):
    mesh = init_device_mesh("cpu", (3,))
    with LOCK:
        with torch.device("meta"):
            plain, model = Built(), Built()
        torch.manual_seed(5)
        wanted = materialize(plain).state_dict()
        fully_shard(model, mesh)
        assert all(p.is_meta for p in model.parameters())
        torch.manual_seed(5)
        materialize(model)
    for name, value in model.state_dict().items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(value, wanted[name]), name
    assert model.up.weight.to_local().shape == ((2, 2, 1)[rank], WIDTH)


def test_what_cannot_be_initialised_is_named():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Net())
    with pytest.raises(TypeError, match=r"no reset_parameters\(\): 1 \(Net\)"):
        materialize(model)


@with_threads(2)
def test_copies(rank):
    model = by_parts(make(), init_device_mesh("cpu", (2,)))
    copied = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model))
    for other in (copied, again):
        assert type(other).__name__ == "FSDPNet"
        loss(other, tokens().chunk(2)[rank]).backward()
        check_gradients(other, gradients())
    assert model.emb.weight.grad is None
    copied.set_requires_gradient_sync(False)
    loss(model, tokens().chunk(2)[rank]).backward()
    check_gradients(model, gradients())


@with_threads(2)
def test_functional_call_with_other_parameters(rank):
    model = fully_shard(make(), init_device_mesh("cpu", (2,)))
    other = dict(make(seed=4).named_parameters())
    t = tokens()
    torch.testing.assert_close(torch.func.functional_call(model, other, (t,)), make(seed=4)(t))


@with_threads(2)
def test_weights_tied_afterwards(rank):
    mesh, model = init_device_mesh("cpu", (2,)), make()
    with LOCK:
        model.out = nn.Linear(WIDTH, VOCAB, bias=False)
    fully_shard(model, mesh)
    model.out.weight = model.emb.weight
    loss(model, tokens().chunk(2)[rank]).backward()
    check_gradients(model, gradients())
    with pytest.raises(ValueError, match=r"weight of a fully sharded module is a DTensor \[Shard\(dim=0\)\]"):
        model.out.weight = nn.Parameter(torch.ones(VOCAB, WIDTH))


class Several(nn.Module):
    """Weights in a list, and a child's weight read by its parent."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(2)])
        self.named = nn.ParameterDict({"bias": torch.randn(WIDTH)})
        self.child = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x @ self.weights[0] @ self.weights[1] + self.named["bias"] + x @ self.child.weight


class Attends(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


class Recurs(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


READERS = {
    "several": Several,
    "attention": lambda: Attends(WIDTH, 2, batch_first=True),
    "recurrent": lambda: Recurs(WIDTH, 4, batch_first=True),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 4)),
    "convolution": lambda: nn.Conv1d(3, 4, 2),
}


@pytest.mark.parametrize("kind", READERS)
@with_threads(2)
def test_modules_that_read_their_parameters_otherwise(rank, kind):
    with LOCK:
        torch.manual_seed(0)
        single = READERS[kind]()
    model = copy.deepcopy(single)
    fully_shard(model, init_device_mesh("cpu", (2,)))
    x = torch.randn(BATCH, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        single(x).square().mean().backward()
        model(x.chunk(2)[rank]).square().mean().backward()
    found = {name: p for name, p in model.named_parameters() if p.grad is not None}
    assert [*found] == [name for name, p in single.named_parameters() if p.grad is not None]
    for name, p in found.items():
        torch.testing.assert_close(p.grad.full_tensor(), single.get_parameter(name).grad)


def refusals(mesh):
    sharded = fully_shard(nn.Linear(2, 2), mesh)
    linear = nn.Linear(2, 2)
    return [
        (lambda: fully_shard("model", mesh), TypeError, "takes an nn.Module, or a list of them; got 'm'"),
        (lambda: fully_shard(nn.ModuleList([linear]), mesh), ValueError, "ModuleList has no forward"),
        (lambda: fully_shard(sharded, mesh), ValueError, "fully sharded already; call fully_shard once"),
        (lambda: fully_shard(linear, "cpu"), TypeError, "takes a DeviceMesh; got str"),
        (lambda: fully_shard(linear, mesh, reshard_after_forward=2), TypeError, "is True or False; got 2"),
        (lambda: fully_shard(linear, mesh, mp_policy=torch.bfloat16), TypeError, "mp_policy is a MixedPrecisionPolicy"),
        (lambda: fully_shard(linear, mesh, activations="batch"), ValueError, "'local' or 'global'; got 'batch'"),
        (lambda: fully_shard(linear, mesh, shard_placement_fn=lambda p: Shard(2)), PlacementError, r"Shard\(2\) does"),
        (
            lambda: fully_shard(linear, mesh, shard_placement_fn=lambda p: Replicate()),
            TypeError,
            r"return Shard\(dim\)",
        ),
        (lambda: fully_shard(nn.LazyLinear(2), mesh), ValueError, "weight has no shape yet"),
        (lambda: MixedPrecisionPolicy("bf16"), TypeError, "param_dtype is a torch.dtype or None; got 'bf16'"),
        (lambda: MixedPrecisionPolicy(reduce_dtype=torch.int8), ValueError, "must be a floating point dtype"),
        (
            lambda: fully_shard(nn.Sequential(torch.jit.script(linear)), mesh),
            TypeError,
            "0 is a scripted module, which reads its parameters by itself",
        ),
        (
            lambda: fully_shard(nn.Sequential(nn.LayerNorm(2), by_hand(linear, mesh)), mesh),
            MeshError,
            "not slices of one mesh",
        ),
    ]


def by_hand(linear, mesh):
    for name, p in list(linear.named_parameters()):
        setattr(linear, name, distribute_tensor(p, mesh, [Replicate()]))
    return linear


def snapshot(module):
    return [
        (type(part), dict(part._parameters), {k: id(v) for k, v in vars(part).items()}) for part in module.modules()
    ]


@with_threads(1)
def test_what_is_refused_is_as_it_was(rank):
    mesh = init_device_mesh("cpu", (1,))
    scripted = torch.jit.script(nn.Linear(2, 2))
    last = {"lazy": nn.LazyLinear(2), "elsewhere": by_hand(nn.Linear(2, 2), mesh), "scripted": scripted}
    calls = {
        "scripted": {},
        "lazy": {},
        "elsewhere": {},
        "dim": {"shard_placement_fn": lambda p: Shard(int(p.shape == (3,)) * 2)},
        "rank": {"src_data_rank": 7},
    }
    for name, options in calls.items():
        model = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 3), last.get(name, nn.Identity()))
        before, marks = snapshot(model), [dict(vars(p)) for p in model.parameters()]
        with pytest.raises((ValueError, TypeError, MeshError)):
            fully_shard(model, mesh, **options)
        assert snapshot(model) == before, name
        assert [dict(vars(p)) for p in model.parameters()] == marks, name
        if name not in last:
            assert isinstance(fully_shard(model, mesh)[1].weight, DTensor)


@with_threads(2)
def test_the_outer_module_first(rank):
    """In either order of calls each layer has the policy of its own call."""
    mesh, models = init_device_mesh("cpu", (2,)), []
    for outer_first in (False, True):
        model = make()
        calls = [lambda m=model: fully_shard(m, mesh)]
        calls += [lambda layer=layer: fully_shard(layer, mesh, mp_policy=BF16) for layer in model.layers]
        for call in calls if outer_first else reversed(calls):
            call()
        models.append(model)
    units = [[vars(part)["_fully_sharded"].unit.policy for part in m.modules() if part._parameters] for m in models]
    assert units[0] == units[1]
    assert {policy.param_dtype for policy in units[0]} == {None, torch.bfloat16}
    t = tokens().chunk(2)[rank]
    assert torch.equal(models[0](t), models[1](t))
    for model in models:
        with pytest.raises(ValueError, match="fully sharded already; call fully_shard once"):
            fully_shard(model.layers[0], mesh)


@with_threads(2)
def test_what_comes_too_late_for_an_inner_module(rank):
    mesh, other = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), mesh)
    with pytest.raises(ValueError, match="shard_placement_fn comes too late: the parameters of this Linear"):
        fully_shard(model[0], mesh, shard_placement_fn=lambda p: Shard(0))
    with pytest.raises(ValueError, match=r"ignored_params \(bias\) comes too late"):
        fully_shard(model[0], mesh, ignored_params=[model[0].bias])
    with pytest.raises(MeshError, match=r"over .* already, by a call on an enclosing module; pass the same mesh"):
        fully_shard(model[0], other)


@pytest.mark.parametrize("case", range(14))
@with_threads(1)
def test_refusals(rank, case):
    call, error, message = refusals(init_device_mesh("cpu", (1,)))[case]
    with pytest.raises(error, match=message):
        call()


@with_threads(1)
def test_a_mesh_of_three_axes_is_refused(rank):
    with pytest.raises(ValueError, match=r"of one axis, or of two \(replicate, shard\); this one has 3"):
        fully_shard(nn.Linear(2, 2), init_device_mesh("cpu", (1, 1, 1)))
