"""Operands in the memory order of the global tensor, for kernels that read strides."""

import torch
from torch._subclasses import FakeTensorMode

from dtensor.dispatch.memory_order import ordered

DIMS = (0, 1, 2, 3)


def test_a_trace_copies_where_a_length_is_one():
    """What strides such a dim has when the graph runs it does not know. A view stays one."""
    with FakeTensorMode():
        one, two = torch.empty(1, 4, 8, 8), torch.empty(2, 4, 8, 8)
        assert ordered(one, DIMS, False) is not one
        assert ordered(one, DIMS, True) is one
        assert ordered(two, DIMS, False) is two
    x = torch.ones(1, 4, 8, 8)
    assert ordered(x, DIMS, False) is x


def test_strides_of_a_length_of_one_are_set():
    """Kernels read them, too."""
    x = torch.arange(4.0 * 8).view(4, 8).t().as_strided((1, 8, 4), (3, 1, 8))
    found = ordered(x, (0, 2, 1), False)
    assert found.stride() == (32, 1, 8)
    assert torch.equal(found, x)
