"""Bags of embeddings and LSTMs of which something is cut: values and gradients of one device, and nothing gathered."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dtensor import (
    Replicate,
    Shard,
    distribute_model,
    distribute_tensor,
    fallbacks,
    implicit_replication,
    init_device_mesh,
)
from dtensor.testing import with_threads

IDS = {
    "fixed lengths": (torch.arange(12).view(4, 3) * 7 % 10, None, False),
    "offsets": (torch.arange(11) * 3 % 10, torch.tensor([0, 2, 2, 7]), False),
    "the last offset": (torch.arange(11) * 3 % 10, torch.tensor([0, 2, 2, 7, 11]), True),
}


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
@pytest.mark.parametrize("mode", ["sum", "weighted", "mean", "max"])
@pytest.mark.parametrize("name", IDS)
@with_threads(2)
def test_bags(rank, name, mode):
    mesh, before = init_device_mesh("cpu", (2,)), fallbacks()
    ids, offsets, last = IDS[name]
    table = torch.linspace(-1, 1, 60, dtype=torch.float64).view(10, 6)
    weights = torch.linspace(0.5, 2, ids.numel(), dtype=torch.float64).view(ids.shape) if mode == "weighted" else None
    options = {"mode": "sum" if mode == "weighted" else mode, "include_last_offset": last}
    for where, ids_where, padding in product((Shard(0), Shard(1)), (Replicate(), Shard(0)), (None, 3, -1)):
        dense = table.clone().requires_grad_()
        expected = F.embedding_bag(ids, dense, offsets, per_sample_weights=weights, padding_idx=padding, **options)
        expected.sin().sum().backward()
        cut = distribute_tensor(table, mesh, [where]).requires_grad_()
        given, of = distribute_tensor(ids, mesh, [ids_where]), None
        if weights is not None:
            of = distribute_tensor(weights, mesh, [ids_where])
        ends = None if offsets is None else distribute_tensor(offsets, mesh, [Replicate()])
        with implicit_replication():
            found = F.embedding_bag(given, cut, ends, per_sample_weights=of, padding_idx=padding, **options)
        torch.testing.assert_close(found.full_tensor(), expected)
        found.sin().sum().backward()
        torch.testing.assert_close(cut.grad.full_tensor(), dense.grad)
    if mode != "max":
        assert fallbacks() == before


LSTM = nn.LSTM(4, 6, 2, bidirectional=True)


@with_threads(2)
def test_lstm(rank):
    mesh, before = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), fallbacks()
    dense, model = nn.LSTM(4, 6, 2, bidirectional=True), nn.LSTM(4, 6, 2, bidirectional=True)
    dense.load_state_dict(LSTM.state_dict())
    model.load_state_dict(LSTM.state_dict())
    distribute_model(model, mesh, {"weight_*": {"tp": Shard(0)}}, outputs={}, check_inputs=False)
    x = torch.linspace(-1, 1, 60).view(5, 3, 4)
    (expected, _), (found, _) = dense(x), model(x)
    torch.testing.assert_close(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    for p, q in zip(model.parameters(), dense.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    assert fallbacks() == before
