"""Tensors whose values are read later: what is computed from them, of all and of each part; what is read for a part."""

import copy

import pytest
import torch
from torch import nn

from dtensor import ShardingError
from dtensor.tensor.deferred import Deferred, deferred, read, whole_of

WHOLE = torch.arange(24.0).view(4, 6)


def later(whole, asked=None):
    """`whole` as a deferred tensor; the parts that are read are added to `asked`."""

    def obtain(box):
        if asked is not None:
            asked.append(list(box))
        return read(whole, box).clone()

    return deferred(whole, obtain)


FUNCTIONS = {
    "chunk": lambda x: torch.chunk(x, 2)[1],
    "split and squeeze": lambda x: [part.squeeze(0) for part in torch.chunk(x, 4)][2],
    "transpose": lambda x: x.transpose(0, 1).contiguous(),
    "cat": lambda x: torch.cat([x, x + 1, x], dim=1),
    "stack": lambda x: torch.stack([x, 2 * x], dim=1),
    "stack last": lambda x: torch.stack((x, x.clone()), -1),
    "cast": lambda x: x.to(device="cpu", dtype=torch.bfloat16),
    "half": lambda x: x.half(),
    "all of it": lambda x: x[...],
    "view": lambda x: x.reshape(2, 2, 6).transpose(0, 1).reshape(4, 6),
    "parameter": lambda x: nn.Parameter(x.detach(), requires_grad=False),
    "copy": copy.deepcopy,
    "unbound": lambda x: x.unbind()[3],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parts_of_results(name):
    wanted, found = FUNCTIONS[name](WHOLE), FUNCTIONS[name](later(WHOLE))
    assert isinstance(found, Deferred)
    assert found.is_meta
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert found.untyped_storage().nbytes() == wanted.nbytes
    assert torch.equal(read(found), wanted)
    for dim, size in enumerate(wanted.shape):
        box = list(whole_of(wanted))
        box[dim] = (size // 2, size - size // 2)
        assert torch.equal(read(found, box), read(wanted, box))
        box[dim] = (size, 0)
        assert read(found, box).shape == read(wanted, box).shape


def test_only_the_part_is_read():
    asked = []
    found = torch.stack([later(WHOLE, asked), later(WHOLE + 1, asked)]).to(torch.float64)
    assert not asked
    assert torch.equal(read(found, [(1, 1), (0, 2), (0, 6)]), (WHOLE + 1)[None, :2].double())
    assert asked == [[(0, 2), (0, 6)]]


def test_what_depends_on_values_and_what_writes():
    x = later(WHOLE)
    assert torch.equal(x, WHOLE)
    assert torch.equal(x @ WHOLE.T, WHOLE @ WHOLE.T)
    with pytest.raises(
        ShardingError, match=r"linear would compute with a parameter that is not read yet.*shard the model"
    ):
        nn.functional.linear(WHOLE, nn.Parameter(x))
    assert torch.equal(torch.zeros(4, 6).copy_(x), WHOLE)
    with pytest.raises(NotImplementedError, match=r"mul_ writes to a tensor of shape \[4, 6\] that is not read yet"):
        x.mul_(2)
    with pytest.raises(NotImplementedError, match="__setitem__ writes"):
        x[0] = 1.0
    assert x.device.type == "meta"
    assert x.to("cpu").device.type == nn.Parameter(x.to("cpu")).device.type == "cpu"
