"""The inputs of a model in a few numbers, and the comparison of those of all ranks, as operators of a graph.

    input_numbers(given)                         a checksum of each tensor, and a number of the shape of each
    inputs_alike(gathered, shape, cut, names)    whether those of all ranks, in the order of the mesh, are the same

`dtensor.parallel.checks.input_check` puts an all_gather between the two. A pass lets it travel behind what the model
sends (`dtensor.passes.overlap.beside`).
"""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import library as operators

from ..errors import AgreementError
from ..mesh.operator_library import library

DIFFERS = (
    "distribute_model: argument {name} of forward differs between ranks; pass the same values on all ranks, or write "
    "inputs={{axis: Shard(dim)}} if each rank passes its part, all of one shape"
)

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

library.define("input_numbers(Tensor[] given) -> Tensor")
library.define("inputs_alike(Tensor gathered, int[] shape, int[] cut, str[] names) -> Tensor")


def _input_numbers(given: list[torch.Tensor]) -> torch.Tensor:
    """The checksum of each tensor, and then a number of the shape of each."""
    device, shapes = given[0].device, [_number_of_shape(x) for x in given]
    if all(x.device.type == "cpu" for x in given):
        return torch.tensor([*map(_checksum, given), *shapes])
    sums = [torch.as_tensor(_checksum(x), device=device) for x in given]
    return torch.cat([torch.stack(sums), torch.tensor(shapes, device=device)])


def _number_of_shape(x: torch.Tensor) -> int:
    return zlib.crc32(repr(tuple(x.shape)).encode())


def _checksum(x: torch.Tensor) -> Any:
    """A number which other values or another order are very unlikely to have; on a GPU a tensor, a sum weighted by
    position."""
    flat = x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.device.type == "cpu":
        return zlib.crc32(flat.view(torch.uint8).numpy().data)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    bits = flat.view(BITS[flat.element_size()]).to(torch.int64)
    return (bits * (torch.arange(bits.shape[0], device=x.device) * 2654435761 + 1)).sum()


def alike(gathered: torch.Tensor, shape: Sequence[int], cut: Sequence[int]) -> torch.Tensor:
    """Of each input whether the ranks of a mesh of this shape have the same; `cut`: bits of the axes along which each
    has a part, of which only the shape is compared."""
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "fake":
        return torch.ones(len(cut), dtype=torch.bool)  # there are no other ranks
    table = gathered.view(*shape, 2, len(cut))
    sums, shapes = table.select(-2, 0), table.select(-2, 1).flatten(0, -2)
    found = (shapes == shapes[0]).all(0)
    for i, axes in enumerate(cut):
        mine = sums.select(-1, i)
        for axis in range(len(shape)):
            if not axes >> axis & 1:
                found[i] &= (mine == mine.narrow(axis, 0, 1)).all()
    return found


def _inputs_alike(gathered: torch.Tensor, shape: list[int], cut: list[int], names: list[str]) -> torch.Tensor:
    """As `alike`; on the CPU an input that differs is an error at once."""
    found = alike(gathered, shape, cut)
    if found.device.type == "cpu":
        for name, same in zip(names, found.tolist()):
            if not same:
                raise AgreementError(DIFFERS.format(name=name))
    return found


library.impl("input_numbers", _input_numbers, "CompositeExplicitAutograd")
library.impl("inputs_alike", _inputs_alike, "CompositeExplicitAutograd")
operators.register_fake(
    "dtensor::input_numbers", lambda given: given[0].new_empty(2 * len(given), dtype=torch.int64), lib=library
)
operators.register_fake(
    "dtensor::inputs_alike",
    lambda gathered, shape, cut, names: gathered.new_empty(len(names), dtype=torch.bool),
    lib=library,
)

__all__ = ["DIFFERS", "alike"]
