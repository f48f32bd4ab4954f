"""What `local` functions are made of: empty shards, and errors about indices as the whole tensor would raise them."""

from types import SimpleNamespace

import pytest
import torch

from dtensor.rules.call import LocalCall
from dtensor.rules.families.row_lookup import bounds, with_a_row
from dtensor.rules.local_calls import axes_of, has_empty_shard, is_sharded

aten = torch.ops.aten


def call(local, whole, axes):
    """A sum of tensors of the shapes `local`, which are shards of those of the shapes `whole`."""
    tensors = [torch.zeros(shape) for shape in local]
    of_all = SimpleNamespace(operands=[SimpleNamespace(shape=shape) for shape in whole])
    return LocalCall(aten.cat.default, (tensors, 0), {}, of_all, None, axes, ())


@pytest.mark.parametrize(
    ("local", "whole", "axes", "expected"),
    [
        ([(0, 4)], [(3, 4)], {"d0": (0,)}, True),
        ([(0, 4)], [(1, 4)], {"d0": (0,)}, True),
        ([(0, 4)], [(0, 4)], {"d1": (0,)}, False),  # so it is everywhere
        ([(1, 4)], [(3, 4)], {"d0": (0,)}, False),
        ([(1, 1)], [(3, 1)], {"d0": (0,)}, False),
        ([(2, 4), (0, 4)], [(4, 4), (1, 4)], {"d0": (0,)}, True),
        ([(2, 4), (0, 4)], [(4, 4), (0, 4)], {"d0": (0,)}, False),
        ([(0, 4)], [(3, 4)], {"d0": ()}, False),
        ([(0, 4)], [(3, 4)], {}, False),
    ],
)
def test_shards_without_elements(local, whole, axes, expected):
    found = call(local, whole, axes)
    assert has_empty_shard(found) is expected
    assert is_sharded(found) is any(axes.values())


def test_axes_of_factors():
    found = call([], [], {"a": (2, 0), "b": (1,), "c": ()})
    assert axes_of(found) == [0, 1, 2]
    assert axes_of(found, ["a", "c"]) == [0, 2]
    assert axes_of(found, []) == []


def test_a_row_to_look_up():
    x = torch.ones(2, 3)
    assert with_a_row(x, 0) is x
    assert with_a_row(x[:1], 0).tolist() == [[1.0] * 3]
    assert with_a_row(x[:0], 0).tolist() == [[0.0] * 3]
    assert with_a_row(x[:, :0], 1).tolist() == [[0.0]] * 2
    assert with_a_row(x[:0], 1).shape == (0, 3)


def raised(index, inner, **options):
    try:
        with bounds(index, 6, 1, **options):
            raise inner
    except (IndexError, RuntimeError, ValueError) as found:
        return found


def test_errors_about_indices_are_of_the_whole():
    index = torch.tensor([0, 5, 7, -1, 6])
    for kind in (IndexError, RuntimeError):
        found = raised(index, kind("of a shard"))
        assert (type(found), str(found)) == (kind, "index 7 is out of bounds for dimension 1 with size 6")
    found = raised(index[3:], IndexError("of a shard"), error=RuntimeError, what="Target")
    assert (type(found), str(found)) == (RuntimeError, "Target -1 is out of bounds for dimension 1 with size 6")
    found = raised(index[3:], IndexError("of a shard"), least=-6)
    assert str(found) == "index 6 is out of bounds for dimension 1 with size 6"
    found = raised(index, IndexError("of a shard"), ignored=7)
    assert str(found) == "index -1 is out of bounds for dimension 1 with size 6"
    found = raised(torch.tensor([-7, -8]), IndexError("of a shard"), ignored=-7)
    assert str(found) == "index -8 is out of bounds for dimension 1 with size 6"


OTHERS = {
    "right": torch.tensor([0, 5]),
    "without values": torch.zeros(2, device="meta"),
    "of another class": torch.nn.Parameter(torch.ones(1) * 9),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_errors_stay(name):
    """Of indices that are right, of those that cannot be read, and of another kind."""
    error = IndexError("another one")
    assert raised(OTHERS[name], error) is error
    error = ValueError("of another kind")
    assert raised(torch.tensor([9]), error) is error


def test_without_an_error_nothing_is_read():
    with bounds(torch.tensor([9]), 6, 1):
        pass
