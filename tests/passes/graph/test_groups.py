"""What passes know of groups, by hand and from the meshes of a compiled function."""

import pytest
import torch
from torch.distributed import device_mesh

from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.compile import statistics
from dtensor.compile.backends.inductor import trace_key
from dtensor.compile.backends.run_passes import mesh_groups
from dtensor.mesh.mesh import facts, prepare
from dtensor.passes import MeshGroups
from dtensor.passes.graph import groups
from dtensor.prices.links import INTER, INTRA, Network
from dtensor.testing import fake_ranks, with_ranks

CUBE = MeshGroups(
    (((0,), "a"), ((1,), "b"), ((2,), "c"), ((0, 1), "ab"), ((0, 2), "ac"), ((1, 2), "bc"), ((0, 1, 2), "abc")),
    Network.of((2, 4, 8), (INTER, INTRA, INTRA), ((0, 1), (0, 2), (1, 2), (0, 1, 2))),
)
PLANE = MeshGroups((((0,), "b"), ((1,), "c"), ((0, 1), "bc")), Network.of((4, 8), INTRA, ((0, 1),)))
LINE = MeshGroups((((0,), "elsewhere"),), Network.of((64,)))


@pytest.fixture
def known():
    with groups.known([LINE, CUBE]):
        yield


def test_products(known):
    found = groups.product("a", "bc")
    assert found is not None
    assert (found.whole, found.first, found.second, found.nested, found.covers) == ("abc", "a", "bc", True, True)
    found = groups.product("c", "a")
    assert found is not None
    assert (found.whole, found.nested, found.covers) == ("ac", False, False)
    assert groups.product("a", "ab") is None
    assert groups.product("a", "elsewhere") is None
    assert groups.product("a", "nobody") is None


def test_numbering_has_to_nest(known):
    """The ranks of abc are numbered with c fastest: b between a and c makes ac and b no outer and inner axis."""
    nested = {(p, q): found.nested for p in ("a", "ac", "c") for q in ("b", "bc") if (found := groups.product(p, q))}
    assert nested == {("a", "b"): True, ("a", "bc"): True, ("ac", "b"): False, ("c", "b"): False}


def test_quotients(known):
    found = groups.quotient("abc", "b")
    assert found is not None
    assert (found.whole, found.first, found.second) == ("abc", "b", "ac")
    assert groups.quotient("b", "abc") is None
    assert groups.quotient("abc", "abc") is None
    assert groups.quotient("ab", "c") is None


def test_parts(known):
    assert groups.disjoint("a", "bc")
    assert not groups.disjoint("ab", "bc")
    assert not groups.disjoint("a", "elsewhere")
    assert groups.within("a", "ac")
    assert groups.within("elsewhere", "elsewhere")
    assert not groups.within("ac", "a")
    assert not groups.within("elsewhere", "abc")


def test_the_slowest_link_sets_the_cost(known):
    found = groups.product("a", "b")
    assert found is not None
    assert found.seconds("all_gather", "b") == pytest.approx(3 / 4 / INTRA.bandwidth)
    assert found.seconds("all_gather", "ab") == pytest.approx(7 / 8 / INTER.bandwidth)


def test_what_covers_a_slice_need_not_cover_its_mesh():
    with groups.known([PLANE]):
        found = groups.product("b", "c")
        assert found is not None
        assert found.covers
    with groups.known([PLANE, CUBE]):
        found = groups.product("b", "c")
        assert found is not None
        assert not found.covers


def test_nothing_is_known_outside():
    assert groups.product("a", "b") is None
    assert groups.within("a", "a")


@pytest.fixture
def mesh(fake_mesh):
    return fake_mesh(2, 2)


def forward(f, x):
    with statistics() as seen:
        torch.compile(f, backend="dtensor", fullgraph=True, options={"inner": "aot_eager"})(x)
    return [(c.op, c.group) for c in seen.forward]


def through(x, *steps):
    for placements in steps:
        x = x.redistribute(placements=placements)
    return x + 1


R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


@with_ranks(4)
def test_ranks_agree_where_lengths_do_not_divide(rank):
    """Compiled on real ranks, whose local sizes differ, the same values come out: no rank waits for another."""
    mesh = init_device_mesh("cpu", (2, 2))
    local = torch.arange(21.0).view(7, 3) * (rank + 1)
    made = {(P, P): DTensor.from_local(local, mesh, [P, P])}
    made[S0, S0] = distribute_tensor(torch.arange(21.0).view(7, 3), mesh, [S0, S0])
    for before, steps in [
        ((P, P), ([P, R], [R, R], [S0, R], [S0, S0])),
        ((S0, S0), ([S0, R], [R, R], [S1, R])),
    ]:
        compiled = torch.compile(through, backend="dtensor", fullgraph=True, options={"inner": "aot_eager"})
        torch.compiler.reset()
        want, got = (f(made[before], *steps) for f in (through, compiled))
        assert got.placements == want.placements
        torch.testing.assert_close(got.to_local(), want.to_local())


def test_compiled_reduction_that_is_cut_over_one_axis(mesh):
    names = facts(mesh).groups

    def f(x):
        whole = x.redistribute(placements=[Replicate(), Replicate()])
        return whole.redistribute(placements=[Shard(0), Replicate()]) + 1

    x = DTensor.from_local(torch.ones(4, 3), mesh, [Partial(), Partial()])
    assert forward(f, x) == [("reduce_scatter", names[0,]), ("all_reduce", names[1,])]


def test_compiled_gathers_over_one_axis_after_the_other(mesh):
    names = facts(mesh).groups

    def f(x):
        half = x.redistribute(placements=[Shard(0), Replicate()])
        return half.redistribute(placements=[Replicate(), Replicate()]) + 1

    x = distribute_tensor(torch.ones(8, 3), mesh, [Shard(0), Shard(0)])
    assert forward(f, x) == [("all_gather", names[0, 1])]
    uneven = distribute_tensor(torch.ones(7, 3), mesh, [Shard(0), Shard(0)])
    assert forward(f, uneven) == [("all_gather", names[1,]), ("all_gather", names[0,])]


def test_meshes_are_part_of_the_key_of_compiled_code(mesh):
    before = trace_key()
    distribute_tensor(torch.ones(8, 3), mesh, [Shard(0), Shard(0)])
    assert trace_key() != before


def test_meshes_of_destroyed_groups_are_left_out():
    """Their names are given again, to other groups."""
    kept = []
    for shape in ((2, 2), (2, 2, 2), (2, 1)):
        with fake_ranks(torch.Size(shape).numel()):
            mesh = device_mesh.init_device_mesh("cpu", shape)
            if not kept:
                prepare(mesh)
            names = facts(mesh).groups
            kept.append(mesh)
            assert [dict(m.names) for m in mesh_groups()] == [names]
    assert mesh_groups() == ()
