"""Starts and waits where communication and computation overlap, also in the code that Inductor makes."""

import re
from collections import Counter

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from dtensor import Replicate, Shard, distribute_tensor
from dtensor.compile import report, statistics
from dtensor.testing import ModelArgs, Transformer
from tests.testing.generated import products_while_under_way, starts_and_waits

WIDTH, LAYERS = 64, 3
A_LAYER_AHEAD = "SS" + "WmS" * (2 * LAYERS - 2) + "WmWm"


class Deep(nn.Module):
    """Layers of two products; each weight is gathered as the layer begins."""

    def __init__(self, mesh, placements, width=WIDTH):
        super().__init__()
        torch.manual_seed(0)
        made = [torch.randn(width, width) / 8 for _ in range(2 * LAYERS)]
        self.weights = nn.ParameterList([nn.Parameter(distribute_tensor(w, mesh, placements)) for w in made])

    def forward(self, x):
        for up, down in zip(self.weights[::2], self.weights[1::2]):
            whole = [w.redistribute(placements=[Replicate()] * w.device_mesh.ndim) for w in (up, down)]
            x = torch.relu(x @ whole[0]) @ whole[1]
        return x


def train(model, x, **options):
    torch.compiler.reset()
    compiled = torch.compile(model, backend="dtensor", fullgraph=True, options=options)

    def step():
        out = compiled(x)
        out = out.full_tensor() if hasattr(out, "full_tensor") else out
        out.square().sum().backward()

    with statistics() as s:
        _, codes = run_and_get_code(step)
    return s, codes


def test_weights_are_gathered_a_layer_ahead(fake_mesh):
    mesh = fake_mesh(4)
    x = distribute_tensor(torch.randn(8, WIDTH), mesh, [Shard(0)])
    s, codes = train(Deep(mesh, [Shard(0)]), x, disable=["bucket"])
    forward, backward = map(starts_and_waits, codes)
    # From the second on, each is started before the one ahead of it is waited for, and the product is in between.
    assert forward == A_LAYER_AHEAD
    # The last two of the forward are still there, and there is no gradient of x, for which the first would be read.
    assert Counter(c.op for c in s.backward) == {"all_gather": 2 * LAYERS - 3, "reduce_scatter": 2 * LAYERS}
    # No gradient's scatter is waited for at once, but for the last, after which there is no product.
    *under_way, last = products_while_under_way(codes[1])
    assert min(under_way) > 0
    assert last == 0
    assert backward.count("S") == backward.count("W") == 4 * LAYERS - 3


def test_a_schedule_can_be_left_out(fake_mesh):
    mesh = fake_mesh(4)
    x = distribute_tensor(torch.randn(8, WIDTH), mesh, [Shard(0)])
    _, (code, _) = train(Deep(mesh, [Shard(0)]), x, disable=["bucket", "schedule"])
    forward = starts_and_waits(code)
    # Starts, waits and products come when Inductor wants them.
    assert [forward.count(letter) for letter in "SWm"] == [2 * LAYERS] * 3
    assert forward != A_LAYER_AHEAD


def peaks(model, x, **options):
    """Most bytes that the forward and the backward hold, by `report`."""
    train(model, x, inner="aot_eager", **options)
    *_, newest = report(model).manifests
    return [newest["graphs"][direction]["peak_bytes"] for direction in ("forward", "backward")]


@pytest.mark.parametrize("shape", [(4,), pytest.param((2, 2), marks=pytest.mark.nightly)])
@pytest.mark.parametrize("disable", [["bucket"], []], ids=["apart", "in buckets"])
def test_memory_stays_within_the_bound(fake_mesh, shape, disable):
    """Over what the order of the program holds: one buffer in flight, and what it is made of."""
    mesh = fake_mesh(*shape)
    model = Deep(mesh, [Replicate()] * (len(shape) - 1) + [Shard(0)], width=512)
    x = distribute_tensor(torch.randn(8, 512), mesh, [Shard(0)] * len(shape))
    weight = 512 * 512 * 4
    in_order = peaks(model, x, disable=[*disable, "schedule"])
    scheduled = peaks(model, x, disable=disable)
    parts = weight + weight // shape[-1]  # a gathered weight with its shard, or a gradient with its part
    for found, before in zip(scheduled, in_order, strict=True):
        assert found <= before + parts
    # The forward never holds all weights, but two of them: one in use, and one on its way.
    shards = 2 * LAYERS * weight // shape[-1]
    assert scheduled[0] < shards + 2.5 * weight


def transformer(mesh, sequence):
    torch.manual_seed(0)
    args = ModelArgs(dropout_p=0.0, vocab_size=64, max_seq_len=16, n_layers=1, dim=WIDTH, n_heads=4)
    return Transformer.parallelize(Transformer(args), mesh, sequence)


@pytest.mark.nightly
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
def test_gradients_of_weights_are_computed_while_those_of_activations_travel(fake_mesh, sequence):
    mesh = fake_mesh(2)
    _, (_, backward) = train(transformer(mesh, sequence), torch.randint(0, 64, (4, 16)))
    # The two collectives of the layer and the one at the output have products of weights beside them.
    assert len(re.findall(r"Sm+W", starts_and_waits(backward))) == 3


def test_two_dimensional_and_hybrid_sharding(fake_mesh):
    """Sharded over one axis, replicated over the other: gradients are scattered, then summed over the other axis."""
    mesh = fake_mesh(2, 2)
    x = distribute_tensor(torch.randn(8, WIDTH), mesh, [Shard(0), Shard(0)])
    s, _ = train(Deep(mesh, [Replicate(), Shard(0)]), x, inner="aot_eager", disable=["bucket"])
    assert Counter(c.op for c in s.forward) == {"all_gather": 2 * LAYERS}
    found = Counter(c.op for c in s.backward)
    assert found == {"all_gather": 2 * LAYERS - 3, "reduce_scatter": 2 * LAYERS, "all_reduce": 2 * LAYERS}
    s, _ = train(Deep(mesh, [Replicate(), Shard(0)]), x, inner="aot_eager")
    assert Counter(c.op for c in s.backward)["all_reduce"] < 2 * LAYERS
