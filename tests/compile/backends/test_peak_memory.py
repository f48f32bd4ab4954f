"""What Inductor expects to hold, by which it orders kernels, against what its code holds."""

import functools

import pytest
import torch
from torch._inductor import config, memory

from bench.cases.memory import allocated
from dtensor.torch_private.peak_memory import estimate_memory_as_generated

SIDE = 128
BYTES = 4 * SIDE * SIDE


def rows(x, w):
    """Copies into a concatenation, each of another product."""
    made = []
    for k in range(4):
        x = x @ w
        made.append(x.view(-1) + k)
    return torch.cat(made)


def columns(x, w):
    """Parts that are not contiguous."""
    made = []
    for k in range(4):
        x = x @ w
        made.append(x.view(2, -1) - k)
    return torch.cat(made, 1)


def part_read_later(x, w):
    """A part that is read after the concatenation is."""
    y = x @ w
    part = torch.exp(y)
    whole = torch.cat([part, y + 1])
    return whole.sum(0), part @ (w @ w)


def together(x, w):
    """Generated kernels in one call, after which what only the first one reads is freed."""
    halves = (x @ w).view(2, -1).sum(0)
    return halves, w.repeat(4, 1) + 1


@pytest.mark.parametrize(("program", "sizes"), [(rows, 6), (columns, 6), (part_read_later, 4), (together, 5.5)])
def test_inductor_expects_what_its_code_holds(program, sizes, monkeypatch):
    estimate_memory_as_generated()
    expected = []
    reorder = memory.reorder_for_peak_memory

    @functools.wraps(reorder)
    def seen(nodes, buffers, fused, inputs, outputs):
        order = reorder(nodes, buffers, fused, inputs, outputs)
        freed = memory.get_freeable_input_buf(order, inputs)
        expected.append(memory.estimate_peak_memory(order, freed, outputs)[0])
        return order

    monkeypatch.setattr(memory, "reorder_for_peak_memory", seen)
    with config.patch(force_disable_caches=True), torch.no_grad():
        compiled = torch.compile(program, fullgraph=True)
        x, w = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
        compiled(x, w)
        held = allocated(lambda: compiled(x, w))
    assert held == pytest.approx(expected[0], abs=BYTES / 8)
    assert held == pytest.approx(sizes * BYTES, abs=BYTES / 8)
