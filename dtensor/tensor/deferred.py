"""Tensors whose values are read or gathered later: code that names, converts and counts them runs without values.

Other libraries compute from a state dict what a model or a file holds: names, dtypes, experts stacked or taken apart.
They are given `Deferred` tensors, which are on the meta device and note what is computed from them. `read` obtains the
values, of all or of one part: `distribute_tensor` that of this rank, a file one tensor after the other.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from ..errors import ShardingError, UnsupportedError
from ..mesh.tensor_spec import Spec, chunk
from ..torch_private.core import tree_flatten, tree_leaves, tree_map, tree_unflatten

Box: TypeAlias = Sequence[tuple[int, int]]
"""For each dim, offset and size of a part of a tensor."""

CASTS = {"to", "type", "float", "double", "half", "bfloat16", "cpu", "cuda"}
"""Functions that change the dtype or the device and nothing else. The device is chosen where values are read."""

SAME = {"detach", "contiguous", "clone", "alias"}
"""Functions whose result has the same elements at the same places."""

HARMLESS = {"requires_grad_"}
"""Functions in place that write no values."""


DEVICE: Any = torch.Tensor.device.__get__


class Deferred(torch.Tensor):
    """A tensor on the meta device whose values are read later.

    Attributes:
        obtain: a function from a part to its values, as a plain tensor.
        place: the device that `device` names, if `x.to(device)` has asked for one: what goes with it is made there.
    """

    obtain: Callable[[Box], torch.Tensor]
    place: torch.device | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Deferred":
        made: Any = _placed(deferred(self, self.obtain), self.place)
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=self.requires_grad)
        memo[id(self)] = made
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__" and func == DEVICE and args[0].place is not None:
            return args[0].place
        if name in CASTS:
            return _cast(args[0], args[1:], kwargs, name)
        if _writes(name, kwargs):
            if isinstance(args[0], Deferred) or isinstance(kwargs.get("out"), Deferred):
                raise UnsupportedError(f"{name} writes to a tensor of shape {list(args[0].shape)} that is not read yet")
            return func(*tree_map(read, args), **tree_map(read, kwargs))
        if name != "__get__":
            _check_untrained(name, args)
        try:
            found = super().__torch_function__(func, types, args, kwargs)
        except RuntimeError:  # what it returns depends on values, or other tensors have theirs
            return func(*tree_map(read, args), **tree_map(read, kwargs))
        outputs, tree = tree_flatten(found)
        return tree_unflatten([_noted(x, i, func, name, args, kwargs) for i, x in enumerate(outputs)], tree)


def deferred(like: torch.Tensor, obtain: Callable[[Box], torch.Tensor], dtype: torch.dtype | None = None) -> Deferred:
    """A tensor of the shape, strides and dtype of `like`, whose parts `obtain` returns."""
    with torch.no_grad():
        shape, stride = tuple(like.shape), tuple(like.stride())
        made: Any = torch.empty_strided(shape, stride, dtype=dtype or like.dtype, device="meta").as_subclass(Deferred)
    made.obtain = obtain
    return made


def read(x: Any, box: Box | None = None) -> Any:
    """The values of a part of a tensor, by default of all of it. What is no tensor is returned unchanged."""
    if isinstance(x, Deferred):
        with torch.no_grad():
            return x.obtain(whole_of(x) if box is None else box)
    if isinstance(x, torch.Tensor) and box is not None:
        for dim, (offset, size) in enumerate(box):
            x = x.narrow(dim, offset, size)
    return x


def whole_of(x: torch.Tensor) -> Box:
    """The part of a tensor that is all of it."""
    return [(0, size) for size in x.shape]


def own_box(spec: Spec) -> Box:
    """The part of a global tensor that this rank holds."""
    sizes, offsets = chunk(spec)
    return list(zip(offsets, sizes))


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    in_place = name.endswith("_") and not name.endswith("__") and name not in HARMLESS
    return in_place or name == "__setitem__" or kwargs.get("out") is not None


def _check_untrained(name: str, args: Any) -> None:
    """Refuse to compute from real tensors with a parameter that is not read yet: its gradient would be lost."""
    tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)] if torch.is_grad_enabled() else []
    if any(isinstance(x, Deferred) and x.requires_grad for x in tensors) and not all(x.is_meta for x in tensors):
        raise ShardingError(
            f"{name} would compute with a parameter that is not read yet, and could not give it a gradient; shard the "
            "model first, by distribute_model, fully_shard or parallelize_module, which read it"
        )


def _cast(x: Any, args: Any, kwargs: dict[str, Any], name: str) -> torch.Tensor:
    if not isinstance(x, Deferred):  # x.to(other), of which only the dtype is known
        return x.to(args[0].dtype)
    given = [a.dtype if isinstance(a, torch.Tensor) else a for a in (*args, *kwargs.values())]
    short = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
    dtype = next((a for a in given if isinstance(a, torch.dtype)), short.get(name, x.dtype))
    device = next((a for a in map(_device, given) if a is not None), x.place)
    return _placed(deferred(x, lambda box: read(x, box).to(dtype), dtype), device)


def _device(given: Any) -> torch.device | None:
    return torch.device(given) if isinstance(given, (str, torch.device)) else None


def _placed(x: Deferred, device: torch.device | None) -> Deferred:
    x.place = device
    return x


def _noted(x: Any, index: int, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Output `index` of a function of deferred tensors."""
    if not isinstance(x, Deferred) or hasattr(x, "obtain"):
        return x
    if name in SAME or (name == "__getitem__" and args[1] is ...):
        return _placed(deferred(x, lambda box: read(args[0], box)), args[0].place)
    if name in ("cat", "stack") and len(args) + len(kwargs) <= 2:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return deferred(x, lambda box: _joined(name, args[0], dim % x.dim(), box))

    def obtain(box: Box) -> torch.Tensor:
        outputs, _ = tree_flatten(func(*tree_map(read, args), **tree_map(read, kwargs)))
        return read(outputs[index], box)

    return deferred(x, obtain)


def _joined(name: str, tensors: Sequence[torch.Tensor], dim: int, box: Box) -> torch.Tensor:
    """A part of what `torch.cat` or `torch.stack` make of tensors. Only those that are in it are read."""
    begin, end = box[dim][0], box[dim][0] + box[dim][1]
    parts, at = [], 0
    for x in tensors:
        length = x.shape[dim] if name == "cat" else 1
        low, high = max(begin - at, 0), min(end - at, length)
        inside = [(low, high - low)] if name == "cat" else []
        if high > low:
            parts.append(read(x, [*box[:dim], *inside, *box[dim + 1 :]]))
        at += length
    if parts:
        return getattr(torch, name)(parts, dim=dim)
    return tensors[0].new_empty([size for _, size in box], device="cpu")


__all__ = ["Box", "Deferred", "deferred", "own_box", "read", "whole_of"]
