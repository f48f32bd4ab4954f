"""Calls that cannot be meant: one error each, which names what was given and what to write instead."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dtensor
from dtensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh, parallel
from dtensor.testing import with_threads

ROWS = torch.arange(8.0).view(4, 2)
TABLE = Path(__file__).with_name("bad_calls.txt")
"""Calls, each with the class and the beginning of its error on the line below."""


def table():
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    for call, error in zip(lines[::2], lines[1::2], strict=True):
        yield pytest.param(call, *error.strip().split(": ", 1), id=call)


def linear():
    return nn.Linear(4, 4)


def graded(value=1.0):
    """A parameter with a gradient."""
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.full((2,), value)
    return p


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("call", "kind", "words"), list(table()))
def test_one_error(fake_mesh, tmp_path, call, kind, words):
    """It names what was given, and what to write instead, or it is torch's where that says so, too."""
    mesh = fake_mesh(2)
    names = {
        **{name: getattr(dtensor, name) for name in (*vars(dtensor), *dtensor.__all__)},
        **vars(parallel),
        "ROWS": ROWS,
        "dtensor": dtensor,
        "graded": graded,
        "lin": linear,
        "mesh": mesh,
        "mesh2": init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")),
        "mesh3": init_device_mesh("cpu", (1, 1, 2)),
        "mlp": lambda: nn.Sequential(linear(), linear()),
        "np": np,
        "other": init_device_mesh("cpu", (1, 2)),
        "copy": copy,
        "tmp": tmp_path,
        "torch": torch,
        "x": distribute_tensor(ROWS, mesh, [Shard(0)]),
    }
    with pytest.raises(Exception, match=re.escape(words)) as raised:
        eval(call, names)
    assert type(raised.value).__name__ == kind


def test_there_are_many():
    assert len(list(table())) > 180


@pytest.mark.parametrize("op", ["sum", "product", "max", "avg"])
@with_threads(4)
def test_a_whole_value_may_be_given_as_partial(rank, op):
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in ([Partial(op), Replicate()], [Partial(op), Partial(op)], [Partial(op), Shard(0)]):
        x = distribute_tensor(ROWS, mesh, placements)
        assert x.placements == tuple(placements)
        assert torch.equal(x.full_tensor(), ROWS)


def test_numbers_of_numpy_are_numbers(fake_mesh):
    fake_mesh(2)
    mesh = init_device_mesh("cpu", tuple(np.array([1, 2])))
    assert mesh.shape == (1, 2)
    dtensor.random.manual_seed(np.int64(3))
    parallel.clip_grad_norm_([graded()], np.float32(1.0))
