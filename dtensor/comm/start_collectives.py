"""What starts a collective, and is waited for with `_c10d_functional.wait_tensor`: torch's functional collectives, or
over gloo sends and receives of our own.

    all_gather_start(x, size, group)                         as all_gather_into_tensor
    all_to_all_start(x, output_splits, input_splits, group)  as all_to_all_single

Gloo's all_gather, as the functional collective of torch 2.13 calls it, damages the heap while several are under way.
Its all_to_all tells a peer that it is ready to receive by the connection on which it sends: the word stands behind what
was sent before, the peer waits for it, and what should go both ways at once goes one way after the other, as soon as
messages are longer than what a socket holds. Here each rank says first that it is ready for all that will come, and
then sends.

The tag of a message holds its length and the mark of the graph that the rank ran last on the group, so that messages of
different graphs are never taken for each other: their ranks wait, and `job` sees that. Gloo's own collectives have no
such tags; a graph that begins with one `meet`s first.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..mesh.groups import calls_on
from ..mesh.operator_library import library
from ..torch_private.core import OpOverload, backend_of, c10d, register_work, resolve_process_group

ANY_ORDER = (torch.Tag.flexible_layout,)
"""The kernels take operands in any order in memory, so that a compiler need not ask in symbols which one it is."""

library.define("all_gather_start(Tensor x, int size, str group) -> Tensor", tags=ANY_ORDER)
library.define(
    "all_to_all_start(Tensor x, SymInt[] output_splits, SymInt[] input_splits, str group) -> Tensor", tags=ANY_ORDER
)

OURS = 0x40000000
"""The bit of our tags that those of a program's own messages will hardly have; tags have 31."""


def _tag(mark: int, length: int) -> int:
    return OURS | ((mark + length * 0x9E3779B1) & (OURS - 1))


class Starts(NamedTuple):
    """The operators that start collectives, on what is contiguous.

    `all_to_all` sends `input_splits[r]` rows to each rank r. Without a `reduce_scatter` ranks exchange the parts.
    """

    all_gather: OpOverload
    all_to_all: OpOverload
    reduce_scatter: OpOverload | None


def starts(group: str, device: torch.device) -> Starts:
    """What starts a collective on tensors of the device in the group."""
    backend = backend_of(resolve_process_group(group), device.type)
    if backend.endswith("gloo"):
        return OVER_GLOO
    return EXCHANGED if backend == "threaded" else FUNCTIONAL


def by_the_host(start: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`start`, which sends CPU tensors; others go by way of one, and are there when it returns. Gloo has no messages of
    a GPU's tensors, and its all_gather and all_to_all of them end the process (torch 2.13)."""

    @functools.wraps(start)
    def started(x: torch.Tensor, *args: Any) -> torch.Tensor:
        if x.device.type == "cpu":
            return start(x, *args)
        return c10d.wait_tensor(start(x.cpu(), *args)).to(x.device)

    return started


@by_the_host
@torch.no_grad()
def _all_gather_start(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    y = x.new_empty((size * x.shape[0], *x.shape[1:]))
    rows = y.view(size, *x.shape).unbind()
    mine = rows[resolve_process_group(group).rank()].copy_(x)
    return _started(y, rows, [mine] * size, group)


@by_the_host
@torch.no_grad()
def _all_to_all_start(x: torch.Tensor, output_splits: list[int], input_splits: list[int], group: str) -> torch.Tensor:
    rank = resolve_process_group(group).rank()
    y = x.new_empty((sum(output_splits), *x.shape[1:]))
    into, sent = y.split(output_splits), x.contiguous().split(input_splits)  # a trace may have had other strides
    into[rank].copy_(sent[rank])
    return _started(y, into, sent, group)


def _started(y: torch.Tensor, into: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """`y`, which is there after a wait: `sent[r]` goes to each rank r, what it sends goes to `into[r]`."""
    group = resolve_process_group(name)
    n, rank, mark = group.size(), group.rank(), calls_on(group).mark
    works = [
        group.recv([into[r]], r, _tag(mark, into[r].nbytes)) for k in range(1, n) if into[r := (rank - k) % n].numel()
    ]
    works += [
        group.send([sent[r]], r, _tag(mark, sent[r].nbytes)) for k in range(1, n) if sent[r := (rank + k) % n].numel()
    ]
    for work in works:
        register_work(y, work)
    return y


def meet(group: torch.distributed.ProcessGroup) -> None:
    """Wait until the next ranks of the group, on either side, run the same graph: each tells the next one its mark."""
    n, rank, tag = group.size(), group.rank(), _tag(calls_on(group).mark, 0)
    sent, got = torch.empty(1, dtype=torch.uint8), torch.empty(1, dtype=torch.uint8)
    works = [group.recv([got], (rank - 1) % n, tag), group.send([sent], (rank + 1) % n, tag)]
    for work in works:
        work.wait()


def _fake_all_gather(x: Any, size: Any, group: Any) -> Any:
    return x.new_empty((size * x.shape[0], *x.shape[1:]))


def _fake_all_to_all(x: Any, output_splits: Any, input_splits: Any, group: Any) -> Any:
    return x.new_empty((sum(output_splits), *x.shape[1:]))


for _name, _kernel, _fake in (
    ("all_gather_start", _all_gather_start, _fake_all_gather),
    ("all_to_all_start", _all_to_all_start, _fake_all_to_all),
):
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dtensor::{_name}", _fake, lib=library)

FUNCTIONAL = Starts(
    c10d.all_gather_into_tensor.default, c10d.all_to_all_single.default, c10d.reduce_scatter_tensor.default
)
"""torch's."""
EXCHANGED = FUNCTIONAL._replace(reduce_scatter=None)
"""torch's where it has a reduce_scatter that only adds: among threads."""
OVER_GLOO = Starts(torch.ops.dtensor.all_gather_start.default, torch.ops.dtensor.all_to_all_start.default, None)
"""Ours. Gloo's reduce_scatter is left out: it reduces the whole tensor on every rank, and so sends twice the bytes."""

__all__ = ["ANY_ORDER", "EXCHANGED", "FUNCTIONAL", "OVER_GLOO", "Starts", "meet", "starts"]
