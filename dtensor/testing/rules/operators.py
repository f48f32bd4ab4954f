"""Compares operators on DTensors with plain calls, over torch's operator database and many placements.

`samples` returns calls of an operator, and `placements` the ways to place their tensors on a mesh. `disagreement` runs
one of them, forward and backward, and describes in one line how the results differ from those on one device.
"""

import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...layout.placements import Partial, Placement, Replicate, Shard
from ...tensor.factories import distribute_tensor
from ...tensor.tensor import DTensor
from ...torch_private.core import operator_database, operator_samples
from .candidates import mapped, tensors

Placements = tuple[Placement, ...]
T = TypeVar("T")
RTOL = ATOL = 2e-4
"""Tolerances in float32: sharded sums are computed in a different order."""


@dataclass(frozen=True)
class Sample:
    """A call of an operator.

    Attributes:
        operator: name of the operator in torch's database, with the variant after a dot.
        call: the function.
        args: positional arguments, with plain tensors.
        kwargs: keyword arguments, with plain tensors.
    """

    operator: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> Any:
        def text(value: Any) -> Any:
            return f"{str(value.dtype)[6:]}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)

        given = [*map(text, self.args), *(f"{k}={text(v)}" for k, v in self.kwargs.items())]
        return f"{self.operator}({', '.join(given)})"[:200]

    def fresh(self) -> "Sample":
        """Return the same call on copies of its tensors, so that one run does not see the writes of another."""
        args, kwargs = mapped((self.args, self.kwargs), _copied)
        return Sample(self.operator, self.call, args, kwargs)


def _copied(x: torch.Tensor) -> torch.Tensor:
    if x.layout != torch.strided:
        return x
    return x.detach().clone().resolve_conj().resolve_neg().requires_grad_(x.requires_grad)


def operator_names() -> list[str]:
    """Return the names of operators that support float32 on the CPU, in the order of torch's database."""
    return [name for name, op in operator_database().items() if op.supports_dtype(torch.float32, "cpu")]


def twice_differentiable() -> list[str]:
    """Return the names of operators whose gradients can be differentiated, in the order of torch's database."""
    return [name for name, op in operator_database().items() if op.supports_autograd and op.supports_gradgrad]


def samples(name: str, most: int, dtype: torch.dtype = torch.float32) -> list[Sample]:
    """Return up to `most` calls of an operator: the first sample of the database, and others drawn with a fixed seed.

    Calls without tensors are left out. If the operator has an in-place or out= variant, a call of each follows.
    """
    op = operator_database()[name]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        given = list(operator_samples(op, dtype, op.supports_autograd))
    found = [Sample(name, op.op, (s.input, *s.args), s.kwargs) for s in given]
    found = drawn([s for s in found if tensors((s.args, s.kwargs))], most, name)
    extra = []
    if found and op.inplace_variant is not None:
        extra.append(Sample(f"{name} in place", op.inplace_variant, *_without_gradient(found[0])))
    if found and op.supports_out:
        extra.append(Sample(f"{name} out=", _with_out(op.op), *_without_gradient(found[-1])))
    return found + extra


def _without_gradient(sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return mapped((sample.args, sample.kwargs), torch.Tensor.detach)


def _with_out(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        made = call(*args, **kwargs)
        out = mapped(made, torch.zeros_like)
        call(*args, **kwargs, out=out)
        return out

    return run


def drawn(items: list[Any], most: int, key: str) -> list[Any]:
    """Return the first of `items` and some of the others, at most `most` in all; the choice depends on `key` only."""
    if len(items) <= most:
        return items
    return [items[0], *random.Random(zlib.crc32(key.encode())).sample(items[1:], most - 1)]


def placements(sample: Sample, mesh: DeviceMesh, most: int) -> list[tuple[Placements | None, ...]]:
    """Return up to `most` ways to place the tensors of a call on a mesh; in the first one all are replicated.

    On each mesh axis a tensor is replicated, sharded on any dim, evenly or not, or, if it is floating-point or complex,
    Partial(sum). None stands for a sparse tensor, which stays plain.
    """
    given = tensors((sample.args, sample.kwargs))
    each = [list(_choices(x, mesh)) for x in given]
    # The key must be the same on all ranks. It holds only shapes, as other arguments may print their address.
    key = f"{sample.operator} {[list(x.shape) for x in given]} on {mesh.ndim}"
    total = 1
    for c in each:
        total *= len(c)
    if total <= 4096:
        return drawn(list(itertools.product(*each)), most, key)
    chance = random.Random(zlib.crc32(key.encode()))
    return [tuple(c[0] for c in each), *(tuple(chance.choice(c) for c in each) for _ in range(most - 1))]


def _choices(x: torch.Tensor, mesh: DeviceMesh) -> Iterator[Placements | None]:
    if x.layout != torch.strided:
        return iter([None])
    one: list[Placement] = [Replicate(), *map(Shard, range(x.dim()))]
    if x.dtype.is_floating_point or x.dtype.is_complex:
        one.append(Partial())
    return itertools.product(one, repeat=mesh.ndim)


def place(
    x: torch.Tensor, mesh: DeviceMesh, target: Sequence[Placement] | None, shuffled: bool = False
) -> torch.Tensor:
    """Return a DTensor with the values of `x`, which every rank holds, and the placements `target`.

    On a partial axis the first rank holds the value and the others hold zeros. With `shuffled` the dims of the local
    tensor have another order in memory. A `target` of None returns `x`.
    """
    if target is None:
        return x
    whole = [Replicate() if isinstance(p, Partial) else p for p in target]
    made = distribute_tensor(x.detach(), mesh, whole, src_data_rank=None)
    partial = [axis for axis, p in enumerate(target) if isinstance(p, Partial)]
    if partial:
        local = made.to_local()
        local = torch.zeros_like(local) if any(mesh.get_local_rank(axis) for axis in partial) else local
        made = DTensor.from_local(local, mesh, target, shape=x.shape, stride=x.stride())
    made: Any = made.detach()
    if shuffled:
        made._local_tensor = _shuffled(made._local_tensor)
    return made.requires_grad_(x.requires_grad)


def _shuffled(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same values whose second dim is the last in memory; of two dims, the first."""
    if x.dim() < 2:
        return x
    dims = [1, 0] if x.dim() == 2 else [0, *range(2, x.dim()), 1]
    return x.permute(dims).contiguous().permute([dims.index(dim) for dim in range(x.dim())])


def disagreement(
    sample: Sample,
    mesh: DeviceMesh,
    where: tuple[Placements | None, ...],
    *,
    compiled: Callable[..., Any] | None = None,
    read: Callable[[Any], Any] = lambda out: out,
    twice: bool = False,
    shuffled: bool = False,
) -> str | None:
    """Run a call on DTensors, and compare outputs and gradients with those of the plain call.

    Exceptions that the operator raises on DTensors are not caught.

    Args:
        sample: the call.
        mesh: the device mesh; all of its ranks must call this function.
        where: placements of the tensors of the call, in their order.
        compiled: function to run instead of `sample.call` on the DTensors.
        read: maps the outputs to the values that are compared, for operators with several right answers.
        twice: also compare second gradients, with respect to the tensors of the call and to the tangents.
        shuffled: give local tensors, and those of tangents, another memory order than their DTensors have, as other
            operators and collectives may do.

    Returns:
        A line that describes the first difference, or None if there is none.

    Raises:
        NotPlain: the plain call raises, or `twice` is given and it has no second gradient.
    """
    dense, dense_leaves = _run(sample.fresh(), sample.call, read, twice)
    supply = iter(where)
    args, kwargs = mapped(
        (sample.fresh().args, sample.fresh().kwargs), lambda x: place(x, mesh, next(supply), shuffled)
    )
    placed = Sample(sample.operator, sample.call, args, kwargs)
    _seed()
    outputs = _outputs(read((compiled or sample.call)(*args, **kwargs)))
    leaves = None if dense_leaves is None else _gradients(outputs, _leaves(placed), mesh, twice, shuffled)
    # Gather everything before comparing, so that a rank that finds a difference does not leave the others waiting.
    found, gradients = list(map(_seen, outputs)), None if leaves is None else list(map(_seen, leaves))
    if len(found) != len(dense):
        return f"{len(found)} outputs instead of {len(dense)}"
    for i, (one, expected) in enumerate(zip(found, map(_seen, dense))):
        if (text := _difference(one, expected)) is not None:
            return f"output {i}: {text}"
    if dense_leaves is None:
        return None
    if gradients is None:
        return "no output requires a gradient"
    for i, (one, expected) in enumerate(zip(gradients, map(_seen, dense_leaves))):
        if (text := _gradient_difference(one, expected)) is not None:
            return f"gradient {i}: {text}"
    if len(gradients) != len(dense_leaves):
        return f"{len(gradients)} gradients instead of {len(dense_leaves)}"
    return None


def _seed() -> None:
    # Seed the CPU's generator only: each torch.manual_seed queues a call, with its stack, for CUDA.
    torch.default_generator.manual_seed(3)


class NotPlain(Exception):
    """The operator does not run on plain tensors."""


def _run(sample: Sample, call: Callable[..., Any], read: Callable[[Any], Any], twice: bool) -> Any:
    """Return the outputs and the gradients of a plain call; the gradients are None if it has none."""
    _seed()
    try:
        outputs = _outputs(read(call(*sample.args, **sample.kwargs)))
    except Exception as error:
        raise NotPlain(f"{sample}: {error}") from error
    try:
        return outputs, _gradients(outputs, _leaves(sample), None, twice)
    except (RuntimeError, NotImplementedError) as error:
        if twice:
            raise NotPlain(f"{sample}: {error}") from error
        return outputs, None


def _outputs(out: Any) -> list[Any]:
    if isinstance(out, (list, tuple)):
        return [one for item in out for one in _outputs(item)]
    return [out]


def _leaves(sample: Sample) -> list[torch.Tensor]:
    return [x for x in tensors((sample.args, sample.kwargs)) if x.requires_grad]


def _gradients(
    outputs: list[Any], leaves: list[torch.Tensor], mesh: Any, twice: bool, shuffled: bool = False
) -> list[torch.Tensor | None] | None:
    """Return the gradients of the leaves. With `twice`, the second gradients by leaves and tangents follow."""
    outs = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if not outs or not leaves:
        return None
    tangents = [t.requires_grad_(twice) for t in _tangents(outs, mesh, 1, shuffled)]
    first = torch.autograd.grad(outs, leaves, tangents, allow_unused=True, create_graph=twice)
    again = [g for g in first if twice and g is not None and g.requires_grad]
    if not again:
        return list(first)
    second = torch.autograd.grad(again, [*leaves, *tangents], _tangents(again, mesh, 2), allow_unused=True)
    return [*first, *second]


def _tangents(outs: list[torch.Tensor], mesh: Any, seed: int, shuffled: bool = False) -> list[torch.Tensor]:
    tangents = []
    generator = torch.Generator().manual_seed(seed)
    for o in outs:
        tangent = torch.randn(o.shape, dtype=o.dtype, generator=generator)
        if isinstance(o, DTensor):
            tangent = place(tangent, mesh, [Replicate()] * mesh.ndim, shuffled)
        tangents.append(tangent)
    return tangents


def _seen(x: Any) -> Any:
    """Return what is compared of an output; for a tensor, its global value as a plain tensor and its requires_grad."""
    if not isinstance(x, torch.Tensor):
        return x
    whole = x.detach()
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    whole = whole if whole.layout == torch.strided else whole.to_dense()
    return whole, x.requires_grad


def _difference(found: Any, expected: Any) -> str | None:
    if not isinstance(expected, tuple):
        alike = found == expected or (found != found and expected != expected)
        return None if alike else f"{found} instead of {expected}"
    if not isinstance(found, tuple):
        return f"{found} instead of a tensor"
    if found[1] != expected[1]:
        return f"requires_grad is {found[1]}"
    try:
        torch.testing.assert_close(found[0], expected[0], rtol=RTOL, atol=ATOL, equal_nan=True)
    except AssertionError as error:
        return str(error).replace("\n", " ")[:200]
    return None


def _gradient_difference(found: Any, expected: Any) -> str | None:
    """Return how two gradients differ; a gradient of zeros and a missing gradient count as equal."""
    if found is None or expected is None:
        other = found if expected is None else expected
        return None if other is None or not other[0].any() else "there is one on one side only"
    return _difference(found, expected)


__all__ = [
    "NotPlain",
    "Placements",
    "Sample",
    "disagreement",
    "drawn",
    "operator_names",
    "place",
    "placements",
    "samples",
    "twice_differentiable",
]
