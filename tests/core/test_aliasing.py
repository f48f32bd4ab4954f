"""Views and their bases are one memory: whoever is written to, everyone reads what one device would have.

Tables of views and of writes; each pair runs as a short program on DTensors and on plain tensors. Some of the views
share memory with their base, others, of a sharded dimension that moved, are copies that have to follow it.
"""

import copy
import math
import pickle

import pytest
import torch

from dtensor._torch import is_alias_of
from dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor import aliasing
from dtensor.errors import OperatorError
from dtensor.testing import CountCollectives, run_threads, with_threads

VIEWS = {
    "row": lambda x: x[0],
    "column": lambda x: x[:, 1],
    "element": lambda x: x[2, 1],
    "rows": lambda x: x[1:],
    "columns": lambda x: x[:, 1:],
    "steps": lambda x: x[::2],
    "flat": lambda x: x.view(-1),
    "flattened": lambda x: x.flatten(),
    "other shape": lambda x: x.view(x.shape[1], x.shape[0]),
    "reshaped": lambda x: x.reshape(2, 2, -1),
    "transposed and flat": lambda x: x.t()[1:],
    "chunk": lambda x: x.chunk(2)[1],
    "chunk of columns": lambda x: x.chunk(2, 1)[0],
    "split": lambda x: x.split([1, 3])[1],
    "unbound": lambda x: x.unbind(1)[2],
    "narrow": lambda x: x.narrow(0, 1, 2),
    "windows": lambda x: x.unfold(0, 2, 2),
    "windows of columns": lambda x: x.unfold(1, 3, 3),
    "diagonal": lambda x: x.diagonal(1),
    "squeezed": lambda x: x.narrow(0, 2, 1).squeeze(0),
    "unsqueezed": lambda x: x.unsqueeze(1)[1],
    "strided": lambda x: x.as_strided((2, 3), (6, 2), 1),
    "transposed": lambda x: x.t(),
    "permuted": lambda x: x.view(2, 2, 6).permute(2, 0, 1)[1:],
    "detached": lambda x: x.detach()[1:],
    "data": lambda x: x.data[0],
    "row of columns": lambda x: x[:, 1:][0],
    "flat part": lambda x: x.view(-1)[3:9],
    "in place": lambda x: x[1:].t_(),
    "squeezed in place": lambda x: x[1:2].squeeze_(0),
}
"""Views of a tensor of 4 x 6."""

WRITES = {
    "add": lambda v: v.add_(1),
    "mul": lambda v: v.mul_(2),
    "copy": lambda v: v.copy_(torch.ones_like(v) * 7),
    "fill": lambda v: v.fill_(3),
    "zero": lambda v: v.zero_(),
    "set first": lambda v: (v.select(-1, 0) if v.dim() else v).fill_(9),
    "set item": lambda v: v.__setitem__(..., 5),
    "masked fill": lambda v: v.masked_fill_(v > 10, -1),
    "index put": lambda v: v[None].index_put_((torch.zeros_like(v, dtype=torch.int64).flatten()[:1],), v.amax() + 1),
    "out": lambda v: torch.add(v, v, out=v),
    "foreach": lambda v: torch._foreach_mul_([v, torch.ones_like(v)], 3),
    "data": lambda v: v.data.sub_(2),
    "detached": lambda v: v.detach().sub_(2),
    "clamp": lambda v: v.clamp_(3, 9),
    "reversed": lambda v: v.copy_(v.flatten().flip(0).view(v.shape)),
}

PLACEMENTS = {
    "rows": ((2,), [Shard(0)]),
    "columns": ((2,), [Shard(1)]),
    "replicated": ((2,), [Replicate()]),
    "rows, one rank with none": ((3,), [Shard(0)]),
    "both": ((2, 2), [Shard(0), Shard(1)]),
    "columns twice": ((2, 2), [Shard(1), Shard(1)]),
    "rows by the second axis": ((2, 2), [Replicate(), Shard(0)]),
}
"""Meshes and placements; 4 rows by three ranks are 2, 2 and none, 6 columns by two axes 2, 1, 2 and 1."""


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def program(x, view, write, others: bool) -> dict:
    """Who is read in the end, by name, after writes to the base, to the view, to the base, and to a sibling."""
    before = x.t()
    early = x.data
    v = view(x)
    seen = {"base": x, "view": v}
    if others:
        seen |= {"sibling": x[:, 1:], "part": v[..., -1:] if v.dim() else v, "before": before}
    results = {}

    def note(step):
        results.update({f"{name} after {step}": whole(x).clone() for name, x in seen.items()})

    with torch.no_grad():
        write(x)
        note("base")
        write(v)
        note("view")
        x.add_(1)
        write(v)
        note("both")
        if others:
            write(early)
            write(seen["sibling"])
            x[1].mul_(2)
            note("sibling")
            write(before)
            write(seen["part"])
            note("part")
    return results


def compare(mesh, placements, view: str, write: str, others: bool) -> None:
    dense = torch.arange(24.0).view(4, 6)
    expected = program(dense.clone(), VIEWS[view], WRITES[write], others)
    x = distribute_tensor(dense, mesh, placements)
    found = program(x, VIEWS[view], WRITES[write], others)
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{view}, {write}, {placements}: {name}: {found[name]} is not {value}"


@pytest.mark.parametrize("where", PLACEMENTS)
def test_views_and_writes(where):
    """Every view and every write with each placement, half of the pairs with one of them."""
    pairs_of(where, lambda i, j: i % 2 == j % 2 and (i + j) // 2 % len(PLACEMENTS) == list(PLACEMENTS).index(where))


@pytest.mark.nightly
@pytest.mark.parametrize("where", PLACEMENTS)
def test_all_views_and_writes(where):
    pairs_of(where, lambda i, j: True)


def pairs_of(where, chosen) -> None:
    shape, placements = PLACEMENTS[where]

    def rank(_):
        mesh = init_device_mesh("cpu", shape)
        for i, view in enumerate(VIEWS):
            for j, write in enumerate(WRITES):
                if chosen(i, j):
                    compare(mesh, placements, view, write, True)

    run_threads(rank, math.prod(shape))
