"""Compiled against eager against one device, on real processes: outputs, every gradient, and the borders."""

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.compile import statistics
from dtensor.testing import ModelArgs, Transformer, with_ranks

BACKENDS = {
    "dtensor": {"backend": "dtensor"},
    "dtensor, aot_eager": {"backend": "dtensor", "options": {"inner": "aot_eager"}},
    "plain": {},
    "aot_eager": {"backend": "aot_eager"},
}


BATCHES = (4, 2, 6)
"""Of these the first by day: a second size is another graph, as in the programs of test_sizes."""


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def transformer(layers=2, tie=True):
    torch.manual_seed(0)
    args = ModelArgs(dropout_p=0.0, vocab_size=32, max_seq_len=16, n_layers=layers, weight_tying=tie)
    return Transformer(args)


def step(model, x):
    """Logits and all gradients of one training step."""
    model.zero_grad()
    out = whole(model(x))
    F.cross_entropy(out.flatten(0, 1), x.flatten()).backward()
    return [out.detach(), *(whole(p.grad) for p in model.parameters())]


def close(found, expected):
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("sequence", "backend", "batches"),
    [
        pytest.param(False, "dtensor, aot_eager", BATCHES[:1], id="tp-dtensor, aot_eager"),
        pytest.param(True, "dtensor, aot_eager", BATCHES, id="sp-dtensor, aot_eager", marks=pytest.mark.nightly),
        pytest.param(True, "plain", BATCHES, id="sp-plain", marks=pytest.mark.nightly),
        pytest.param(False, "dtensor", BATCHES, id="tp-dtensor", marks=pytest.mark.nightly),
        pytest.param(False, "plain", BATCHES, id="tp-plain", marks=pytest.mark.nightly),
        pytest.param(True, "dtensor", BATCHES, id="sp-dtensor", marks=pytest.mark.nightly),
    ],
)
@with_ranks(2)
def test_transformer_trains_and_infers(rank, sequence, backend, batches):
    mesh = init_device_mesh("cpu", (2,))
    reference = transformer(layers=1)
    model = Transformer.parallelize(copy.deepcopy(reference), mesh, sequence)
    compiled = torch.compile(model, fullgraph=True, **BACKENDS[backend])
    with statistics() as s:
        for batch in batches:
            x = torch.randint(0, 32, (batch, 16), generator=torch.Generator().manual_seed(batch))
            one, eager = step(reference, x), step(model, x)
            close(eager, one)
            close(step(compiled, x), eager)
        with torch.no_grad():
            close([whole(compiled(x))], [one[0]])
    assert s.graph_breaks == 0
    # One graph of the first batch size, one for all others, and one for inference.
    assert s.graphs == (3 if len(batches) > 1 else 2)


@pytest.mark.parametrize(
    ("backend", "layers"),
    [
        pytest.param("dtensor, aot_eager", 1, marks=pytest.mark.nightly),
        pytest.param("dtensor, aot_eager", 2, marks=pytest.mark.nightly),
        pytest.param("plain", 1, marks=pytest.mark.nightly),
        pytest.param("plain", 3, marks=pytest.mark.nightly),
    ],
)
def test_number_of_collectives(fake_mesh, backend, layers):
    mesh = fake_mesh(2)
    for sequence in (False, True):
        torch.compiler.reset()
        model = Transformer.parallelize(transformer(layers), mesh, sequence)
        compiled = torch.compile(model, fullgraph=True, **BACKENDS[backend])
        with statistics() as s:
            step(compiled, torch.zeros(2, 16, dtype=torch.long))
        forward, backward = (Counter(c.op for c in found) for found in (s.forward, s.backward))
        if sequence:
            # At the ends both embeddings are scattered, in one bucket, and gathered again in the backward; the last
            # norm's output and the logits are gathered. One bucket holds the gradients of all norms.
            assert forward == {"all_gather": 2 * layers + 2, "reduce_scatter": 2 * layers + 1}
            assert backward == {"all_gather": 2 * layers + 1, "reduce_scatter": 2 * layers + 1, "all_reduce": 1}
        else:
            assert forward == {"all_reduce": 2 * layers + 1, "all_gather": 1}
            assert backward == {"all_reduce": 2 * layers + 1}


class Net(nn.Module):
    """A column- then row-sharded pair of layers that returns one or two DTensors."""

    def __init__(self, mesh, graph_break=False, outputs=1):
        super().__init__()
        torch.manual_seed(1)
        self.graph_break, self.outputs = graph_break, outputs
        self.up = nn.Parameter(distribute_tensor(torch.randn(8, 12), mesh, [Shard(1)]))
        self.down = nn.Parameter(distribute_tensor(torch.randn(12, 8), mesh, [Shard(0)]))

    def forward(self, x):
        h = torch.relu(x @ self.up)
        if self.graph_break:
            torch._dynamo.graph_break()
        y = h @ self.down
        return (y, h * 2, (y * y).full_tensor().sum())[: self.outputs]


def gradients(model, x, loss):
    model.zero_grad()
    x = x.detach().requires_grad_()
    outs = model(x)
    loss(outs)
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in (x, *model.parameters())]
    return [whole(t).detach() for t in (*outs, *grads)]


LOSSES = {
    "both outputs": (2, lambda outs: (outs[0].sum() + (outs[1] * outs[1]).sum()).backward()),
    "first output unused": (2, lambda outs: outs[1].sum().backward()),
    "second output unused": (2, lambda outs: (outs[0] * outs[0]).sum().backward()),
    "plain loss, both outputs unused": (3, lambda outs: outs[2].backward()),
    "third output, which is plain, unused": (3, lambda outs: outs[1].sum().backward()),
    "plain tangent": (1, lambda outs: outs[0].backward(torch.arange(32.0).view(4, 8))),
    "local loss": (1, lambda outs: outs[0].redistribute(placements=[Replicate()]).to_local().sum().backward()),
    "written to": (1, lambda outs: (outs[0].mul_(2.0) * 3).sum().backward()),
    "sharded tangent": (1, lambda outs: (outs[0].redistribute(placements=[Shard(0)]) * 3).sum().backward()),
}
"""What is done -> the number of outputs, and how."""


@pytest.mark.parametrize(
    ("backend", "graph_break"),
    [
        pytest.param("dtensor, aot_eager", False, marks=pytest.mark.nightly),
        ("dtensor, aot_eager", True),
        pytest.param("plain", False, marks=pytest.mark.nightly),
        pytest.param("dtensor", False, marks=pytest.mark.nightly),
        pytest.param("dtensor", True, marks=pytest.mark.nightly),
        pytest.param("plain", True, marks=pytest.mark.nightly),
    ],
)
@with_ranks(2)
def test_borders(rank, backend, graph_break):
    mesh = init_device_mesh("cpu", (2,))
    for name, (outputs, loss) in LOSSES.items():
        if backend == "plain" and "unused" in name:
            continue  # Torch hands a plain zero to a graph that expects a DTensor; only our backend takes it.
        torch.compiler.reset()
        model = Net(mesh, graph_break, outputs)
        x = distribute_tensor(torch.randn(4, 8, generator=torch.Generator().manual_seed(3)), mesh, [Replicate()])
        expected = gradients(model, x, loss)
        compiled = torch.compile(model, fullgraph=not graph_break, **BACKENDS[backend])
        with statistics() as s:
            found = gradients(compiled, x, loss)
        assert s.graph_breaks == int(graph_break), name
        close(found, expected)


@with_ranks(2)
def test_plain_tangents_by_autograd_grad(rank):
    """Through torch.autograd.grad, which a method of the tensor cannot catch: the backend does."""
    mesh = init_device_mesh("cpu", (2,))
    model = Net(mesh)
    x = distribute_tensor(torch.randn(4, 8), mesh, [Replicate()])
    weight = torch.arange(32.0).view(4, 8)
    (expected,) = torch.autograd.grad(model(x)[0].full_tensor(), model.up, weight)
    compiled = torch.compile(model, fullgraph=True, backend="dtensor", options={"inner": "aot_eager"})
    (found,) = torch.autograd.grad(compiled(x)[0], model.up, weight)
    assert found.placements == (Shard(1),)
    close([whole(found)], [whole(expected)])


@pytest.mark.parametrize("used", [1, *[pytest.param(k, marks=pytest.mark.nightly) for k in (0, 2)]])
@with_ranks(2)
def test_unused_outputs_of_any_length(rank, used):
    """Zeros in their place have the length of the call; they are made in parts, as the outputs are."""
    mesh = init_device_mesh("cpu", (2,))
    model = Net(mesh, outputs=3)
    options = {"inner": "aot_eager", "agreement": False}
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="dtensor", options=options)
    for length in (4, 6):
        x = distribute_tensor(torch.randn(length, 8, generator=torch.Generator().manual_seed(3)), mesh, [Replicate()])
        found, expected = (gradients(m, x, lambda outs: outs[used].sum().backward()) for m in (compiled, model))
        close(found, expected)
