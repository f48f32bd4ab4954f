"""DTensors of torch in any order of axes go over with torch's values; what no layout describes is refused."""

import itertools
import re

import pytest
import torch
import torch.distributed.tensor as theirs

from dtensor import PlacementError, Shard, distribute_tensor, init_device_mesh
from dtensor.interop import from_torch, to_torch
from dtensor.testing import with_threads
from dtensor.torch_private.core import strided_shard

VIEWS = {
    "itself": lambda t: t,
    "flattened": lambda t: t.flatten(),
    "its first two dims flattened": lambda t: t.flatten(0, 1),
    "its last two dims flattened": lambda t: t.flatten(-2),
    "unflattened": lambda t: t.unflatten(-1, (2, -1)),
    "transposed": lambda t: t.transpose(0, -1),
    "transposed and flattened": lambda t: t.transpose(0, -1).flatten(),
    "flattened and added to": lambda t: (t * 2).flatten() + 1,
    "with another dim": lambda t: t.unsqueeze(0),
}


def placed(x, mesh, placements):
    """torch's DTensor with these placements, of `x` or of as many of it as ranks hold parts of a sum."""
    whole = [theirs.Replicate() if p.is_partial() else p for p in placements]
    t = theirs.distribute_tensor(x, mesh, whole)
    return theirs.DTensor.from_local(t.to_local(), mesh, placements, run_check=False, shape=t.shape, stride=t.stride())


def crossing(t, wanted):
    """Whether torch's DTensor went over as it is, or only after the redistribution that the error names.

    Its values are asserted there and back.
    """
    was_taken = True
    try:
        x = from_torch(t)
    except PlacementError as error:
        written = re.search(r"write (from_torch\(.*\)), which communicates", str(error)).group(1)
        was_taken, x = False, eval(written, {"from_torch": from_torch, "x": t, **vars(theirs)})
    text = f"{t.placements} became {x.placements}"
    assert torch.equal(x.full_tensor(), wanted), text
    assert torch.equal(to_torch(x).full_tensor(), wanted), text
    assert x.to_local().data_ptr() == t.to_local().data_ptr() or not was_taken, text
    return was_taken


def crossings(mesh, shapes):
    """The number of DTensors that went over, and of those that had to be redistributed before."""
    taken = {True: 0, False: 0}
    kinds = [theirs.Replicate(), theirs.Partial(), theirs.Shard(0), theirs.Shard(1)]
    for shape, placements in itertools.product(shapes, itertools.product(kinds, repeat=mesh.ndim)):
        if any(p.is_shard() and p.dim >= len(shape) for p in placements):
            continue
        x = torch.arange(float(torch.Size(shape).numel())).view(shape)
        for view in VIEWS.values():
            try:
                t = view(placed(x, mesh, placements))
                wanted = t.full_tensor()
            except (RuntimeError, IndexError, NotImplementedError):  # no view of this, or none that torch can shard
                continue
            taken[crossing(t, wanted)] += 1
    return taken


@with_threads(2)
def test_views_on_one_axis(rank):
    taken = crossings(init_device_mesh("cpu", (2,)), [(4, 8), (2, 4, 2), (8,)])
    assert min(taken.values()) >= 10, taken


@pytest.mark.nightly
@with_threads(4)
def test_views_on_two_axes(rank):
    taken = crossings(init_device_mesh("cpu", (2, 2)), [(4, 8)])
    assert min(taken.values()) >= 20, taken


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 2), (2, 1), (3, 2)], ids=str)
def test_views_on_other_meshes(sizes):
    @with_threads(torch.Size(sizes).numel())
    def run(rank):
        taken = crossings(init_device_mesh("cpu", sizes), [(12, 24), (24, 12, 2), (48,)])
        assert min(taken.values()) >= 5, taken

    run()


@with_threads(4)
def test_orders_of_axes(rank):
    """A strided shard that states an order, of sizes that divide and of sizes that do not."""
    mesh = init_device_mesh("cpu", (2, 2))
    for shape, text in itertools.product([(4, 8), (5, 3), (7, 2, 2)], ["S(0)#1S(0)#0", "S(1)#1S(1)#0"]):
        x = torch.arange(float(torch.Size(shape).numel())).view(shape)
        y = torch.ops.dtensor.redistribute(distribute_tensor(x, mesh, None), text, False)
        t = to_torch(y)
        assert torch.equal(t.full_tensor(), x)
        assert from_torch(t)._spec is y._spec
        assert torch.equal((from_torch(t) * 2).full_tensor(), x * 2)


@with_threads(2)
def test_what_an_axis_of_one_rank_interleaves_is_whole(rank):
    mesh = init_device_mesh("cpu", (1, 2))
    x = torch.arange(8.0)
    local = x.chunk(2)[rank]
    t = theirs.DTensor.from_local(local, mesh, [strided_shard(0, 4), theirs.Shard(0)], run_check=False)
    assert torch.equal(from_torch(t).full_tensor(), x)


def test_in_a_compiled_graph(fake_mesh):
    mesh = fake_mesh(2, 2)
    strided = [strided_shard(0, 2), theirs.Shard(0)]
    t = theirs.DTensor.from_local(torch.ones(2, 3), mesh, strided, run_check=False, shape=(8, 3), stride=(3, 1))
    with pytest.raises(Exception, match=r"cannot be converted in compiled code; write from_torch\(x\) outside of it"):
        torch.compile(lambda t: from_torch(t) * 2, backend="aot_eager", fullgraph=True)(t)
    assert from_torch(t).placements == (Shard(0, cut=1), Shard(0, cut=0))
