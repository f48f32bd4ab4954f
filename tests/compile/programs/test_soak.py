"""Two thousand training steps with batches of every size: nothing grows, and nothing is compiled again."""

import gc
import os

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from dtensor import init_device_mesh
from dtensor.testing import run_ranks
from tests.compile.programs.test_sequences import PLANS, Model, batch_of, part_of, sharded

STEPS, WARM = 2_000, 200
SIZES = (8, 5, 1, 9, 4, 2, 7, 3, 6)
GROWTH = 8 << 20
"""Bytes by which a process may grow after it is warm: the allocator's, not a few per step."""


def resident() -> int:
    """Bytes of memory that this process has."""
    gc.collect()
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    """Files and sockets that this process has open."""
    return len(os.listdir("/proc/self/fd"))


def train(rank, name):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", tuple(PLANS[name].values()), mesh_dim_names=tuple(PLANS[name]))
    model = sharded(Model(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, fullgraph=True, backend="dtensor", options={"inner": "aot_eager"})
    seen = {}
    for step in range(STEPS + 1):
        tokens, _ = part_of(batch_of(SIZES[step % len(SIZES)]), mesh)
        F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten(), reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (WARM, STEPS):
            seen[step] = resident(), descriptors(), counters["stats"]["unique_graphs"], len(gc.get_objects())
    return seen[WARM], seen[STEPS]


@pytest.mark.nightly
@pytest.mark.parametrize("name", PLANS)
def test_nothing_grows(name):
    for warm, end in run_ranks(train, 4 if name == "2d" else 2, name, timeout=900):
        grown = [b - a for a, b in zip(warm, end)]
        print(f"{name}: bytes, descriptors, graphs, objects after {STEPS - WARM} steps more: {grown}")
        assert grown[0] < GROWTH
        assert grown[1:3] == [0, 0]
        assert grown[3] < STEPS - WARM  # less than one object a step
