"""Random numbers, one rank after the other in one process: each holds its shard of what one device draws.

`tests/tensor/test_random.py` draws them on ranks that run at the same time.
"""

import pytest
import torch

from dtensor import DTensor, init_device_mesh
from dtensor.layout.layout import Layout
from dtensor.rules import families
from dtensor.testing import fake_ranks
from dtensor.testing.rules.candidates import cut
from tests.tensor.test_random import DRAWS

aten = torch.ops.aten

SHARED = ("bernoulli_", "uniform_", "normal_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_.from")
IN_PLACE = {name: DRAWS[name] for name in SHARED}
IN_PLACE["bernoulli_ of a row"] = lambda x: x.bernoulli_(x.new_full(x.shape[1:], 0.3))
NEW = {
    "rand_like": torch.rand_like,
    "rand_like of another type": lambda x: torch.rand_like(x, dtype=torch.float64),
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "normal_functional": lambda x: aten.normal_functional.default(x, 2.0, 0.5),
    "bernoulli.p": lambda x: aten.bernoulli.p(x, 0.3),
    "dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "mask of a dropout": lambda x: torch.native_dropout(x, 0.4, True)[1],
    "dropout of all": lambda x: torch.native_dropout(x, 1.0, True)[0],
    "dropout of none": lambda x: torch.native_dropout(x, 0.0, True)[0],
    "no dropout": lambda x: torch.native_dropout(x, 0.4, False)[0],
    "mask of no dropout": lambda x: torch.native_dropout(x, 0.4, False)[1],
}
SHAPES = [(5, 4), (1, 6), (4, 0), (3, 2, 4)]


def seeded(draw, x):
    torch.manual_seed(3)
    return draw(x), torch.rand(2)


def shards(draw, dense, dim, turned, n=3):
    """For each rank what it draws, and what its generator gives next; `dim` is the sharded dimension, if any.

    What it draws into lies in memory as the whole, or `turned`."""
    for rank in range(n):
        with fake_ranks(n, rank):
            mesh = init_device_mesh("cpu", (n,))
            layout = Layout.make(1, ((),) * dense.dim(), ())
            layout = layout if dim is None else layout.moved(0, dim=dim)
            local = cut(dense, dim, n)[rank]
            local = local if dense.is_contiguous() is not turned else local.mT.contiguous().mT
            yield seeded(draw, DTensor(local, mesh, layout, dense.shape, dense.stride()))


def check(draw, dense, in_place, turned=False):
    expected, after = seeded(draw, dense.clone() if in_place else dense)
    for dim in (None, *range(dense.dim())):
        for rank, (found, rest) in enumerate(shards(draw, dense, dim, turned)):
            (placement,) = found.placements
            at = placement.dim if placement.is_shard() else None
            assert not in_place or at == dim
            assert torch.equal(found._local_tensor, cut(expected, at, 3)[rank]), (dim, rank)
            assert found.dtype == found._local_tensor.dtype
            assert found.dtype == expected.dtype or not expected.numel()  # torch gives another mask of nothing
            assert found.stride() == expected.stride()
            assert torch.equal(rest, after), "the generators of the ranks are in other states"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [*IN_PLACE, *NEW])
def test_each_rank_draws_its_part(name, shape):
    dense = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    check({**IN_PLACE, **NEW}[name], dense, name in IN_PLACE)


@pytest.mark.parametrize("name", [*IN_PLACE, "rand_like", "randn_like", "dropout"])
def test_numbers_are_drawn_in_the_order_of_memory(name):
    dense = torch.rand((4, 5), generator=torch.Generator().manual_seed(0)).t()
    check({**IN_PLACE, **NEW}[name], dense, name in IN_PLACE)


@pytest.mark.parametrize("name", [*IN_PLACE, "rand_like", "randn_like", "dropout"])
def test_locals_in_another_order_get_the_same_numbers(name):
    dense = torch.rand((4, 5), generator=torch.Generator().manual_seed(0))
    check({**IN_PLACE, **NEW}[name], dense, name in IN_PLACE, turned=True)


@pytest.mark.parametrize("name", ["uniform_", "normal_", "random_.from", "exponential_", "rand_like", "randn_like"])
def test_large_tensors_are_drawn_in_blocks(name, monkeypatch):
    monkeypatch.setattr(families.random, "BLOCK", 32)
    blocks = []
    sample = families.random.sample
    monkeypatch.setattr(families.random, "sample", lambda *given: blocks.append(given[-1]) or sample(*given))
    dense = torch.rand((11, 13), generator=torch.Generator().manual_seed(0))
    check({**IN_PLACE, **NEW}[name], dense, name in IN_PLACE)
    # Of the 3 ranks times 2 dimensions; what is drawn whole, or in another order than that of memory, is not.
    assert blocks == ([] if name == "exponential_" else [32] * 6)
