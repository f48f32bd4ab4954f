"""Parts of tensors and tensors of indices, read and written: every candidate by brute force."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from dtensor import OperatorError, Partial, Replicate, Shard, distribute_tensor
from dtensor.testing import with_threads
from dtensor.testing.rules.candidates import booleans as mask
from dtensor.testing.rules.candidates import case as c
from dtensor.testing.rules.candidates import floats as f
from dtensor.testing.rules.candidates import integers as ints
from tests.rules.checking import check

aten = torch.ops.aten


def part_cases():
    x = f(4, 6, 5)
    yield c(aten.diagonal.default, x, 1, 0, 2, at_least=4)
    yield c(aten.diagonal_backward.default, f(6, 4), [4, 6, 5], 1, 0, 2, at_least=4)
    yield c(aten.diagonal_scatter.default, x, f(6, 4), 1, 0, 2, at_least=4)
    yield c(aten.diag_embed.default, f(4, 6), 0, 0, 2, at_least=4)
    yield c(aten.diag_embed.default, f(4, 5, 6), at_least=5)
    yield c(aten.unfold.default, x, 1, 3, 2, at_least=5)
    yield c(aten.unfold.default, f(), 0, 1, 1, at_least=3)
    yield c(aten.unfold.default, f(6), -1, 3, 1, at_least=3)
    yield c(aten.unfold_backward.default, f(4, 2, 5, 3), [4, 6, 5], 1, 3, 2, at_least=5)
    yield c(aten.select_scatter.default, x, f(4, 5), 1, 2, at_least=5)
    yield c(aten.slice_scatter.default, x, f(4, 3, 5), 1, 1, 4, at_least=5)
    yield c(aten.slice_scatter.default, x, f(4, 6, 5), 1, at_least=6)
    yield c(aten.repeat.default, x, [2, 1, 3, 1], at_least=5)
    yield c(aten.as_strided.default, x, [4, 3], [1, 2], at_least=3)
    yield c(aten.unbind.int, x, 1, at_least=5)
    yield c(aten.unsafe_split_with_sizes.default, x, [2, 4], 1, at_least=5)
    yield c(aten.unsafe_split.Tensor, x, 4, 1, at_least=5)
    yield c(aten.chunk.default, x, 4, -2, at_least=5)
    yield c(aten.tensor_split.sections, x, 4, 1, at_least=5)
    yield c(aten.tensor_split.indices, x, [1, 4], 1, at_least=5)
    yield c(aten._stack.default, [f(4, 6), f(4, 6)], 1, at_least=5)
    yield c(aten.swapaxes.default, x, 0, -1, at_least=6)
    yield c(aten.as_strided_scatter.default, x, f(4, 3), [4, 3], [1, 2], at_least=3)
    yield c(aten.as_strided_scatter.default, f(4, 6), f(4, 6), [4, 6], [6, 1], at_least=3)
    yield c(aten.as_strided.default, f(2, 6), [6, 2], [2, 1], at_least=3)
    yield c(aten.as_strided.default, f(1, 6), [0, 6], [6, 1], at_least=3)
    yield c(aten.as_strided.default, f(4, 8, 6), [4, 3, 4, 6], [48, 12, 6, 1], at_least=4)
    yield c(aten.as_strided.default, f(4, 6, 2, 5), [2, 6, 4, 3], [2, 10, 60, 3], at_least=5)
    yield c(aten._reshape_copy.default, x, [2, 2, 6, 5], at_least=6)
    yield c(aten._reshape_alias.default, x, [2, 2, 6, 5], [60, 30, 5, 1], at_least=6)


def copy_cases():
    """The twins of views that copy have the rules of the views."""
    x = f(4, 6, 5)
    yield c(aten.permute_copy.default, x, [2, 0, 1], at_least=6)
    yield c(aten.t_copy.default, f(4, 6), at_least=5)
    yield c(aten.transpose_copy.int, x, 0, 2, at_least=6)
    yield c(aten.expand_copy.default, f(4, 1), [3, 4, 5], at_least=4)
    yield c(aten.unsqueeze_copy.default, x, 1, at_least=6)
    yield c(aten.squeeze_copy.dim, f(4, 1), 1, at_least=4)
    yield c(aten.select_copy.int, x, 1, 2, at_least=5)
    yield c(aten.slice_copy.Tensor, x, 1, 1, 4, at_least=5)
    yield c(aten.narrow_copy.default, x, 1, 1, 4, at_least=5)
    yield c(aten.split_with_sizes_copy.default, x, [2, 4], 1, at_least=5)
    yield c(aten.unbind_copy.int, x, 0, at_least=5)
    yield c(aten.diagonal_copy.default, x, at_least=4)
    yield c(aten.unfold_copy.default, x, 1, 3, 2, at_least=5)
    yield c(aten.view_copy.default, x, [2, 2, 6, 5], at_least=5)
    yield c(aten.detach_copy.default, x, at_least=6)
    yield c(aten.alias_copy.default, x, at_least=6)
    yield c(aten.view_as_real_copy.default, torch.complex(x, x), at_least=6)


def reading_cases():
    x, i, j = f(5, 6, 4), ints(5, 3, 4), ints(4, 4)
    for op in (aten.index.Tensor, aten._unsafe_index.Tensor):
        # Nothing, the dimensions that are not indexed, those of the index, linear in x.
        yield c(op, x, [i], at_least=7)
        yield c(op, x, [None, None, j], at_least=6)
        yield c(op, x, [i, None, j], at_least=6)
        yield c(op, x, [None, ints(6, 3, 4), j], at_least=6)
    # One index that reads half of it or less: the indexed dimension as well.
    yield c(aten.index.Tensor, x, [None, torch.tensor([-1, 4, 0])], at_least=7)
    yield c(aten.index.Tensor, x, [None, torch.tensor(2)], at_least=6)
    yield c(aten.index_select.default, x, 1, ints(6, 3), at_least=7)
    yield c(aten.index_select.default, x, 1, ints(6, 4), at_least=6)
    yield c(aten.gather.default, f(), 0, torch.zeros(1, dtype=torch.int64), at_least=1)
    yield c(aten.gather.default, f(5), 0, torch.zeros(2, 0, dtype=torch.int64), at_least=1)
    yield c(aten.gather.default, x, 1, ints(6, 5, 2, 4), at_least=7)
    yield c(aten.gather.default, ints(9, 5, 6), 1, ints(6, 5, 2), at_least=6)
    yield c(aten.gather.default, mask(5, 6), 1, ints(6, 5, 2), at_least=3)
    # Rows of no elements are looked up all the same, and there may be none to look up.
    yield c(aten.index.Tensor, f(6, 0), [j[0] % 6], at_least=3)
    yield c(aten.index_select.default, f(6, 0), 0, ints(6, 2), at_least=3)
    yield c(aten.gather.default, f(6, 0), 0, ints(6, 2, 0), at_least=3)
    yield c(aten.embedding.default, f(6, 0), ints(6, 2), at_least=3)
    yield c(aten.index_select.default, x, 1, ints(6, 0), at_least=3)
    yield c(aten.gather.default, x, 1, ints(6, 5, 0, 4), at_least=3)
    yield c(aten.index.Tensor, x, [None, ints(6, 0)], at_least=3)
    yield c(aten.take.default, x, ints(100, 3, 4), at_least=5)
    yield c(aten.take.default, ints(9, 5, 6), ints(30, 3, 4), at_least=5)
    yield c(aten.embedding.default, f(1, 4), ints(1, 3), at_least=5)
    yield c(aten.gather.default, x, 1, torch.zeros(0, dtype=torch.int64), at_least=3)
    yield c(aten.gather.default, f(), 0, torch.tensor(0), at_least=1)
    yield c(aten.index_select.default, f(1), 0, ints(1, 3), at_least=3)
    yield c(aten.embedding.default, f(7, 6), torch.tensor(5), at_least=5)
    yield c(aten.embedding.default, f(6, 4), ints(6, 3), at_least=5)


def writing_cases():
    x, i, j = f(5, 6, 4), ints(5, 3, 4), torch.randperm(4)
    values = f(3, 4, 6)
    for op in (aten.index_put.default, aten._index_put_impl.default, aten._unsafe_index_put.default):
        yield c(op, x, [i, None, j], values, True, at_least=6)
        yield c(op, x, [i, None, j], f(4, 1), True, at_least=6)
        yield c(op, x, [i], f(), True, at_least=7)
        yield c(op, x, [torch.randperm(5)[:3], None, torch.tensor(2)], f(3, 6), False, at_least=4)
    yield c(aten.index_put_.default, x, [mask(5, 6)], f(), at_least=5)
    yield c(aten.index_put.default, x, [mask(5)], f(), at_least=5)
    yield c(aten.index_put.default, f(5, 6), [mask(5)], f(6), at_least=3)
    for several in ([mask(5), torch.tensor(2)], [None, mask(6)], [mask(5), None, torch.tensor([1])]):
        yield c(aten.index_put.default, x, several, f(), at_least=3)
    for op in (aten.index_add.default, aten.index_copy.default):
        adds = int(op is aten.index_add.default)
        yield c(op, x, 1, torch.randperm(6)[:3], f(5, 3, 4), at_least=5 + adds)
    yield c(aten.index_fill.int_Scalar, x, 1, ints(6, 3), 2.0, at_least=3)
    yield c(aten.index_fill.int_Tensor, x, 1, ints(6, 3), f(), at_least=5)
    yield c(aten.index_reduce.default, x, 1, ints(6, 3), f(5, 3, 4), "amax", at_least=3)
    yield c(aten.scatter_add.default, x, 1, ints(6, 5, 3, 4), f(5, 3, 4), at_least=6)
    yield c(aten.scatter_add.default, x, 1, ints(6, 5, 3, 4), f(5, 5, 4), at_least=5)
    yield c(aten.scatter.src, x, 1, torch.arange(3).expand(5, 4, 3).mT.contiguous(), f(5, 3, 4), at_least=5)
    yield c(aten.scatter_reduce.two, x, 1, ints(6, 5, 3, 4), f(5, 3, 4), "amax", at_least=3)
    for reduce in ("add", "multiply"):
        yield c(aten.scatter.reduce, x, 1, ints(6, 5, 3, 4), f(5, 3, 4), reduce=reduce, at_least=3)
        yield c(aten.scatter.value_reduce, x, 1, ints(6, 5, 3, 4), 2.0, reduce=reduce, at_least=3)
    yield c(aten.index_put.default, x, [x > 1], f(), True, at_least=3)
    for single in ([1], [1, 4]):
        yield c(aten.index_put.default, x, [torch.tensor(single)], f(1, 6, 4), True, at_least=5)
        yield c(aten.index_put.default, x, [None, torch.tensor(single)], f(5, 1, 4), True, at_least=5)
    yield c(aten.put.default, x, ints(100, 1, 3), f(3), True, at_least=3)
    yield c(aten.index_add.default, f(6), -1, torch.randperm(6)[:3], f(3), at_least=4)
    # Numbers in place of vectors of one, and no index at all.
    one, none = torch.tensor([0]), torch.zeros(0, dtype=torch.int64)
    yield c(aten.scatter.src, f(), 0, one, f(1), at_least=3)
    yield c(aten.scatter_add.default, f(), 0, one, f(1), at_least=3)
    yield c(aten.scatter_add.default, f(6), 0, torch.tensor(2), f(), at_least=3)
    yield c(aten.scatter_add.default, x, 1, none, f(5, 3, 4), at_least=3)
    yield c(aten.scatter.value, x, 1, none, 2.0)
    yield c(aten.scatter.value, f(6), 0, none.reshape(2, 0), 2.0)
    yield c(aten.scatter_add.default, f(6), 0, none.reshape(2, 0), f(2, 0), at_least=3)
    yield c(aten.index_add.default, f(6), 0, torch.tensor(2), f(1), at_least=3)
    yield c(aten.index_add.default, f(), 0, one, f(), at_least=3)
    yield c(aten.index_fill.int_Scalar, f(), 0, one, 2.0)
    yield c(aten.index_copy.default, f(), 0, one, f(1), at_least=3)
    yield c(aten.put.default, x, ints(100, 3, 4), f(3, 4), True, at_least=5)
    yield c(aten.put.default, x, torch.randperm(100)[:3], f(3), at_least=3)
    yield c(aten.masked_scatter.default, x, mask(5, 6, 4), f(200), at_least=3)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("group", [part_cases, copy_cases, reading_cases, writing_cases])
def test_every_candidate_is_right(group, n):
    check(group, n)


@with_threads(2)
def test_strides_of_a_shard_are_not_those_of_the_whole(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(12.0).reshape(4, 3)
    gaps = distribute_tensor(x, mesh, [Shard(1)])[::2]
    with pytest.raises(OperatorError, match=r"of a tensor of shape \[2, 3\] and strides \[6, 1\], sharded as S\(1\)"):
        gaps.as_strided((2, 3), (6, 2))
    for placement in (Replicate(), Shard(0), Shard(1)):
        placed = distribute_tensor(x, mesh, [placement])
        for y in (placed, placed.t()):
            assert torch.equal(y.as_strided((2, 3), (6, 2)).full_tensor(), x.as_strided((2, 3), (6, 2)))


@with_threads(2)
def test_indexing_by_a_mask_runs_whole(rank):
    """What a mask reads has a shape that depends on its values."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(12.0).reshape(4, 3)
    placed = distribute_tensor(x, mesh, [Shard(0)])
    assert torch.equal(placed[placed > 4].full_tensor(), x[x > 4])
    assert torch.equal(placed[distribute_tensor(x[:, 0] > 4, mesh)].full_tensor(), x[x[:, 0] > 4])


@with_threads(2)
def test_rows_of_a_sharded_table_are_looked_up_where_they_are(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(12.0).reshape(6, 2)
    placed = distribute_tensor(x, mesh, [Shard(0)])
    index = torch.tensor([5, 0, -1])
    found = placed[distribute_tensor(index, mesh, [Replicate()])]
    assert found.placements == (Partial(),)
    assert torch.equal(found.full_tensor(), x[index])


@with_threads(2)
def test_the_gradient_of_an_index_adds_up(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh, [Replicate()]).requires_grad_()
    index = distribute_tensor(torch.tensor([5, 0, 5, 1]), mesh, [Shard(0)])
    found = x[index]
    assert found.placements == (Shard(0),)
    found.sum().backward()
    expected = torch.tensor([[1.0, 1], [1, 1], [0, 0], [0, 0], [0, 0], [2, 2]])
    assert torch.equal(x.grad.full_tensor(), expected)
