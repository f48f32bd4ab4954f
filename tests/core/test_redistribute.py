"""Plans and their execution: any layout to any other, on ranks that are threads; values against dense torch."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtensor import DTensor, Partial, PlacementError, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.layout import Layout
from dtensor.plan import plan
from dtensor.testing import run_threads, with_threads


def steps(src, dst, shape=(8, 8), mesh=(2, 2)):
    ndim = len(shape)
    return [s.op for s in plan(Layout.parse(src, ndim), Layout.parse(dst, ndim), shape, mesh, 4).steps]


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ("RR", "RR", []),
        ("S(0)R", "RR", ["all_gather"]),
        ("PR", "RR", ["all_reduce"]),
        ("PR", "S(1)R", ["reduce_scatter"]),
        ("RR", "RS(1)", ["shard"]),
        ("S(0)R", "S(1)R", ["all_to_all"]),
        ("RR", "PR", ["partial"]),
        ("S(0)S(0)", "S(0)R", ["all_gather"]),
        ("S(0)S(0)", "RR", ["all_gather", "all_gather"]),
        ("PP", "S(0)S(1)", ["reduce_scatter", "reduce_scatter"]),
    ],
)
def test_plans(src, dst, expected):
    assert steps(src, dst) == expected


def test_only_the_innermost_cut_moves():
    """Axis 0 cut first: to free it, axis 1 has to leave the dimension before."""
    found = steps("S(0)S(0)", "RS(0)", (1024, 8))
    assert found[-1] in ("all_gather", "shard", "all_to_all")
    assert len(found) > 1


def test_cost_grows_with_bytes_and_is_cached():
    a, b = Layout.parse("S(0)", 1), Layout.parse("R", 1)
    small, large = plan(a, b, (1024,), (4,), 4), plan(a, b, (2048,), (4,), 4)
    assert small.bytes == 0.75 * 4096
    assert large.bytes == 2 * small.bytes
    assert large.seconds > small.seconds
    assert plan(a, b, (1024,), (4,), 4) is small


def test_no_path_is_said():
    with pytest.raises(PlacementError, match=r"no redistribution from R to P\(product\)"):
        plan(Layout.parse("R", 1), Layout.parse("P(product)", 1), (4,), (2,), 4)


PLACED = st.sampled_from([Shard(0), Shard(1), Replicate(), Partial(), Partial("max")])
ANY = (Shard(0), Shard(1), Replicate())


def dense(parts, placements, mesh_shape, shape):
    """Put the ranks' local tensors together, axis by axis from the last, without the library."""
    for axis in reversed(range(len(mesh_shape))):
        n, joined = mesh_shape[axis], []
        for i in range(0, len(parts), n):
            group, p = parts[i : i + n], placements[axis]
            if isinstance(p, Shard):
                joined.append(torch.cat(group, p.dim))
            elif isinstance(p, Partial):
                stacked = torch.stack(group)
                joined.append(stacked.sum(0) if p.reduce_op == "sum" else stacked.amax(0))
            else:
                assert all(torch.equal(g, group[0]) for g in group)
                joined.append(group[0])
        parts = joined
    assert parts[0].shape == torch.Size(shape)
    return parts[0]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    mesh_shape=st.sampled_from([(2,), (3,), (2, 2), (1, 3)]),
    shape=st.tuples(st.integers(0, 7), st.integers(1, 6)),
    data=st.data(),
)
def test_any_layout_to_any_other(mesh_shape, shape, data):
    src = [data.draw(PLACED) for _ in mesh_shape]
    # Ranks that are threads cannot scatter a maximum: their process group knows sums only.
    dst = [
        data.draw(st.sampled_from([p, Replicate()]) if p == Partial("max") else st.sampled_from([p, *ANY])) for p in src
    ]
    dst = [Replicate() if isinstance(d, Partial) and d != p else d for d, p in zip(dst, src)]
    world = torch.Size(mesh_shape).numel()

    def rank_main(rank):
        mesh = init_device_mesh("cpu", mesh_shape)
        full = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
        local = distribute_tensor(full, mesh, [p if isinstance(p, Shard) else Replicate() for p in src]).to_local()
        at = mesh.get_coordinate() or []
        for axis, p in enumerate(src):
            if isinstance(p, Partial):
                local = local + 8 * at[axis]
        x = DTensor.from_local(local, mesh, src, shape=shape, stride=(shape[1], 1))
        y = x.redistribute(placements=dst)
        assert y.placements == tuple(dst)
        assert tuple(y.to_local().shape) == y._spec.local_shape()
        return x.to_local().clone(), y.to_local().clone()

    results = run_threads(rank_main, world)
    before = dense([r[0] for r in results], src, mesh_shape, shape)
    after = dense([r[1] for r in results], dst, mesh_shape, shape)
    assert torch.equal(before, after)


@with_threads(4)
def test_order_of_axes_on_one_dim(rank):
    """From the default order of cuts to the other one and back."""
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.arange(10), mesh, [Shard(0), Shard(0)])
    other = torch.ops.dtensor.redistribute(x, "S(0)#1S(0)#0", False)
    assert other.placements == x.placements
    at = mesh.get_coordinate() or []
    assert other.to_local().tolist() == torch.arange(10).chunk(2)[at[1]].chunk(2)[at[0]].tolist()
    assert torch.equal(other.full_tensor(), torch.arange(10))
    y = distribute_tensor(torch.arange(10.0), mesh, [Shard(0), Shard(0)]).requires_grad_()
    weight = torch.ops.dtensor.redistribute(x.float(), "S(0)#1S(0)#0", False).to_local()
    (torch.ops.dtensor.redistribute(y, "S(0)#1S(0)#0", False).to_local() * weight).sum().backward()
    assert torch.equal(y.grad.full_tensor(), torch.arange(10.0))


@with_threads(2)
def test_redistribute_to_partial_is_refused(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(PlacementError, match=r"cannot redistribute mesh axis 0 from S\(0\) to P: .*from_local"):
        x.redistribute(mesh, [Partial()])


@with_threads(2)
def test_async_result_waits_on_first_use(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    y = x.redistribute(mesh, [Replicate()], async_op=True)
    assert torch.equal((y + 1).to_local(), torch.arange(6.0) + 1)
