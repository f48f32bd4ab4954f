"""Samples of torch's operator database: those that the database gives, without the time it takes for them."""

import random

import numpy
import pytest
import torch

from dtensor.testing.rules.candidates import mapped
from dtensor.torch_private.core import operator_database, operator_samples


@pytest.mark.parametrize("name", ["addmm", "nn.functional.dropout", "cdist", "unique", "linalg.svd"])
def test_samples_are_those_of_the_database(name):
    op = operator_database()[name]
    after = []
    for made in (op.sample_inputs("cpu", torch.float64, requires_grad=True), operator_samples(op, torch.float64, True)):
        torch.manual_seed(7)
        given = [mapped((s.input, s.args, s.kwargs), lambda x: (x.requires_grad, x.tolist())) for s in made]
        after.append((given, torch.rand(1).item(), random.random(), numpy.random.random()))
    assert str(after[0]) == str(after[1])
    assert after[0][0]
