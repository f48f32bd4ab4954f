"""The option `split_batch`: halves of a batch take turns, and what is computed is what it was."""

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code

from dtensor import DTensor, Shard, init_device_mesh
from dtensor.compile import statistics
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dtensor.testing import ModelArgs, Transformer, with_ranks
from tests.testing.generated import products_while_under_way

WIDTH = 32


def compiled(f, **options):
    torch.compiler.reset()
    return torch.compile(f, backend="dtensor", fullgraph=True, options=options)


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def close(found, expected):
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, atol=1e-5, rtol=1e-4)


def step(run, model, x):
    """The loss and all gradients of one training step."""
    model.zero_grad()
    loss = F.cross_entropy(whole(run(x)).flatten(0, 1), x.flatten())
    loss.backward()
    return [loss.detach(), *(whole(p.grad) for p in model.parameters())]


@pytest.mark.parametrize(
    ("sequence", "inner"),
    [
        (True, "aot_eager"),
        (False, "aot_eager"),
        (False, "inductor"),
    ],
)
@pytest.mark.nightly
@with_ranks(2)
def test_transformer_trains_and_infers(rank, sequence, inner):
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    reference = Transformer(ModelArgs(1, 32, 16, WIDTH, 4, dropout_p=0.0, weight_tying=False))
    model = Transformer.parallelize(copy.deepcopy(reference), mesh, sequence)
    x = torch.randint(0, 32, (4, 16), generator=torch.Generator().manual_seed(1))
    one, eager = step(reference, reference, x), step(model, model, x)
    close(eager, one)
    run = compiled(model, inner=inner, split_batch=2)
    with statistics() as s:
        close(step(run, model, x), eager)
    (record,) = [p for r in s.records for p in r.passes if p.name == "split_batch"]
    assert record.rewrites >= 4
    if inner == "aot_eager":
        with torch.no_grad():
            close([whole(run(x))], [reference(x)])
        close(step(run, model, x[:3]), step(model, model, x[:3]))  # three cannot be halved


@pytest.mark.nightly
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
def test_as_many_bytes_are_sent(fake_mesh, sequence):
    torch.manual_seed(0)
    dense = Transformer(ModelArgs(1, 32, 16, WIDTH, 4, dropout_p=0.0, weight_tying=False))
    model = Transformer.parallelize(dense, fake_mesh(2), sequence)
    found = {}
    for parts in (1, 2):
        with statistics() as found[parts]:
            step(compiled(model, inner="aot_eager", split_batch=parts), model, torch.zeros(4, 16, dtype=torch.long))
    sent = [sum(c.bytes for c in (*s.forward, *s.backward)) for s in found.values()]
    started = [len(s.forward) + len(s.backward) for s in found.values()]
    assert sent[0] == sent[1]
    assert started[0] < started[1] <= 2 * started[0]


class Block(nn.Module):
    """Two products beside a residual connection, with a norm, dropout, and counts of what a batch holds."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.up, self.down = norm, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


def stack(mesh, norm):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(norm(WIDTH)) for _ in range(2)])
    return parallelize_module(model, mesh, {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})


@pytest.mark.parametrize(
    ("norm", "inner"),
    [
        *[(norm, "aot_eager") for norm in (nn.LayerNorm, nn.BatchNorm1d)],
        pytest.param(nn.RMSNorm, "aot_eager", marks=pytest.mark.nightly),
        pytest.param(nn.LayerNorm, "inductor", marks=pytest.mark.nightly),
    ],
)
def test_replayed_on_simulated_ranks(fake_mesh, norm, inner):
    """Also where something needs the whole batch: statistics over it, random draws."""
    model = stack(fake_mesh(2), norm)
    run = compiled(model, inner=inner, split_batch=2, verify=True)
    with statistics() as s:
        run(torch.randn(8, WIDTH)).square().sum().backward()
    (record,) = [p for r in s.records for p in r.passes if p.name == "split_batch"]
    assert record.rewrites == (2 if norm is nn.BatchNorm1d else 4)
    assert len(s.forward) == (2 if norm is nn.BatchNorm1d else 4)


@pytest.mark.nightly
def test_each_half_travels_while_the_other_computes(fake_mesh):
    model = stack(fake_mesh(2), nn.LayerNorm).eval()
    for parts, expected in ((1, [0, 0]), (2, [2, 2, 2, 0])):
        run = compiled(model, split_batch=parts)
        with torch.no_grad():
            _, (code,) = run_and_get_code(run, torch.randn(8, WIDTH))
        assert products_while_under_way(code) == expected


@pytest.mark.nightly
def test_plain_compile_takes_it_from_the_environment(fake_mesh, monkeypatch):
    model = stack(fake_mesh(2), nn.LayerNorm).eval()
    monkeypatch.setenv("DTENSOR_SPLIT_BATCH", "2")
    with torch.no_grad(), statistics() as s:
        torch.compile(model, fullgraph=True)(torch.randn(8, WIDTH))
    assert Counter(c.op for c in s.forward) == {"all_reduce": 4}


def test_what_is_cut_along_the_batch_gathers_it_whole(fake_mesh):
    mesh = fake_mesh(2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "1": RowwiseParallel(output_layouts=Shard(0))}
    run = compiled(parallelize_module(model, mesh, plan), inner="aot_eager", split_batch=2, verify=True)
    with statistics() as s:
        run(torch.randn(4, WIDTH)).sum().backward()
    assert Counter(c.op for c in s.forward) == {"all_gather": 1, "reduce_scatter": 1}
