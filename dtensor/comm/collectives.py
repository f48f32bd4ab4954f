"""The redistribution operators, `torch.ops.dtensor.*`: the form that communication has in a compiled graph.

    all_gather(x, dim, size, group)                        S(dim) -> R      `size`: length of `dim` afterwards
    reduce_scatter(x, reduce_op, dim, group)               P -> S(dim)
    all_reduce(x, reduce_op, group)                        P -> R
    all_to_all(x, gather_dim, scatter_dim, size, group)    S(gather_dim) -> S(scatter_dim)
    shard(x, dim, group)                                   R -> S(dim)      no communication
    collective_permute(x, senders, group)                  blocks held by other ranks

`x` is a local tensor, `group` the name of a process group. Dimensions are split as by `torch.chunk`, so lengths that
are not divisible, and empty shards, are valid. `senders[r]` is the rank of the group whose tensor rank r holds
afterwards, its own perhaps, which sends nothing; all ranks hold tensors of the same shape. The rank is looked up when
an operator runs, never when it is traced, so every rank traces the same graph if sizes are divisible. The kernels are
built on the operators that start a collective (`dtensor.comm.start_collectives`); the `lower` pass traces these kernels
to get start/wait pairs.

A kernel is a generator: it yields the collective that it started and is sent the result, so the work after the wait can
be deferred (`start`). It starts a collective for all sizes, including tensors without elements; otherwise the
collectives that a rank runs would depend on the shard that it holds.

If a backend has no reduce-scatter, the ranks exchange the chunks and each reduces those that it receives.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import record_function

from ..job.collective_order import Wait, eager, mark_of
from ..job.groups import begin, calls_of, group_rank, group_size
from ..job.job import explain
from ..layout.chunks import chunk_length
from ..mesh.local_sizes import divides, local_length
from ..mesh.operator_library import library
from ..torch_private.core import (
    FakeTensor,
    c10d,
    profiler_enabled,
    resolve_process_group,
    traced_into_backward,
    without_frame,
)
from ..torch_private.symbolic_sizes import known_equal
from .profiled import WAIT, named
from .start_collectives import ANY_ORDER, OVER_GLOO, meet, permute, starts
from .wire_dtypes import Kernel, carried

library.define("all_gather(Tensor x, int dim, SymInt size, str group) -> Tensor")
library.define("reduce_scatter(Tensor x, str reduce_op, int dim, str group) -> Tensor")
library.define("all_reduce(Tensor x, str reduce_op, str group) -> Tensor")
library.define("all_to_all(Tensor x, int gather_dim, int scatter_dim, SymInt size, str group) -> Tensor")
library.define("shard(Tensor x, int dim, str group) -> Tensor")
library.define("collective_permute(Tensor x, int[] senders, str group) -> Tensor")
library.define("hold(Tensor x, Tensor[] others, str what) -> Tensor")

ops: Any = torch.ops.dtensor


class _Emit:
    """The operators as DTensors call them.

    While a joint graph is traced, a collective of the backward is pinned to the backward, even if it depends on no
    tangent (for example, gathering a saved operand). Otherwise the partitioner would place it according to its size.
    With uneven shards the sizes differ between ranks, which would then run their collectives in different orders and
    hang.
    """

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        operator = without_frame(getattr(ops, name).default)

        @functools.wraps(KERNELS[name][0])
        def call(x: torch.Tensor, *args: Any) -> torch.Tensor:
            if type(x) is torch.Tensor:
                return operator(x, *args)
            with traced_into_backward():
                return operator(x, *args)

        setattr(self, name, call)
        return call


emit: _Emit = _Emit()


def _padded(x: torch.Tensor, dim: int, length: Any) -> torch.Tensor:
    """`x` with zeros appended along `dim` up to `length`."""
    missing = length - x.shape[dim]
    if isinstance(missing, torch.SymInt):
        return x if known_equal(length, x.shape[dim]) else ops.fit(x, dim, length)
    if missing == 0:
        return x
    return _with_zeros(x, dim, missing)


def _with_zeros(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """`x` with `count` zeros appended along `dim`.

    Inductor can lower this even in a graph whose operators are no longer decomposed.
    """
    return torch.nn.functional.pad(x, [0] * (2 * (x.dim() - dim) - 1) + [count])


def _cut(x: torch.Tensor, dim: int, length: Any) -> torch.Tensor:
    """The first `length` elements of `x` along `dim`, contiguous."""
    if isinstance(length, torch.SymInt) or isinstance(x.shape[dim], torch.SymInt):
        return x if known_equal(length, x.shape[dim]) else ops.fit(x, dim, length)
    return x if x.shape[dim] == length else x.narrow(dim, 0, length).contiguous()


def _split(x: torch.Tensor, dim: int, group: str) -> list[torch.Tensor]:
    """`x` split along `dim` into a chunk of equal length for each rank, the last ones padded with zeros."""
    step, parts = local_length(x.shape[dim], group, first=True), group_size(group)
    return list(torch.split(_padded(x, dim, step * parts), step, dim)) if step else [x] * parts


def _is_outermost(x: torch.Tensor, dim: int) -> bool:
    """Whether all dims before `dim` have length one, so that chunks of `dim` are consecutive in memory."""
    return dim == 0 or all(isinstance(n, int) and n == 1 for n in x.shape[:dim])


def _joined(chunks: list[torch.Tensor], dim: int, size: Any) -> torch.Tensor:
    """Chunks of equal, padded length concatenated along `dim` and narrowed to `size`."""
    x = torch.cat(chunks, dim) if len(chunks) > 1 else chunks[0]
    return _cut(x, dim, size)


def _all_gather(x: torch.Tensor, dim: int, size: Any, group: str) -> Kernel:
    n = group_size(group)
    longest = -(-size // n) if type(size) is int else local_length(size, group, first=True)
    x = _padded(x, dim, longest).contiguous()
    y = yield starts(group, x.device).all_gather(x.unsqueeze(0) if x.dim() == 0 else x, n, group)
    if _is_outermost(x, dim):
        y = y.view(*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :]) if dim else y
        return _cut(y, dim, size)
    return _joined(list(y.view(n, *x.shape).unbind(0)), dim, size)


REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda rows: torch.sum(rows, 0, dtype=rows.dtype),
    "max": lambda rows: torch.amax(rows, 0),
    "min": lambda rows: torch.amin(rows, 0),
    "product": lambda rows: torch.prod(rows, 0, dtype=rows.dtype),
}
"""Reduction -> the function that reduces the chunks of all ranks, stacked along dim 0."""


def _reduce_scatter(x: torch.Tensor, reduce_op: str, dim: int, group: str) -> Kernel:
    n, size = group_size(group), x.shape[dim]
    even = divides(n, size)
    ones = x.shape[:dim] if _is_outermost(x, dim) and even else ()
    if ones:
        x = x.contiguous().view(x.shape[dim:])
    elif dim or not even:
        x = torch.cat(_split(x, dim, group), 0)
    op = "sum" if reduce_op == "avg" else reduce_op
    x = x.contiguous()
    if (start := starts(group, x.device)).reduce_scatter is None:
        y = yield start.all_to_all(x.view(n, x.shape[0] // n, *x.shape[1:]), [1] * n, [1] * n, group)
        y = REDUCTIONS[op](y)
    else:
        y = yield start.reduce_scatter(x, op, n, group)
    y = y.view(*ones, *y.shape) if ones else y
    y = y / n if reduce_op == "avg" else y
    return y if even else _cut(y, dim, local_length(size, group))


SMALL = 4096
"""Bytes that a rank sends at most where ranks gather a tensor that they reduce eagerly over gloo, and each reduces it:
in one step, with messages that have tags. A rank that reduces a loss alone then waits. Gloo would add up what others
reduce next, or end the process if that is longer."""


# "avg" is computed as a sum and a division: gloo has no average, and this way results are the same on all backends.
def _all_reduce(x: torch.Tensor, reduce_op: str, group: str) -> Kernel:
    op = "sum" if reduce_op == "avg" else reduce_op
    x = x.contiguous()
    calls = calls_of(group) if x.is_cpu and not isinstance(x, FakeTensor) else None
    gloo = calls if calls is not None and calls.over_gloo else None
    if gloo is not None and x.nbytes * (group_size(group) - 1) <= SMALL:
        y = yield OVER_GLOO.all_gather(x.view(1, -1), group_size(group), group)
        y = REDUCTIONS[op](y).view(x.shape)
    else:
        if gloo is not None and eager.failures and not gloo.eager.count:
            meet(resolve_process_group(group))  # a rank that has yet to hear of the last failure may wait in another
        y = yield c10d.all_reduce(x, op, group)
    return y / group_size(group) if reduce_op == "avg" else y


def _all_to_all(x: torch.Tensor, gather_dim: int, scatter_dim: int, size: Any, group: str) -> Kernel:
    n, length = group_size(group), x.shape[scatter_dim]
    x = _padded(x, gather_dim, local_length(size, group, first=True))
    chunks = _split(x, scatter_dim, group)
    mine = local_length(length, group)
    y = torch.cat([c.unsqueeze(0) for c in chunks])  # not stack: Inductor gets this kernel traced and has no stack
    y = yield starts(group, x.device).all_to_all(y, [1] * n, [1] * n, group)
    return _cut(_joined(list(y.unbind(0)), gather_dim, size), scatter_dim, mine)


def _collective_permute(x: torch.Tensor, senders: list[int], group: str) -> Kernel:
    return (yield permute(x.contiguous(), senders, group))


Begun = tuple[Kernel, torch.Tensor, Wait | None]
"""A kernel, the collective that it started, and what the program waits for; None in a trace."""


def _begin(name: str, x: torch.Tensor, args: tuple[Any, ...]) -> Begun:
    """Start the collective of the kernel `name`."""
    real = not isinstance(x, FakeTensor)
    if eager.raises is not None and real:  # what is traced sends nothing: its agreement raises
        eager.raises()
    kernel = _GENERATORS[name](x, *args)
    eager.mark = mark_of(name, x.dtype, args[0])
    try:
        started = next(kernel)
    except RuntimeError as error:  # to a rank that is gone nothing can be sent, either
        explain(error)
        raise
    finally:
        eager.mark = 0
    return kernel, started, begin((name, x.dtype, x.shape, args)) if real else None


def _finish(kernel: Kernel, started: torch.Tensor, wait: Wait | None) -> torch.Tensor:
    """Wait for the collective, and return the kernel's result."""
    eager.waits = wait
    try:
        arrived = _wait(started)
    except RuntimeError as error:
        explain(error)
        raise
    finally:
        eager.waits = None
    try:
        kernel.send(arrived)
    except StopIteration as end:
        return end.value
    raise AssertionError("a kernel starts one collective")


_wait = without_frame(c10d.wait_tensor.default)


def start(name: str, x: torch.Tensor, *args: Any) -> Callable[[], torch.Tensor]:
    """Start the communicating operator `name`; call the returned function, once, to wait for the result."""
    if profiler_enabled() and not isinstance(x, FakeTensor):
        return _named(name, x, args)
    return functools.partial(_finish, *_begin(name, x, args))


def _named(name: str, x: torch.Tensor, args: tuple[Any, ...]) -> Callable[[], torch.Tensor]:
    """As `start`, with names in the profile."""
    said = named(name, x, args)
    with record_function(said):
        begun = _begin(name, x, args)

    def finished() -> torch.Tensor:
        with record_function(WAIT + said):
            return _finish(*begun)

    return finished


_GENERATORS: dict[str, Callable[..., Kernel]] = {
    "all_gather": carried(reduces=False)(_all_gather),
    "reduce_scatter": carried(reduces=True)(_reduce_scatter),
    "all_reduce": carried(reduces=True)(_all_reduce),
    "all_to_all": carried(reduces=False)(_all_to_all),
    "collective_permute": carried(reduces=False)(_collective_permute),
}


def _waited(name: str) -> Callable[..., torch.Tensor]:
    @functools.wraps(_GENERATORS[name])
    def kernel(x: torch.Tensor, *args: Any) -> torch.Tensor:
        if profiler_enabled() and not isinstance(x, FakeTensor):
            return _named(name, x, args)()
        return _finish(*_begin(name, x, args))

    return kernel


def shard(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """A copy of this rank's chunk of `x` along `dim`, cut as by `torch.chunk` among the ranks of a group."""
    n, rank, size = group_size(group), group_rank(group), x.shape[dim]
    start = min(rank * -(-size // n), size)
    return x.narrow(dim, start, chunk_length(size, n, rank)).clone(memory_format=torch.contiguous_format)


def _resized(x: torch.Tensor, dim: int, size: Any) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


def _fake_all_gather(x: Any, dim: Any, size: Any, group: Any) -> Any:
    return _resized(x, dim, size)


def _fake_reduce_scatter(x: Any, reduce_op: Any, dim: Any, group: Any) -> Any:
    return _fake_shard(x, dim, group)


def _fake_all_reduce(x: Any, reduce_op: Any, group: Any) -> Any:
    return x.new_empty(x.shape)


def _fake_all_to_all(x: Any, gather_dim: Any, scatter_dim: Any, size: Any, group: Any) -> Any:
    return _fake_shard(_resized(x, gather_dim, size), scatter_dim, group)


def _fake_shard(x: Any, dim: Any, group: Any) -> Any:
    return _resized(x, dim, local_length(x.shape[dim], group))


def _fake_collective_permute(x: Any, senders: Any, group: Any) -> Any:
    return x.new_empty(x.shape)


KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "all_gather": (_waited("all_gather"), _fake_all_gather),
    "reduce_scatter": (_waited("reduce_scatter"), _fake_reduce_scatter),
    "all_reduce": (_waited("all_reduce"), _fake_all_reduce),
    "all_to_all": (_waited("all_to_all"), _fake_all_to_all),
    "shard": (shard, _fake_shard),
    "collective_permute": (_waited("collective_permute"), _fake_collective_permute),
}
"""Name -> (kernel, fake kernel) of each operator."""


def hold(x: torch.Tensor, others: list[torch.Tensor], what: str) -> torch.Tensor:
    """A copy of `x` that depends on `others` in the graph, as if it were the value described by `what`.

    A rank with an empty shard does not need `others`. It would remove the collectives that make them, and leave the
    ranks that do need them waiting. Without `what`, `x` would be merged with any other `x` of its shape.
    """
    return x.clone()


def fit(x: torch.Tensor, dim: int, length: Any) -> torch.Tensor:
    """`x` narrowed, or padded with zeros, to `length` along `dim`: for lengths that are not known in a graph."""
    missing = length - x.shape[dim]
    if missing <= 0:
        return x.narrow(dim, 0, length).clone(memory_format=torch.contiguous_format)
    return _with_zeros(x, dim, missing).contiguous()  # padding preserves channels_last


library.define("fit(Tensor x, int dim, SymInt length) -> Tensor", tags=ANY_ORDER)
library.impl("fit", fit, "CompositeExplicitAutograd")
torch.library.register_fake("dtensor::fit", lambda x, dim, length: _resized(x, dim, length), lib=library)
library.impl("hold", hold, "CompositeExplicitAutograd")
torch.library.register_fake("dtensor::hold", hold, lib=library)

for _name, (_kernel, _fake) in KERNELS.items():
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dtensor::{_name}", _fake, lib=library)

COMMUNICATING = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute")
"""The operators that send bytes."""

LOWERED = COMMUNICATING
"""The operators whose kernel is the same on every rank, so that graphs can hold it. The other looks up its rank."""

KEPT = "dtensor_kept"
"""Key of the annotation (`torch.fx.traceback.annotate`) of gathers whose results are always saved for the backward."""

__all__ = [
    "COMMUNICATING",
    "KEPT",
    "KERNELS",
    "LOWERED",
    "emit",
    "ops",
    "start",
]
