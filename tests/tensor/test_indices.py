"""All forms of index, read, written and added to, on tensors of no to two dims: what one device gives."""

import itertools

import pytest
import torch

from dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.testing import with_ranks, with_threads

SHAPES = [(), (3,), (3, 2)]
INDICES = {
    "None": None,
    "...": ...,
    "True": True,
    "False": False,
    "true": torch.tensor(True),
    "false": torch.tensor(False),
    "one": torch.tensor(1),
    "0": 0,
    "-1": -1,
    "0:1": slice(0, 1),
    "1:": slice(1, None),
    "[0]": [0],
    "[1, 0]": [1, 0],
    "(1, 0)": (1, 0),
    "[True, False, True]": [True, False, True],
    "mask": torch.tensor([True, False, True]),
    "rows": torch.tensor([1, 0, 1]),
    "column": torch.tensor([[1], [0]]),
    "matrix of masks": torch.tensor([[True, False]] * 3),
}


def written(t, index):
    t = t.clone()
    t[index] = 7
    return t


def added(t, index):
    t = t.clone()
    t[index] += 5
    return t


USES = {"read": lambda t, index: t[index], "written": written, "added to": added}


def cases(number):
    """(shape, index, use, result on one device) for each index of at most `number` items that torch takes."""
    for shape, n in itertools.product(SHAPES, range(1, number + 1)):
        x = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
        for names in itertools.product(INDICES, repeat=n):
            index = tuple([INDICES[name] for name in names])
            for use in USES:
                try:
                    yield x, names, use, USES[use](x, index if n > 1 else index[0])
                except (IndexError, TypeError, RuntimeError):
                    continue


def check(mesh, x, names, use, wanted, run):
    given = [INDICES[name] for name in names]
    index = [distribute_tensor(i, mesh, None) if isinstance(i, torch.Tensor) else i for i in given]
    for p in (Replicate(), *[Shard(d) for d in range(x.dim())]):
        found = run(distribute_tensor(x, mesh, [p]), tuple(index) if len(index) > 1 else index[0])
        assert torch.equal(found.full_tensor(), wanted), f"{use} by {names} on {list(x.shape)}, {p}"


@with_threads(2)
def test_one_item(rank):
    mesh = init_device_mesh("cpu", (2,))
    for x, names, use, wanted in cases(1):
        check(mesh, x, names, use, wanted, USES[use])


@pytest.mark.nightly
@with_threads(2)
def test_two_items(rank):
    mesh = init_device_mesh("cpu", (2,))
    for x, names, use, wanted in cases(2):
        check(mesh, x, names, use, wanted, USES[use])


def cleaned(t):
    t = t.clone()
    t[t != t] = 0
    return t


@with_ranks(2)
def test_masks_without_dims_compiled_and_in_an_optimizer(rank):
    mesh = init_device_mesh("cpu", (2,))
    for value in (float("nan"), 2.0):
        x = torch.tensor(value)
        run = torch.compile(cleaned, backend="dtensor", options={"inner": "aot_eager"})
        assert torch.equal(run(distribute_tensor(x, mesh, None)).full_tensor(), cleaned(x))
    scales = [torch.tensor(1.5).requires_grad_(), distribute_tensor(torch.tensor(1.5), mesh, None).requires_grad_()]
    for scale in scales:
        optimizer = torch.optim.Rprop([scale])
        for sign in (1, -1, -1):
            (scale * sign).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(scales[1].full_tensor(), scales[0])


@pytest.mark.nightly
@with_ranks(2)
def test_one_item_compiled(rank):
    mesh = init_device_mesh("cpu", (2,))
    for x, names, use, wanted in cases(1):
        torch.compiler.reset()
        run = torch.compile(USES[use], backend="dtensor", options={"inner": "aot_eager"})
        if names in (("one",), ("true",), ("false",)) and use != "read":
            continue  # the graph breaks where torch reads the index, within the write, which may be refused
        check(mesh, x, names, use, wanted, run)
