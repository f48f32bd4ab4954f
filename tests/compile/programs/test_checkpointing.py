"""Activation checkpointing beside sharding: what is sent again in the backward, and the numbers of one process."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtensor import DTensor, Shard, distribute_tensor, init_device_mesh
from dtensor.compile import statistics
from dtensor.parallel import fully_shard
from dtensor.testing import CountCollectives, ModelArgs, Transformer, with_ranks

L = 2
ARGS = ModelArgs(dropout_p=0.0, vocab_size=32, max_seq_len=16, n_layers=L, weight_tying=False)
TOKENS = torch.arange(64).view(4, 16) * 7 % 32


def keep(chosen):
    """Contexts of a policy that saves what operators give of which `chosen` is true."""

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if chosen(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return {"context_fn": partial(create_selective_checkpoint_contexts, policy)}


POLICIES = {
    "nothing": {},
    "products": keep(lambda op: op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)),
    "what was sent": keep(lambda op: op.namespace == "dtensor"),
}
"""What of a layer is saved -> the arguments of torch.utils.checkpoint."""


def made(policy=None):
    torch.manual_seed(0)
    model = Transformer(ARGS)
    if policy is not None:
        for layer in model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **POLICIES[policy])
    return model


def sharded(plan, mesh, policy=None):
    model = made(policy)
    return fully_shard(model, mesh) if plan == "fsdp" else Transformer.parallelize(model, mesh, plan == "sp")


def loss(run, tokens):
    return F.cross_entropy(run(tokens).flatten(0, 1), tokens.flatten())


def ops(found):
    return dict(Counter(c.op for c in found))


def compiled_backward(model):
    torch.compiler.reset()
    options = {"inner": "aot_eager", "disable": ["bucket"]}
    run = torch.compile(model, backend="dtensor", fullgraph=True, options=options)
    with statistics() as s:
        loss(run, TOKENS).backward()
    assert (s.graphs, s.graph_breaks) == (1, 0)
    return ops(s.backward)


def eager_backward(model):
    found = loss(model, TOKENS)
    with CountCollectives() as counted:
        found.backward()
    return ops(counted.collectives)


AGAIN = {
    # The sum after attention, which the norm behind it reads; not the one at the layer's end.
    "tp": {"all_reduce": L},
    # The same, scattered, and what is gathered before attention and before the feed-forward.
    "sp": {"reduce_scatter": L, "all_gather": 2 * L},
}
"""What a backward sends beside what it sends anyhow, if nothing of a layer is saved."""


@pytest.mark.parametrize("plan", ["tp", pytest.param("sp", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("count", [eager_backward, pytest.param(compiled_backward, marks=pytest.mark.nightly)])
def test_what_is_sent_again(fake_mesh, plan, count):
    mesh = fake_mesh(2)
    plain = Counter(count(sharded(plan, mesh)))
    assert Counter(count(sharded(plan, mesh, "nothing"))) == plain + Counter(AGAIN[plan])
    assert Counter(count(sharded(plan, mesh, "what was sent"))) == plain


@pytest.mark.parametrize(
    "policy", [p if p == "what was sent" else pytest.param(p, marks=pytest.mark.nightly) for p in POLICIES]
)
def test_no_parameter_is_gathered_a_third_time(fake_mesh, policy):
    mesh = fake_mesh(2)
    parameters = len(list(made().parameters()))
    found = compiled_backward(sharded("fsdp", mesh, policy))
    assert found["reduce_scatter"] == parameters
    assert found["all_gather"] <= parameters
    if policy == "what was sent":
        # It saves whole weights; of three outside of the layers the last is read at once.
        assert found["all_gather"] == 2
    found = eager_backward(sharded("fsdp", mesh, "nothing"))
    assert found == {"all_gather": 12 * L, "reduce_scatter": parameters}


@pytest.mark.nightly
@pytest.mark.parametrize(("plan", "policy"), [("fsdp", "nothing"), ("sp", "products")])
@with_ranks(2)
def test_numbers_are_those_of_one_process(rank, plan, policy):
    mesh = init_device_mesh("cpu", (2,))
    single = made()
    loss(single, TOKENS).backward()
    model = sharded(plan, mesh, policy)
    tokens = TOKENS.chunk(2)[rank] if plan == "fsdp" else TOKENS
    run = torch.compile(model, backend="dtensor", fullgraph=True, options={"inner": "aot_eager"})
    for forward in (model, run):
        model.zero_grad()
        loss(forward, tokens).backward()
        for name, p in model.named_parameters():
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            torch.testing.assert_close(grad, single.get_parameter(name).grad, atol=1e-5, rtol=1e-4)


def test_of_any_length(fake_mesh):
    """What Dynamo makes a graph of its own is called with the symbols in its arguments: in front of them, as always."""
    mesh = fake_mesh(2)
    run = torch.compile(
        lambda x: checkpoint(lambda x: x.sin() * 2, x, use_reentrant=False),
        backend="dtensor",
        fullgraph=True,
        dynamic=True,
        options={"inner": "aot_eager"},
    )
    for n in (8, 5):
        x = distribute_tensor(torch.rand(n, 6), mesh, [Shard(0)]).requires_grad_()
        y = run(x)
        assert torch.equal(y.to_local(), x.to_local().sin() * 2)
        y.sum().backward()
        assert torch.equal(x.grad.to_local(), x.to_local().cos() * 2)
