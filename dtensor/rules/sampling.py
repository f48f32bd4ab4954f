"""Draws this rank's shard of the random tensor that one device would draw, without holding the global tensor.

The generator's sequence is drawn in blocks, and the part of each block that belongs to the shard is kept. Block lengths
are multiples of 16 elements, the unit in which torch's CPU normal sampler turns uniforms into normals, and the last
block is never shorter than that, so the numbers are the same as those of a single call.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from ..mesh.tensor_spec import Spec, chunk

BLOCK = 1 << 20


def sample(draw: Callable[..., torch.Tensor], spec: Spec, block: int = BLOCK) -> torch.Tensor:
    """The local shard of `draw(spec.shape)`; advances the default generator by the same amount on every rank.

    Args:
        draw: `torch.rand` or `torch.randn`.
        spec: mesh, layout, global shape and dtype.
        block: number of elements drawn at a time, a multiple of 16; the last block may be up to twice as long.
    """
    total, device = prod(spec.shape), spec.mesh.device_type
    sizes, offsets = chunk(spec)
    local = torch.empty(sizes, dtype=spec.dtype, device=device)
    if device != "cpu" or total <= block:
        drawn = draw(spec.shape, dtype=spec.dtype, device=device)
        if spec.coordinate is None:
            return drawn.new_empty(0)
        return drawn[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))].clone()
    wanted = _positions(sizes, offsets, spec.shape)
    flat, start = local.view(-1), 0
    while start < total:
        end = total if total - start < 2 * block else start + block
        drawn = draw(end - start, dtype=spec.dtype, device=device)
        first, last = torch.searchsorted(wanted, torch.tensor([start, end])).tolist()
        flat[first:last] = drawn[wanted[first:last] - start]
        start = end
    return local if spec.coordinate is not None else local.new_empty(0)


def _positions(sizes: Any, offsets: Any, shape: Any) -> torch.Tensor:
    """Flat global positions of the shard's elements, ascending."""
    found = torch.zeros(1, dtype=torch.int64)
    for size, offset, length in zip(sizes, offsets, shape):
        found = (found.unsqueeze(-1) * length + torch.arange(offset, offset + size)).view(-1)
    return found


__all__ = ["sample"]
