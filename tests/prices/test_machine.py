"""The roofline, by hand."""

import pytest
import torch

from dtensor.prices.links import Link
from dtensor.prices.machine import MACHINES, Machine

MACHINE = Machine(flops=100.0, half=400.0, memory=10.0, launch=0.5)


def test_a_kernel_takes_as_long_as_what_takes_longer():
    assert MACHINE.seconds(200.0, 10.0, torch.float32) == 2.5
    assert MACHINE.seconds(200.0, 10.0, torch.bfloat16) == 1.5
    assert MACHINE.seconds(0.0, 50.0, torch.float32) == 5.5
    assert MACHINE.seconds(0.0, 50.0, torch.float32, launches=0.5) == 5.25
    assert MACHINE.seconds(0.0, 0.0, torch.float32) == 0.0


def test_small_products_and_models_are_slower():
    slow = Machine(flops=100.0, half=400.0, memory=10.0, launch=0.5, half_size=100.0, efficiency=0.5)
    assert slow.seconds(100.0, 0.0, torch.float32) == (2.0 + 0.5) / 0.5
    assert slow.seconds(0.0, 50.0, torch.float32) == 11.0, "what computes no product has no size"


def test_what_sending_takes():
    """All of the processor, but for gradients over a link slower than the processor sends."""
    cpu = Machine(flops=1.0, half=1.0, memory=1.0, launch=0.0, overlap=0.25, sending=100.0)
    fast, slow = Link(bandwidth=200.0), Link(bandwidth=10.0)
    assert [cpu.taken(link, gradients) for link in (fast, slow) for gradients in (False, True)] == [
        *(0.75, 0.75),
        *(0.75, pytest.approx(0.075)),
    ]
    assert MACHINE.taken(slow, True) == 0.0


@pytest.mark.parametrize("kind", MACHINES)
def test_the_usual_machines_are_of_the_right_order(kind):
    machine = MACHINES[kind]
    assert 1e9 < machine.memory < machine.flops <= machine.half
    assert 0 < machine.launch < 1e-4
