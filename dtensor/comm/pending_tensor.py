"""Pending tensors: local tensors whose collective has been started and is waited for on first use.

`redistribute(async_op=True)` puts one into the DTensor that it returns. Every operator on it waits, except aliasing
(`to_local`). Like all local tensors of DTensors, it is below autograd.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..torch_private.core import OpOverload, functional_collectives, make_wrapper_subclass

_ALIASES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


class Pending(functional_collectives.AsyncCollectiveTensor):
    """A contiguous tensor that is not available yet. `wait()` returns the actual tensor.

    A subclass of torch's AsyncCollectiveTensor, because programs check the result of a redistribution for that class.
    Attributes that torch's class holds may have to be computed here first.
    """

    _result: "_Result"

    @staticmethod
    def __new__(cls, like: torch.Tensor, shape: tuple[int, ...], finish: Callable[[], torch.Tensor]) -> Any:
        """A tensor of `shape`, with dtype and device of `like`. `finish`, called once, waits for it and returns it."""
        return cls._of(_Result(finish), shape, like.dtype, like.device)

    @classmethod
    def _of(cls, result: "_Result", shape: Any, dtype: torch.dtype, device: torch.device) -> "Pending":
        self = make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self._result = result
        return self

    def wait(self) -> torch.Tensor:
        """Wait for the tensor and return it."""
        return self._result.value()

    @property
    def done(self) -> bool:
        """Whether the tensor has been waited for."""
        return self._result.finish is None

    elem: Any = property(wait)  # pyright: ignore[reportAssignmentType]
    completed = done  # pyright: ignore[reportAssignmentType]
    trigger_wait = wait

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ALIASES or (func is torch.ops.aten.view.default and tuple(args[1]) == tuple(args[0].shape)):
            x = args[0]
            return cls._of(x._result, x.shape, x.dtype, x.device)
        return func(*_waited(args), **{k: _waited(a) for k, a in (kwargs or {}).items()})

    def tolist(self) -> Any:
        return self.wait().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.wait().numpy(force=force)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Pending({self.wait()})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.wait().__reduce_ex__(protocol)


class _Result:
    """The result that a pending tensor and its aliases share."""

    __slots__ = ("finish", "found")

    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        self.finish: Callable[[], torch.Tensor] | None = finish
        self.found: torch.Tensor

    def value(self) -> torch.Tensor:
        if self.finish is not None:
            with torch.no_grad():
                # Not a view of a padded tensor: AOTAutograd (torch 2.15) would mistake it for the one Dynamo has seen.
                self.found = self.finish().data
            self.finish = None
        return self.found


def _waited(a: Any) -> Any:
    if isinstance(a, Pending):
        return a.wait()
    if isinstance(a, (list, tuple)):
        return type(a)([_waited(item) for item in a])
    return a


def waited(x: torch.Tensor) -> torch.Tensor:
    """Wait for `x` if it is pending, and return the actual tensor."""
    return x.wait() if isinstance(x, Pending) else x


__all__ = ["Pending", "waited"]
