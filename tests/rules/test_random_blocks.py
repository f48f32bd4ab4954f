"""Which fills are drawn block by block: those of much CPU memory in the order of the generator."""

from types import SimpleNamespace

import torch
from torch._subclasses import FakeTensorMode

from dtensor.rules.families.random import _in_blocks
from dtensor.rules.sampling import BLOCK


def spec(*shape, stride=None):
    return SimpleNamespace(shape=shape, stride=stride or torch.empty(shape, device="meta").stride())


def test_what_is_drawn_in_blocks():
    template = torch.empty(1)
    assert _in_blocks(template, spec(BLOCK + 1))
    assert _in_blocks(template, spec(2, BLOCK))
    assert not _in_blocks(template, spec(BLOCK))
    assert not _in_blocks(template, spec(2, BLOCK, stride=(1, 2)))
    assert not _in_blocks(template, spec(2, BLOCK, stride=(2 * BLOCK, 2)))


def test_not_on_other_devices_nor_in_a_trace():
    assert not _in_blocks(torch.empty(1, device="meta"), spec(BLOCK + 1))
    with FakeTensorMode() as mode:
        assert not _in_blocks(mode.from_tensor(torch.empty(1)), spec(BLOCK + 1))


def test_blocks_are_of_the_size_that_torch_draws_alike():
    """Its normal sampler takes 16 at a time."""
    assert BLOCK % 16 == 0
    assert BLOCK >= 1 << 16
