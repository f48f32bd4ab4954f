"""Weight norm: every candidate by brute force, along its first and its last dimension."""

import pytest
import torch

from dtensor.testing.rules.candidates import case as c
from dtensor.testing.rules.candidates import floats as f
from tests.rules.checking import check

aten = torch.ops.aten


def weight_norm_cases():
    for v, g, dim in ((f(4, 5, 3), f(4, 1, 1), 0), (f(4, 5, 3), f(1, 1, 3), 2)):
        yield c(aten._weight_norm_interface.default, v, g, dim, at_least=4)
        _, norms = aten._weight_norm_interface.default(v, g, dim)
        yield c(aten._weight_norm_interface_backward.default, f(4, 5, 3), v, g, norms, dim, at_least=6)


@pytest.mark.parametrize("n", [2, 4])
def test_every_candidate_is_right(n):
    check(weight_norm_cases, n)
