"""What Inductor expects to hold, by which it orders kernels, against what its code holds."""

import functools
from contextlib import nullcontext

import pytest
import torch
from torch._inductor import config, memory

from bench.cases.memory import allocated
from dtensor.compile import backends
from dtensor.compile.backends.options import Options
from dtensor.compile.backends.run_passes import compilation_of
from dtensor.compile.recording.frames import Frame
from dtensor.errors import ArgumentError
from dtensor.torch_private.peak_memory import Bound, HeldMore, bounded, estimate_memory_as_generated

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


def in_place(x, w):
    """A generated kernel that writes over the product that it reads."""
    return torch.relu(x @ w) @ w


def within_a_kernel(x, w):
    """A row of sums that the kernel divides by, and a matrix that it does not write."""
    y = torch.exp(x @ w)
    return (y / y.sum(1, keepdim=True)) @ w


PROGRAMS = [(rows, 6), (columns, 6), (part_read_later, 4), (together, 5.5), (in_place, 2), (within_a_kernel, 2)]
"""Programs, and the matrices that they hold at their peak."""


@pytest.mark.parametrize(("program", "sizes"), PROGRAMS)
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


@pytest.mark.parametrize("matrices", [1, 2])
def test_kernels_hold_no_more_than_a_bound(matrices):
    """The program holds two; what is given counts as well."""
    x, w = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    refused = pytest.raises(HeldMore, match=f"{2 * BYTES:,} bytes") if matrices < 2 else nullcontext()
    bound = Bound(most=(matrices + 2) * BYTES, given=2 * BYTES)
    torch.compiler.reset()
    with config.patch(force_disable_caches=True), torch.no_grad(), refused, bounded(bound):
        torch.compile(in_place, fullgraph=True)(x, w)


def test_a_step_is_compiled_until_its_kernels_hold_no_more(monkeypatch):
    """Kernels hold a quarter more than their graph, of which there is none of less than 60 bytes."""

    def compiled(gm, inputs, options):
        aim = options.memory - compilation_of(options, "inference", Frame()).spare
        if aim < 60:
            raise ArgumentError("no graph")
        if aim * 1.25 > options.memory:
            raise HeldMore(int(aim * 1.25))
        return aim

    monkeypatch.setattr(backends.backend, "_traced", compiled)
    for most in (76, 80, 100, 1000):
        assert 60 <= backends.backend._within_memory(None, None, Options(memory=most)) <= most / 1.25
    with pytest.raises(ArgumentError, match="no graph"):
        backends.backend._within_memory(None, None, Options(memory=50))
    with pytest.raises(ArgumentError, match=r"at most memory=70 bytes was not found; .* takes 7[5-9]\."):
        backends.backend._within_memory(None, None, Options(memory=70))
