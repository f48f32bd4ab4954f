"""What contradicts the tensors it is said of is refused where it is said, eager and in a trace."""

import pytest
import torch

from dtensor import (
    DTensor,
    Partial,
    PlacementError,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    local_map,
    ones,
    rand,
)
from dtensor.testing import fake_ranks, with_threads

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
SIZES = {
    "too short": ([S0], (5, 6), (6, 1), r"of shape \(5, 6\).*holds \(3, 6\).*local tensor has shape \(4, 6\)"),
    "too long": ([S0], (9, 6), (6, 1), "holds"),
    "not sharded there": ([S1], (8, 6), (6, 1), "holds"),
    "replicated": ([R], (8, 6), (6, 1), "holds"),
    "parts": ([P], (8, 6), (6, 1), "holds"),
    "more dimensions": ([S0], (8, 6, 1), (6, 1, 1), "has 3 dimensions, the local tensor 2"),
    "no dimensions": ([S0], (), (), "has 0 dimensions"),
    "short stride": ([S0], (8, 6), (6,), "stride .* has 1 dimensions"),
    "negative stride": ([S0], (8, 6), (-6, 1), "stride must hold one int of at least 0"),
    "negative shape": ([S0], (-8, 6), (6, 1), "shape must hold one int of at least 0"),
    "fractions": ([S0], (8.0, 6), (6, 1), "shape must hold one int of at least 0"),
    "one number": ([S0], 8, 1, "shape must hold one int of at least 0"),
}
"""Sizes that a local tensor of shape (4, 6) on the first of two ranks contradicts."""


@pytest.mark.parametrize("name", SIZES)
def test_from_local_refuses_sizes(fake_mesh, name):
    placements, shape, stride, text = SIZES[name]
    mesh = fake_mesh(2)
    with pytest.raises(PlacementError, match=f"(?s)from_local: .*{text}"):
        DTensor.from_local(torch.zeros(4, 6), mesh, placements, shape=shape, stride=stride)


@pytest.mark.parametrize("name", ["too short", "replicated", "more dimensions", "short stride", "negative stride"])
def test_from_local_refuses_sizes_in_a_trace(fake_mesh, name):
    placements, shape, stride, text = SIZES[name]
    mesh = fake_mesh(2)

    @torch.compile(backend="dtensor", options={"inner": "aot_eager"}, fullgraph=True)
    def step(x):
        return DTensor.from_local(x, mesh, placements, shape=shape, stride=stride).to_local() * 2

    with pytest.raises(RuntimeError, match=f"(?s)from_local: .*{text}"):
        step(torch.zeros(4, 6))


@pytest.mark.parametrize("shape", [(0, 2), (1, 2), (3, 2), (4, 2), (5, 2), (7, 2), (8, 2)])
def test_every_shard_that_distribute_tensor_cuts_is_taken(shape):
    """Uneven and empty shards, on one axis and on two of one dimension."""
    for mesh_shape, placements in (((3,), [S0]), ((2, 2), [S0, S0]), ((2, 2), [S1, S0])):
        ranks = torch.Size(mesh_shape).numel()
        for rank in range(ranks):
            with fake_ranks(ranks, rank):
                mesh = init_device_mesh("cpu", mesh_shape)
                local = distribute_tensor(torch.zeros(shape), mesh, placements, src_data_rank=None).to_local()
                made = DTensor.from_local(local, mesh, placements, shape=shape, stride=(2, 1))
                assert made.shape == torch.Size(shape)
                longer = torch.zeros(local.shape[0] + 1, local.shape[1])
                with pytest.raises(PlacementError, match="from_local"):
                    DTensor.from_local(longer, mesh, placements, shape=shape, stride=(2, 1))


@with_threads(2)
def test_run_check_tells_all_ranks(rank):
    mesh = init_device_mesh("cpu", (2,))
    local = torch.zeros(3 if rank == 0 else 1, 2)
    with pytest.raises(PlacementError, match=r"from_local: rank 1: .*holds \(2, 2\)"):
        DTensor.from_local(local, mesh, [S0], run_check=True, shape=(5, 2), stride=(2, 1))


GRADIENTS = {
    "another number": ([S0, S0], "1 axis but 2 placements"),
    "no such dimension": ([Shard(5)], r"Shard\(5\) does not fit"),
    "no placement": ([3], "a placement is"),
    "no sequence": ("S(0)", "placements must be a sequence"),
    "another dimension": ([S1], r"cannot be Shard\(dim=1\)"),
    "whole": ([R], r"cannot be Replicate\(\)"),
    "parts": ([P], "cannot be Partial"),
    "largest of parts": ([Partial("max")], "a partial gradient is a sum"),
}
"""Placements that no gradient of a tensor sharded on dimension 0 has, for one reason or another."""
BORDERS = {
    "from_local": lambda x, m, g: DTensor.from_local(x, m, [S0], grad_placements=g),
    "to_local": lambda x, m, g: DTensor.from_local(x, m, [S0]).to_local(grad_placements=g),
    "to_local, no gradient": lambda x, m, g: DTensor.from_local(x.detach(), m, [S0]).to_local(grad_placements=g),
    "local_map": lambda x, m, g: local_map(torch.sin, [S0], ([S0],), (g,))(DTensor.from_local(x, m, [S0])),
}


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_grad_placements(fake_mesh, border, name):
    mesh, (given, text) = fake_mesh(2), GRADIENTS[name]
    with pytest.raises(PlacementError, match=text):
        BORDERS[border](torch.zeros(4, 6, requires_grad=True), mesh, given)


@pytest.mark.parametrize("name", ["another number", "no such dimension", "whole", "largest of parts"])
@pytest.mark.parametrize("border", ["from_local", "to_local"])
def test_grad_placements_in_a_trace(fake_mesh, border, name):
    mesh, (given, text) = fake_mesh(2), GRADIENTS[name]

    @torch.compile(backend="dtensor", options={"inner": "aot_eager"}, fullgraph=True)
    def step(x):
        return BORDERS[border](x, mesh, given) * 2

    with pytest.raises(Exception, match=text):
        step(torch.zeros(4, 6, requires_grad=True))


@pytest.mark.parametrize("name", ["another number", "no such dimension", "no placement", "largest of parts"])
def test_grad_placements_of_redistribute(fake_mesh, name):
    mesh, (given, text) = fake_mesh(2), GRADIENTS[name]
    x = distribute_tensor(torch.zeros(4, 6), mesh, [S0]).requires_grad_()
    with pytest.raises(PlacementError, match=text):
        x.redistribute(placements=[R], grad_placements=given)


def test_grad_placements_of_full_tensor(fake_mesh):
    x = distribute_tensor(torch.zeros(4, 6), fake_mesh(2), [S0]).requires_grad_()
    with pytest.raises(PlacementError, match="write Replicate\\(\\) or Partial\\(\\)"):
        x.full_tensor(grad_placements=[S0])
    for given in ([R], [P], [Partial("avg")]):
        assert x.full_tensor(grad_placements=given).shape == (4, 6)


def test_local_map_looks_at_what_is_no_dtensor(fake_mesh):
    x = distribute_tensor(torch.zeros(4, 6), fake_mesh(2), [S0])
    with pytest.raises(PlacementError, match=r"Shard\(9\) does not fit"):
        local_map(lambda a, b: a, [S0], ([S0], [Shard(9)]))(x, torch.zeros(3))
    with pytest.raises(PlacementError, match=r"in_grad_placements\[1\].* is not a tensor but 3"):
        local_map(lambda a, b: a, [S0], ([S0], None), (None, [S0]))(x, 3)
    with pytest.raises(PlacementError, match="in_placements holds placements for each argument"):
        local_map(torch.sin, [S0], 3)(x)


def test_what_is_made(fake_mesh):
    mesh = fake_mesh(2)
    with pytest.raises(TypeError, match="distribute_tensor takes a tensor, got list"):
        distribute_tensor([1, 2], mesh, [S0])
    for size in ((-3,), (4, -3), (3.5,)):
        for make in (ones, rand):
            with pytest.raises(ValueError, match="ints of at least 0"):
                make(*size, device_mesh=mesh, placements=[S0])
