"""`ShardingConverter`, which enumerates all placements of the tensors of a call on a mesh.

The converter takes plain arguments and yields the same structures with DTensors of the same values. To test an
operator, call it with each (args, kwargs) it yields, and compare the results with the plain call.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...layout.placements import Partial, Placement, Replicate, Shard
from ...tensor.factories import distribute_tensor
from ...tensor.tensor import DTensor

Placements = tuple[Placement, ...]


class ShardingConverter:
    """Iterates over (args, kwargs) in which each tensor is a DTensor, in every combination of placements.

    On each mesh axis a tensor is replicated, or sharded on a dim that is longer than 1 and that the axes sharding it
    divide evenly. Tensors inside tuples, lists and dicts are converted, too. Bool tensors are only replicated. Sparse,
    quantized, nested and meta tensors, conjugate and negative views, and tensor subclasses are passed through
    unchanged, and counted.

    Args:
        mesh: the mesh, with any number of axes.
        args: positional arguments of a call.
        kwargs: keyword arguments of a call.
        replicate_only: replicate everything.
        uneven: shard on every dim, whatever its length.
        partial: also make tensors of numbers Partial(): the first rank of the axis holds the value, and the others
            hold zeros.

    Attributes:
        hit: number of tensors converted so far.
        miss: number of tensors passed through so far.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        replicate_only: bool = False,
        uneven: bool = False,
        partial: bool = False,
    ) -> None:
        self.hit: int = 0
        self.miss: int = 0
        self.mesh = mesh
        self.arguments: tuple[Any, Any] = (args, kwargs)
        self.replicate_only = replicate_only
        self.uneven = uneven
        self.partial = partial
        tensors: list[torch.Tensor] = []
        _mapped(self.arguments, lambda t: tensors.append(t))
        self._combinations = itertools.product(*map(self.choices, tensors))

    def successful(self) -> bool:
        """Return whether tensors were converted, and none passed through."""
        return self.hit > 0 and self.miss == 0

    def choices(self, tensor: torch.Tensor) -> list[Placements]:
        """Return all placements of `tensor`, each with one entry per mesh axis; the fully replicated one is first."""
        replicated = [Replicate()]
        if self.replicate_only or not _convertible(tensor) or tensor.dtype == torch.bool:
            return [(Replicate(),) * self.mesh.ndim]
        shards = [Shard(dim) for dim, size in enumerate(tensor.shape) if self.uneven or size > 1]
        partials = [Partial()] if self.partial else []
        products = itertools.product(replicated + shards + partials, repeat=self.mesh.ndim)
        return [p for p in products if self.uneven or self._even(tensor, p)]

    def _even(self, tensor: torch.Tensor, placements: Placements) -> bool:
        parts: Counter[int] = Counter()
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                parts[placement.dim] = (parts[placement.dim] or 1) * self.mesh.size(axis)
        return all(tensor.shape[dim] % n == 0 for dim, n in parts.items())

    def __iter__(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        return self

    def __next__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        placements = iter(next(self._combinations))
        return _mapped(self.arguments, lambda t: self._converted(t, next(placements)))

    def _converted(self, tensor: torch.Tensor, placements: Placements) -> torch.Tensor:
        if not _convertible(tensor):
            self.miss += 1
            return tensor
        self.hit += 1
        result = self._distributed(tensor, placements)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(result, requires_grad=tensor.requires_grad)
        return result

    def _distributed(self, tensor: torch.Tensor, placements: Placements) -> torch.Tensor:
        partial_axes = [axis for axis, p in enumerate(placements) if isinstance(p, Partial)]
        if not partial_axes:
            return distribute_tensor(tensor, self.mesh, placements)
        whole = [Replicate() if isinstance(p, Partial) else p for p in placements]
        local = distribute_tensor(tensor.detach(), self.mesh, whole).to_local()
        if any(self.mesh.get_local_rank(axis) for axis in partial_axes):
            local = torch.zeros_like(local)
        result = DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        return result.requires_grad_(tensor.requires_grad)


def _convertible(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and not (
        tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_neg()
        or tensor.is_conj()
        or tensor.device.type in ("lazy", "meta")
    )


def _mapped(value: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """Return `value` with `fn` applied to the tensors inside its tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {key: _mapped(item, fn) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_mapped(item, fn) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


__all__ = ["ShardingConverter"]
