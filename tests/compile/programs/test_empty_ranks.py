"""Ranks that have nothing of a tensor, in graphs whose sizes are symbols: one device's values and gradients.

Of four rows or columns three ranks have 2, 2 and none.
"""

import pytest
import torch
import torch.nn.functional as F

from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.mesh.local_sizes import local_length
from dtensor.testing import fake_ranks, with_ranks
from dtensor.torch_private.symbolic_sizes import number_if_guarded, number_if_known, stand_in, symbolic_mode

PROGRAMS = {
    "softmax": lambda x, k: x.softmax(1),
    "columns that are normalised": lambda x, k: x.log_softmax(0) + x.logsumexp(1, True),
    "expanded": lambda x, k: x.unsqueeze(0).expand(k, *x.shape) * 2,
    "in chunks": lambda x, k: torch.cat(x.chunk(k), 1),
    "split by sizes": lambda x, k: torch.cat(x.split([1, k, x.shape[0] - k - 1])[::-1]) * 2,
    "a product with a vector": lambda x, k: x.mv(x[0].detach()),
    "resized by a float": lambda x, k: F.interpolate(x.unsqueeze(1), scale_factor=1.7),
    "a convolution of any stride": lambda x, k: F.conv1d(x.unsqueeze(1), x.detach()[:1, :k].unsqueeze(1), None, k, k),
    "rows by a mask": lambda x, k: x[x.detach()[:, 0] > 0] * 2,
    "elements by a mask": lambda x, k: x[x.detach() > 0].sin(),
    "masked_select": lambda x, k: x.masked_select(x.detach() > 0),
}


BY_DAY = ("columns that are normalised", "a convolution of any stride", "rows by a mask")
"""One of each kind: reductions, formulas of sizes, and sizes that depend on values."""


@pytest.mark.parametrize(
    ("names", "first"),
    [
        pytest.param(BY_DAY, 0, id="some"),
        pytest.param(tuple(PROGRAMS), 0, id="all", marks=pytest.mark.nightly),
        pytest.param(tuple(PROGRAMS), 1, id="all-other-dims", marks=pytest.mark.nightly),
    ],
)
@with_ranks(3)
def test_one_rank_has_nothing(rank, names, first):
    """Rows and columns in turn."""
    mesh = init_device_mesh("cpu", (3,))
    for k, name in enumerate(names):
        fn, dim = PROGRAMS[name], (first + k) % 2
        torch.compiler.reset()
        ours = torch.compile(fn, backend="dtensor", fullgraph=True, dynamic=True, options={"inner": "aot_eager"})
        for n in (4, 6):
            x = torch.linspace(-2, 3, n * n, dtype=torch.float64).sin().view(n, n).requires_grad_()
            given = distribute_tensor(x.detach(), mesh, [Shard(dim)]).requires_grad_()
            found, expected = ours(given, 2), fn(x, 2)
            torch.testing.assert_close(found.full_tensor(), expected, msg=f"{name}, {n}: {{}}".format)
            expected.square().sum().backward()
            found.square().sum().backward()
            torch.testing.assert_close(given.grad.full_tensor(), x.grad, msg=f"{name}, {n}: {{}}".format)


@pytest.mark.parametrize(("rank", "part"), [(0, 2), (2, 1), (3, 0)])
def test_what_holds_on_some_ranks_makes_a_number_of_the_length(rank, part):
    with fake_ranks(4, rank):
        group = init_device_mesh("cpu", (4,)).get_group().group_name
        s = stand_in(symbolic_mode(), torch.empty(5), "x", True).shape[0]
        mine = local_length(s, group)
        assert mine < s  # on every rank
        assert number_if_known(s) is s
        assert bool(mine % 3 == 2) is (part == 2)
        assert number_if_known(s) == 5
        assert number_if_known(mine) == part


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_part_of_one_row_is_cut_again(rank):
    """Two rows over two and two ranks: once a part is known to have one, its own parts have one or none."""
    with fake_ranks(4, rank):
        rows, columns = (group.group_name for group in init_device_mesh("cpu", (2, 2)).get_all_groups())
        s = stand_in(symbolic_mode(), torch.empty(2), "x", True).shape[0]
        part = local_length(s, rows)
        part_of_part = local_length(part, columns)
        assert part < 2
        assert s.node.expr == 2
        assert number_if_known(part_of_part) == (rank + 1) % 2


@pytest.mark.parametrize(("rank", "part"), [(0, 1), (1, 0)])
def test_a_formula_that_a_guard_makes_a_number(rank, part):
    """Half of two rows is one: the trace writes no other symbol for it, and knows the parts of it."""
    with fake_ranks(2, rank):
        group = init_device_mesh("cpu", (2,)).get_group().group_name
        half = stand_in(symbolic_mode(), torch.empty(2), "x", True).shape[0] // 2
        assert number_if_guarded(half) is half
        assert half == 1
        assert number_if_guarded(half) == 1
        assert number_if_known(local_length(half, group)) == part


def channels(x, w):
    """Of a batch of two rows one channel, which one of two ranks has."""
    return F.conv2d(x.unflatten(0, (-1, 2)), w, padding=1)


@with_ranks(2)
def test_a_part_of_a_formula_that_is_a_number(rank):
    """What the ranks compare was one row on the one and none on the other."""
    mesh = init_device_mesh("cpu", (2,))
    options = {"inner": "aot_eager", "disable": ("lower",)}
    run = torch.compile(channels, backend="dtensor", fullgraph=True, dynamic=True, options=options)
    x, w = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4), torch.ones(2, 1, 2, 1, dtype=torch.float64)
    given = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    found = run(given, DTensor.from_local(w / 2, mesh, [Partial()]))
    x.requires_grad_()
    expected = channels(x, w)
    torch.testing.assert_close(found.full_tensor(), expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(given.grad.full_tensor(), x.grad)


def scaled(x, y, column):
    return F.cosine_similarity(torch.cat([x, x], 1), y, dim=1), x * column


@with_ranks(4)
def test_a_length_that_a_pass_finds_to_be_a_number(rank):
    """Two rows, known only when collectives are lowered: where a rank has nothing of the column and pads it, it saw a
    number of rows, the others a symbol, and put other collectives into one bucket."""
    mesh = init_device_mesh("cpu", (2, 2))
    run = torch.compile(scaled, backend="dtensor", fullgraph=True, options={"inner": "aot_eager"})
    for n in (6, 2):
        given = [torch.linspace(-1, 1, n * k, dtype=torch.float64).sin().view(n, k) for k in (4, 8, 1)]
        placements = ([Shard(1), Partial()], [Shard(1), Shard(1)], [Shard(1), Partial()])
        parts = []
        for x, (first, second) in zip(given, placements):
            whole = second.is_partial()
            cut = distribute_tensor(x, mesh, [first, Replicate() if whole else second]).to_local()
            sizes = {"shape": x.shape, "stride": x.stride()}
            parts.append(DTensor.from_local(cut / 2 if whole else cut, mesh, [first, second], **sizes))
        for found, expected in zip(run(*parts), scaled(*given)):
            torch.testing.assert_close(found.full_tensor(), expected)


def test_a_length_is_not_read_from_a_stride(fake_mesh):
    """Beside a length of zero the stride is one: a gather made one row where a rank has none."""
    with fake_ranks(3, 2):
        x = distribute_tensor(torch.rand(4, 4), init_device_mesh("cpu", (3,)), [Shard(1)])
        ours = torch.compile(
            lambda x: (-x).redistribute(placements=[Shard(0)]),
            backend="dtensor",
            fullgraph=True,
            dynamic=True,
            options={"inner": "aot_eager", "agreement": False},
        )
        y = ours(x)
        assert isinstance(y, DTensor)
        assert y.to_local().shape == (0, 4)
    torch.compiler.reset()


@pytest.mark.parametrize(("rank", "part"), [(0, 2), (3, 0)])
def test_a_length_whose_bounds_meet_is_not_that_of_every_rank(rank, part):
    """A trace takes a part to be two or more: with a guard that it is two at most, torch writes 2 for it."""
    with fake_ranks(4, rank):
        group = init_device_mesh("cpu", (4,)).get_group().group_name
        mine = local_length(stand_in(symbolic_mode(), torch.empty(5), "x", True).shape[0], group)
        assert mine <= 2
        assert number_if_known(mine) == part
