"""DTensor at its borders: from_local, to_local, full_tensor, gradients, errors, copies."""

import copy
import io

import pytest
import torch
from torch import nn

from dtensor import (
    DTensor,
    MeshError,
    MixedTensorError,
    OperatorError,
    Partial,
    PlacementError,
    Replicate,
    Shard,
    ShardingError,
    distribute_tensor,
    init_device_mesh,
)
from dtensor.dispatch import dispatch
from dtensor.testing import with_threads


def mesh_of(n=2, *more):
    return init_device_mesh("cpu", (n, *more))


@with_threads(2)
def test_from_local_shapes(rank):
    mesh = mesh_of()
    x = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(1)])
    assert (x.shape, x.stride(), x.placements) == ((3, 8), (8, 1), (Shard(1),))
    y = DTensor.from_local(torch.ones(4, 3).t(), mesh, [Shard(0)])
    assert (y.shape, y.stride()) == ((6, 4), (1, 6))
    uneven = DTensor.from_local(torch.ones(3 - rank, 2), mesh, [Shard(0)], shape=(5, 2), stride=(2, 1))
    assert uneven.full_tensor().shape == (5, 2)
    with pytest.raises(ValueError, match="shape and stride together or neither"):
        DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=(6,))
    with pytest.raises(TypeError, match="plain tensor, got DTensor"):
        DTensor.from_local(x, mesh, [Shard(0)])


@with_threads(2)
def test_run_check(rank):
    mesh = mesh_of()
    x = DTensor.from_local(torch.full((3,), float(rank)), mesh, [Replicate()], run_check=True)
    assert x.to_local().tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(PlacementError, match=r"differ between the ranks of the mesh: \{0: .*, 1: .*pass the global"):
        DTensor.from_local(torch.ones(2 + rank), mesh, [Shard(0)], run_check=True)


@with_threads(2)
def test_run_check_leaves_the_local_tensor_as_it_is(rank):
    """Its gradient arrives all the same."""
    local = torch.full((3,), float(rank), requires_grad=True)
    x = DTensor.from_local(local, mesh_of(), [Replicate()], run_check=True)
    assert x.to_local().tolist() == [0.0, 0.0, 0.0]
    assert local.tolist() == [float(rank)] * 3
    x.sum().to_local().backward()
    assert local.grad.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial(), Partial("avg")])
@with_threads(2)
def test_gradient_of_from_local(rank, placement):
    """Each rank's gradient is the derivative of the global value by its own part; replicas count as one tensor."""
    mesh = mesh_of()
    local = torch.arange(4.0).requires_grad_()
    x = DTensor.from_local(local, mesh, [placement])
    weight = torch.arange(1.0, x.shape[0] + 1)
    (x * distribute_tensor(weight, mesh, [Replicate()])).sum().backward()
    expected = {"S": weight[4 * rank : 4 * rank + 4], "R": weight, "P": weight, "P(avg)": weight / 2}
    assert torch.equal(local.grad, expected[str(placement)[:1] if placement.is_shard() else str(placement)])


@with_threads(2)
def test_gradients_with_grad_placements(rank):
    mesh = mesh_of()
    x = distribute_tensor(torch.ones(4), mesh, [Replicate()]).requires_grad_()
    (x.to_local(grad_placements=[Partial()]) * (rank + 1)).sum().backward()
    assert x.grad.placements == (Partial(),)
    assert x.grad.full_tensor().tolist() == [3.0] * 4
    local = torch.ones(4, requires_grad=True)
    y = DTensor.from_local(local, mesh, [Replicate()], grad_placements=[Partial()])
    weight = DTensor.from_local(torch.full((4,), rank + 1.0), mesh, [Partial()])
    (y * weight).sum().backward()
    assert local.grad.tolist() == [rank + 1.0] * 4


@with_threads(4)
def test_gradient_of_redistribute_and_double_backward(rank):
    mesh = mesh_of(2, 2)
    dense = torch.arange(24.0).view(4, 6).requires_grad_()
    x = distribute_tensor(dense, mesh, [Shard(0), Shard(1)]).requires_grad_()
    out = x.redistribute(placements=[Replicate(), Shard(0)])
    (g,) = torch.autograd.grad((out * out * out).sum(), x, create_graph=True)
    assert g.placements == x.placements
    (h,) = torch.autograd.grad(g.sum(), x)
    assert torch.equal(g.full_tensor(), 3 * dense.detach() ** 2)
    assert torch.equal(h.full_tensor(), 6 * dense.detach())


@with_threads(2)
def test_plain_gradient_in_backward(rank):
    mesh = mesh_of()
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).requires_grad_()
    (x * 2).backward(torch.arange(8.0).view(4, 2))
    assert torch.equal(x.grad.full_tensor(), 2 * torch.arange(8.0).view(4, 2))


@with_threads(2)
def test_errors_name_what_was_given(rank):
    mesh = mesh_of()
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(MixedTensorError, match=r"argument 'other' is a plain tensor of shape \[4\].*distribute_tensor"):
        x + torch.ones(4)
    assert torch.equal((x + torch.tensor(1.0)).full_tensor(), torch.full((4,), 2.0))
    with pytest.raises(MixedTensorError, match=r"would write a DTensor into a plain tensor; write x.full_tensor"):
        torch.tensor(1.0).add_(x.sum())
    other = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2, 1)), [Shard(0), Replicate()])
    with pytest.raises(MeshError, match="argument 'other' lives on"):
        x + other
    with pytest.raises(ValueError, match=r"prefer is 'time' or 'memory'; got 'speed'"):
        x.redistribute(mesh, [Replicate()], prefer="speed")
    matrix = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    with pytest.raises(MixedTensorError, match=r"aten.mm.out: argument 'out' is a plain tensor"):
        torch.mm(matrix, matrix, out=torch.empty(4, 4))
    with pytest.raises(OperatorError, match=r"aten.mm.out: out= has shape \[4\], the result \[4, 4\]"):
        torch.mm(matrix, matrix, out=x)


@with_threads(2)
def test_in_place_keeps_the_layout(rank):
    mesh = mesh_of()
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    same = x.add_(DTensor.from_local(torch.ones(4), mesh, [Partial()]))
    assert same is x
    assert x.placements == (Shard(0),)
    assert x.full_tensor().tolist() == [2.0, 3.0, 4.0, 5.0]


@with_threads(2)
def test_in_place_where_the_layout_does_not_do(rank):
    mesh = mesh_of()
    partial = DTensor.from_local(torch.tensor([1.0, -2.0, 3.0, -4.0]), mesh, [Partial()])
    assert partial.relu_() is partial
    assert partial.placements == (Partial(),)
    assert partial.full_tensor().tolist() == [2.0, 0.0, 6.0, 0.0]
    rows = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
    assert rows.cumsum_(0).placements == (Shard(0),)
    assert rows.full_tensor().tolist() == [[0.0, 1.0], [2.0, 4.0], [6.0, 9.0]]
    lists = [
        distribute_tensor(torch.tensor([4.0, 9.0]), mesh, [Shard(0)]),
        DTensor.from_local(torch.ones(2) * 2, mesh, [Partial()]),
    ]
    torch._foreach_sqrt_(lists)
    assert [x.full_tensor().tolist() for x in lists] == [[2.0, 3.0], [2.0, 2.0]]
    assert [x.placements for x in lists] == [(Shard(0),), (Partial(),)]


@with_threads(2)
def test_in_place_change_of_shape(rank):
    mesh = mesh_of()
    x = distribute_tensor(torch.arange(6.0).view(3, 1, 2), mesh, [Shard(0)])
    assert x.squeeze_(1) is x
    assert (x.shape, x.stride(), x.placements) == ((3, 2), (2, 1), (Shard(0),))
    assert x.t_().placements == (Shard(1),)
    assert (x.shape, x.stride()) == ((2, 3), (1, 2))
    assert x.full_tensor().tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]


@with_threads(2)
def test_out(rank):
    mesh = mesh_of()
    a, b = torch.arange(6.0).view(3, 2), torch.arange(8.0).view(2, 4)
    x, y = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Shard(1)])
    for placement in (Replicate(), Shard(0), Shard(1)):
        out = distribute_tensor(torch.zeros(3, 4), mesh, [placement])
        assert torch.mm(x, y, out=out) is out
        assert out.placements == (placement,)
        assert torch.equal(out.full_tensor(), a @ b)
    values, indices = x.max(0)
    torch.max(y, 1, out=(out_values := torch.zeros_like(values), out_indices := torch.zeros_like(indices)))
    assert out_values.full_tensor().tolist() == [3.0, 7.0]
    assert out_indices.full_tensor().tolist() == [3, 3]


@with_threads(2)
def test_writing_to_a_view_that_is_a_copy(rank):
    """Rows are cut so that the flat view has to be gathered; what is written to it reaches the rows."""
    mesh = mesh_of()
    x = distribute_tensor(torch.arange(6.0).view(2, 3), mesh, [Shard(1)])
    flat = x.view(6)
    flat.mul_(2)
    assert x.placements == (Shard(1),)
    assert x.full_tensor().tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
    flat[1:3].zero_()
    x.view(6).split(4)[1].add_(1)
    assert x.full_tensor().tolist() == [[0.0, 0.0, 0.0], [6.0, 9.0, 11.0]]
    shared = x.t()
    assert shared.to_local().data_ptr() == x.to_local().data_ptr()
    shared.add_(1)
    assert x.full_tensor().tolist() == [[1.0, 1.0, 1.0], [7.0, 10.0, 12.0]]


@with_threads(2)
def test_dtypes_that_backends_do_not_take(rank):
    mesh = mesh_of()
    for dtype in (torch.complex64, torch.int16, torch.uint16, torch.float8_e4m3fn):
        dense = torch.arange(12).view(4, 3).to(torch.float32).to(dtype)
        for source in ([Shard(0)], [Shard(1)]):
            x = distribute_tensor(dense, mesh, source)
            for target in (Shard(0), Shard(1), Replicate()):
                found = x.redistribute(placements=[target]).full_tensor()
                assert found.dtype == dtype
                assert found.to(torch.complex64).equal(dense.to(torch.complex64))
    for dtype in (torch.complex64, torch.int16):
        parts = DTensor.from_local(torch.arange(4).to(dtype), mesh, [Partial()])
        for target in (Replicate(), Shard(0)):
            assert parts.redistribute(placements=[target]).full_tensor().tolist() == [0, 2, 4, 6]


@with_threads(2)
def test_conjugates_are_computed(rank):
    mesh = mesh_of()
    dense = torch.tensor([1 + 2j, 3 - 4j])
    x = distribute_tensor(dense, mesh, [Shard(0)])
    assert torch.view_as_real(x.conj()).full_tensor().tolist() == [[1.0, -2.0], [3.0, 4.0]]
    assert x.conj().imag.full_tensor().tolist() == [-2.0, 4.0]


@with_threads(2)
def test_partial_passes_where_linear(rank):
    mesh = mesh_of()
    p = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    r = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    assert (p + p).placements == (p * r).placements == (-p).placements == (Partial(),)
    assert (p * p).full_tensor().tolist() == [4.0] * 4
    assert (p + r).full_tensor().tolist() == [3.0] * 4
    assert (p + 1).full_tensor().tolist() == [3.0] * 4
    two = torch.tensor(2.0)
    assert (two / p).full_tensor().tolist() == [1.0] * 4
    assert (p / two).full_tensor().tolist() == [1.0] * 4
    assert torch.where(r > 0, p, two).full_tensor().tolist() == [2.0] * 4
    assert torch.addcmul(two, p, p).full_tensor().tolist() == [6.0] * 4


@with_threads(2)
def test_decisions_do_not_pile_up_with_floats(rank):
    """An optimizer passes another step size in every step."""
    x = distribute_tensor(torch.ones(4), mesh_of(), [Shard(0)])
    for i in range(1, 20):
        x.add_(x, alpha=i / 7)
    decisions = [p for key, p in list(dispatch._cache.items()) if x._spec in key]
    assert [str(p.func) for p in decisions] == ["aten.add_.Tensor"]


@with_threads(2)
def test_copies(rank):
    mesh = mesh_of()
    p = nn.Parameter(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
    assert isinstance(p, nn.Parameter)
    twin = copy.deepcopy(p)
    assert isinstance(twin, nn.Parameter)
    assert twin.placements == p.placements
    assert twin.requires_grad
    twin.data.zero_()
    assert p.full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0]
    text = repr(p.data)
    assert "placements=(Shard(dim=0),)" in text
    assert "device_mesh=" in text


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_data_is_assigned(fake_mesh, kind):
    """As one device does it: values, shape and dtype are the other's, and so is the memory."""
    mesh = fake_mesh(2)
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    x = nn.Parameter(x) if kind is nn.Parameter else x.requires_grad_()
    y = distribute_tensor(torch.arange(6.0).view(2, 3).double(), mesh, [Shard(1)])
    x.data = y
    assert (x.shape, x.stride(), x.dtype, x.placements) == ((2, 3), (3, 1), torch.float64, (Shard(1),))
    assert x.requires_grad
    assert isinstance(x, kind)
    (x * x).sum().backward()
    assert x.grad.to_local().tolist() == [[0.0, 2.0], [6.0, 8.0]]
    y.zero_()
    assert x.to_local().tolist() == [[0.0, 0.0], [0.0, 0.0]]
    with pytest.raises(
        TypeError, match=r"the data of a DTensor is a DTensor, got Tensor; write x\.data = distribute_tensor"
    ):
        x.data = torch.ones(2, 3)
    assert x.shape == (2, 3)


def test_memory_is_not_taken_over_where_nobody_would_see_it(fake_mesh):
    mesh = fake_mesh(2)
    x, y = (distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]) for _ in range(2))

    @torch.compile(backend="aot_eager")
    def assigned(x, y):
        x.data = y * 2
        return x + 1

    @torch.compile(backend="aot_eager")
    def converted(x):
        x.data = x.to(x.dtype)  # as a module that is converted to the dtype that it has
        return x + 1

    assert converted(x).to_local().tolist() == [1.0, 2.0]
    assert x.to_local().tolist() == [0.0, 1.0]
    with pytest.raises(ShardingError, match=r"write x.data = y outside of compiled code, or x.copy_\(y\)"):
        x.set_(y)
    with pytest.raises(Exception, match=r"write x.data = y outside of compiled code, or x.copy_\(y\)"):
        assigned(x, y)


@with_threads(4)
def test_save_and_load(rank):
    """torch.save of DTensors keeps layouts, the mesh, and what is a parameter; torch.load takes them by default."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(torch.arange(15.0).view(5, 3), mesh["tp"], [Shard(0)])
    parts = DTensor.from_local(torch.ones(2), mesh, [Partial("max"), Shard(0)])
    weight = nn.Parameter(distribute_tensor(torch.ones(3, 2), mesh, [Shard(0), Shard(0)]))
    weight.note = "kept"
    given = {"x": x, "parts": parts, "weight": weight}
    buffer = io.BytesIO()
    torch.save(given, buffer)
    buffer.seek(0)
    for name, y in torch.load(buffer).items():
        assert (y.shape, y.placements, y.requires_grad) == (given[name].shape, given[name].placements, name == "weight")
        assert isinstance(y, nn.Parameter) == (name == "weight")
        assert torch.equal((y + given[name]).full_tensor(), 2 * given[name].full_tensor())
    assert y.note == "kept"


def test_save_and_load_on_a_mesh_that_is_not_there(fake_mesh):
    x = DTensor.from_local(torch.arange(2.0), fake_mesh(2), [Shard(0)])
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer).to_local(), x.to_local())


@with_threads(3)
def test_rank_outside_the_mesh_holds_nothing(rank):
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [0, 1])
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    y = (x * 2).redistribute(placements=[Replicate()])
    assert y.shape == (4,)
    assert y.to_local().tolist() == ([] if rank == 2 else [0.0, 2.0, 4.0, 6.0])


@with_threads(4)
def test_placements_say_in_which_order_axes_cut(rank):
    """An outer product of shards, as one row, is cut by the second axis first."""
    mesh = init_device_mesh("cpu", (2, 2))
    a, b = torch.arange(4.0), torch.arange(2.0) + 1
    rows = distribute_tensor(a, mesh, [Replicate(), Shard(0)])
    x = torch.outer(rows, distribute_tensor(b, mesh, [Shard(0), Replicate()])).reshape(8)
    assert x.placements == (Shard(0, cut=1), Shard(0, cut=0))
    assert repr(x.placements[0]) == "Shard(dim=0, cut=1)"
    again = DTensor.from_local(x.to_local(), mesh, x.placements)
    assert torch.equal(again.full_tensor(), torch.outer(a, b).reshape(8))
    assert torch.equal(distribute_tensor(torch.arange(8.0), mesh, x.placements).full_tensor(), torch.arange(8.0))
