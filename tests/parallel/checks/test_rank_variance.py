"""Plans that leave a parameter plain which meets this rank's part of a value: an error before the first update."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dtensor import ShardingError, init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, fully_shard, parallelize_module
from dtensor.testing import with_ranks, with_threads

WRONG = {"layers.*.q": ColwiseParallel(), "layers.*.o": RowwiseParallel()}
MENDED = {**WRONG, "layers.*.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True)}
MESSAGE = (
    r"gradient of layers.0.q_norm.weight differs between the ranks of axis 'tp' \(by .*RMSNorm computes "
    r"\(normalization.py:\d+: return F.rms_norm\(.*'layers.\*.q_norm'"
)


class Layer(nn.Module):
    """Heads that are normalised, as those of Qwen3."""

    def __init__(self):
        super().__init__()
        self.norm, self.q_norm = nn.LayerNorm(8), nn.RMSNorm(4)
        self.q, self.o = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        heads = self.q_norm(self.q(self.norm(x)).unflatten(-1, (-1, 4)))
        return x + self.o(heads.sin().flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(12, 8), nn.ModuleList([Layer(), Layer()])

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


MODEL = Model()


def loss_of(model, part=slice(None)):
    tokens = (torch.arange(20).view(4, 5) * 5 % 12)[part]
    return F.mse_loss(model(tokens), torch.linspace(-1, 1, 160).view(4, 5, 8)[part])


def trained(model, steps=3, reduce=lambda: None, part=slice(None), run=None):
    """The losses of some steps; `reduce` is called before each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = loss_of(model if run is None else run, part)
        loss.backward()
        reduce()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def tensor_parallel(plan, ranks=2) -> Any:
    return parallelize_module(copy.deepcopy(MODEL), init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)), plan)


@pytest.mark.parametrize("compiled", [False, True])
@with_ranks(2)
def test_nothing_is_trained_by_the_wrong_plan(rank, compiled):
    model = tensor_parallel(WRONG)
    run = torch.compile(model, backend="dtensor", options={"inner": "aot_eager"}) if compiled else model
    before = model.layers[0].q_norm.weight.detach().clone()
    with pytest.raises(ShardingError, match=MESSAGE):
        trained(model, run=run)
    assert torch.equal(model.layers[0].q_norm.weight, before)


@with_threads(2)
def test_with_the_entry_that_the_error_names(rank):
    assert trained(tensor_parallel(MENDED)) == pytest.approx(trained(copy.deepcopy(MODEL)), rel=1e-5)


@with_threads(2)
def test_gradients_that_are_summed_by_hand_are_right(rank):
    model = tensor_parallel(WRONG)

    def reduce():
        for layer in model.layers:
            dist.all_reduce(layer.q_norm.weight.grad)

    assert trained(model, reduce=reduce) == pytest.approx(trained(copy.deepcopy(MODEL)), rel=1e-5)


@with_threads(4)
def test_gradients_of_other_batches_are_no_matter(rank):
    """Data parallelism by hand over another axis, averaged after the step that looks, and none at all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, me = parallelize_module(copy.deepcopy(MODEL), mesh["tp"], MENDED), mesh.get_local_rank("dp")
    trained(model, steps=1, part=slice(2 * me, 2 * me + 2))


@with_threads(2)
def test_parameters_that_differ_by_intention(rank):
    model = tensor_parallel(WRONG)
    with torch.no_grad():
        for layer in model.layers:
            layer.q_norm.weight += rank
    trained(model, steps=1)


@pytest.mark.parametrize("first", ["fully_shard", "parallelize_module"])
@with_threads(4)
def test_beside_fully_shard(rank, first):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    part = slice(2 * mesh.get_local_rank("dp"), 2 * mesh.get_local_rank("dp") + 2)
    for plan in (WRONG, MENDED):
        model = copy.deepcopy(MODEL)
        if first == "fully_shard":
            fully_shard(model, mesh["dp"])
        parallelize_module(model, mesh["tp"], plan)
        if first != "fully_shard":
            fully_shard(model, mesh["dp"])
        if plan is WRONG:
            with pytest.raises(ShardingError, match=MESSAGE):
                trained(model, part=part)
        else:
            trained(model, part=part)


@with_ranks(2)
def test_a_compiled_step(rank):
    """Torch breaks the graph of a step itself; what looks at gradients is no part of it."""
    model = tensor_parallel(MENDED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    expected = model.table.weight - 0.1 * model.table.weight.grad
    torch.compile(optimizer.step, backend="eager")()
    torch.testing.assert_close(model.table.weight, expected)


@with_threads(2)
def test_in_double_precision(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(ShardingError, match=MESSAGE):
        trained(parallelize_module(copy.deepcopy(MODEL).double(), mesh, WRONG))
    trained(parallelize_module(copy.deepcopy(MODEL).double(), mesh, MENDED))
