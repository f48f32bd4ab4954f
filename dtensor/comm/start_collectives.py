"""The operators that start a collective: torch's functional collectives, or over gloo our own sends and receives.

`_c10d_functional.wait_tensor` waits for the result of either. The operators for gloo are:

    all_gather_start(x, size, group)                         like all_gather_into_tensor
    all_to_all_start(x, output_splits, input_splits, group)  like all_to_all_single
    all_reduce_start(x, reduce_op, group)                    like all_reduce

One is for all backends, as torch has none of its kind. It looks up its rank when it runs:

    collective_permute_start(x, senders, group)              rank r receives the `x` of rank `senders[r]`, several
                                                             ranks perhaps that of one

Gloo's all_gather, as the functional collective of torch 2.13 calls it, corrupts the heap while several are in flight.
Its all_to_all signals a peer that it is ready to receive on the connection on which it also sends. The signal queues
behind earlier data and the peer waits for it, so transfers that should go both ways at once take turns as soon as
messages are longer than a socket buffer. Here, each rank first posts all its receives and then sends.

The tag of a message contains its length, the mark of the graph that the rank ran last on the group, how many failures
the rank has raised, and in eager code the number and the operator of the collective, so messages of different graphs or
collectives never match: their ranks wait, and `dtensor.job.job` detects that. Gloo's own collectives have no such
tags. So the first all_reduce of a graph is ours, if nothing on its group comes before it: two ranks exchange what they
add up, more of them exchange parts, and each then gives its sum to all, once the program waits for it. A graph that
begins with another of gloo's collectives calls `meet` first, and so does the first one after a failure.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from ..job.collective_order import eager
from ..job.groups import calls_of, calls_on
from ..mesh.operator_library import library
from ..torch_private.core import (
    OpOverload,
    backend_of,
    below_autograd,
    c10d,
    register_work,
    resolve_process_group,
)

ANY_ORDER = (torch.Tag.flexible_layout,)
"""The kernels accept operands with any strides, so a compiler does not have to compare symbolic strides."""

library.define("all_gather_start(Tensor x, int size, str group) -> Tensor", tags=ANY_ORDER)
library.define(
    "all_to_all_start(Tensor x, SymInt[] output_splits, SymInt[] input_splits, str group) -> Tensor", tags=ANY_ORDER
)
library.define("all_reduce_start(Tensor x, str reduce_op, str group) -> Tensor", tags=ANY_ORDER)
library.define("collective_permute_start(Tensor x, int[] senders, str group) -> Tensor", tags=ANY_ORDER)

OURS = 0x40000000
"""The bit that marks our tags; those of a program's own messages are unlikely to have it. Tags have 31 bits."""


FAILURE = 0xC2B2AE35
"""What the number of failures that a rank has raised is multiplied by in the tags of its messages."""

SPREAD = 0x9E3779B1
"""What a message's length in bytes is multiplied by in its tag: lengths that differ by little give tags far apart."""


REDUCING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
"""Reduction -> what makes one tensor of two."""


class Starts(NamedTuple):
    """The operators that start collectives, on contiguous tensors.

    Attributes:
        all_gather: Gathers along dim 0.
        all_to_all: Sends `input_splits[r]` rows to each rank r.
        reduce_scatter: None if ranks exchange the chunks with `all_to_all` and reduce them locally.
    """

    all_gather: OpOverload
    all_to_all: OpOverload
    reduce_scatter: OpOverload | None


def starts(group: str, device: torch.device) -> Starts:
    """The operators that start collectives on tensors of `device` in the group."""
    if device.type == "cpu" and calls_of(group).over_gloo:
        return OVER_GLOO
    backend = backend_of(resolve_process_group(group), device.type)
    if backend.endswith("gloo"):
        return OVER_GLOO
    return EXCHANGED if backend == "threaded" else FUNCTIONAL


def by_the_host(start: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Extend `start`, which sends CPU tensors, to other devices, by a copy on the CPU; it then waits for the result.

    Gloo has no messages for GPU tensors, and its all_gather and all_to_all of them end the process (torch 2.13).
    """

    @functools.wraps(start)
    def started(x: torch.Tensor, *args: Any) -> torch.Tensor:
        if x.device.type == "cpu":
            return start(x, *args)
        return c10d.wait_tensor(start(x.cpu(), *args)).to(x.device)

    return started


@by_the_host
def _all_gather_start(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    with below_autograd():
        y = x.new_empty((size * x.shape[0], *x.shape[1:]))
        rows = y.view(size, *x.shape).unbind()
        mine = rows[resolve_process_group(group).rank()].copy_(x)
        return _started(y, rows, [mine] * size, group)


@by_the_host
def _all_to_all_start(x: torch.Tensor, output_splits: list[int], input_splits: list[int], group: str) -> torch.Tensor:
    with below_autograd():
        rank = resolve_process_group(group).rank()
        y = x.new_empty((sum(output_splits), *x.shape[1:]))
        into, sent = y.split(output_splits), x.contiguous().split(input_splits)  # strides can differ from the trace's
        into[rank].copy_(sent[rank])
        return _started(y, into, sent, group)


def _started(y: torch.Tensor, into: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """Start to send `sent[r]` to each rank r and to receive from it into `into[r]`. `y` is complete after a wait."""
    calls = calls_of(name)  # as `_mark`, without its frame
    mark = calls.mark + calls.eager.count * 0x85EBCA6B + eager.failures * FAILURE + eager.mark
    for work in _exchange(into, sent, name, mark):
        register_work(y, work)
    return y


def _mark(name: str) -> int:
    """What the messages that are sent now on the group have in their tags, beside their lengths."""
    calls = calls_of(name)
    return calls.mark + calls.eager.count * 0x85EBCA6B + eager.failures * FAILURE + eager.mark


def _exchange(into: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], name: str, mark: int) -> list[Any]:
    """Post the receives and then the sends, and return what is to be waited for."""
    group, works = resolve_process_group(name), list[Any]()
    n, rank = group.size(), group.rank()
    for begin, parts, step in ((group.recv, into, -1), (group.send, sent, 1)):
        for k in range(1, n):
            other = (rank + step * k) % n
            part = parts[other]
            if length := part.nbytes:
                works.append(begin([part], other, OURS | ((mark + length * SPREAD) & (OURS - 1))))
    return works


SECOND = 0x27D4EB2F
"""What the mark of messages that carry sums has more than that of those that carry what is added up."""


class _Reduction(torch.distributed.Work):
    """An all_reduce of `y` in place, whose second half, if there is one, runs when it is waited for.

    Of two ranks each sends all that it has: as many bytes as in two halves, in one step.
    """

    ongoing: ClassVar[set["_Reduction"]] = set()
    """C++ knows a work without its Python part."""

    def __init__(self, y: torch.Tensor, reduce_op: str, name: str) -> None:
        super().__init__()
        group, y = resolve_process_group(name), y.view(-1)
        n, rank = group.size(), group.rank()
        parts = 1 if n == 2 else n
        length, size = -(-y.shape[0] // parts), y.shape[0]
        self.parts = [y[min(r * length, size) : min(r * length + length, size)] for r in range(parts)]
        self.mine, self.op, self.name, self.mark = self.parts[rank % parts], REDUCING[reduce_op], name, _mark(name)
        self.got = [self.mine if r == rank else torch.empty_like(self.mine) for r in range(n)]
        self.works = _exchange(self.got, self.parts * (n // parts), name, self.mark)
        self.ongoing.add(self)

    def wait(self, timeout: Any = None) -> bool:
        try:
            self._arrive()
            self.mine.copy_(functools.reduce(self.op, self.got))
            if len(self.parts) > 1:
                sent = [self.mine] * len(self.parts)
                self.works = _exchange(self.parts, sent, self.name, self.mark + SECOND)
                self._arrive()
        finally:
            self.ongoing.discard(self)
        return True

    def _arrive(self) -> None:
        for work in self.works:
            work.wait()


@by_the_host
def _all_reduce_start(x: torch.Tensor, reduce_op: str, group: str) -> torch.Tensor:
    with below_autograd():
        y = x.clone(memory_format=torch.contiguous_format)
        register_work(y, _Reduction(y, reduce_op, group))
        return y


def _collective_permute_start(x: torch.Tensor, senders: list[int], group: str) -> torch.Tensor:
    with below_autograd():
        rank = resolve_process_group(group).rank()
        taken = [int(r == senders[rank]) for r in range(len(senders))]
        given = [int(sender == rank) for sender in senders]
        alone = rank not in senders
        if alone:  # c10d refuses to send nothing, so it keeps its own, too
            taken[rank] = given[rank] = 1
        sent = x.contiguous().view(1, -1).expand(sum(given), -1)
        received = starts(group, x.device).all_to_all(sent.contiguous(), taken, given, group)
        return received[int(alone and senders[rank] > rank)].view(x.shape)


def meet(group: torch.distributed.ProcessGroup) -> None:
    """Wait until the neighbouring ranks of the group run the same graph, after as many failures: each sends a message
    tagged with its mark."""
    calls = calls_on(group)
    n, rank, tag = group.size(), group.rank(), OURS | ((calls.mark + eager.failures * FAILURE) & (OURS - 1))
    sent, got = torch.empty(1, dtype=torch.uint8), torch.empty(1, dtype=torch.uint8)
    works = [group.recv([got], (rank - 1) % n, tag), group.send([sent], (rank + 1) % n, tag)]
    for work in works:
        work.wait()


def _fake_all_gather(x: Any, size: Any, group: Any) -> Any:
    return x.new_empty((size * x.shape[0], *x.shape[1:]))


def _fake_all_to_all(x: Any, output_splits: Any, input_splits: Any, group: Any) -> Any:
    return x.new_empty((sum(output_splits), *x.shape[1:]))


def _fake_all_reduce(x: Any, reduce_op: Any, group: Any) -> Any:
    return x.new_empty(x.shape)


for _name, _kernel, _fake in (
    ("all_gather_start", _all_gather_start, _fake_all_gather),
    ("all_to_all_start", _all_to_all_start, _fake_all_to_all),
    ("all_reduce_start", _all_reduce_start, _fake_all_reduce),
    ("collective_permute_start", _collective_permute_start, _fake_all_reduce),
):
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dtensor::{_name}", _fake, lib=library)

FUNCTIONAL = Starts(
    c10d.all_gather_into_tensor.default, c10d.all_to_all_single.default, c10d.reduce_scatter_tensor.default
)
"""Torch's functional collectives."""
EXCHANGED = FUNCTIONAL._replace(reduce_scatter=None)
"""Torch's functional collectives for backend "threaded", whose reduce_scatter only supports sums."""
OVER_GLOO = Starts(torch.ops.dtensor.all_gather_start.default, torch.ops.dtensor.all_to_all_start.default, None)
"""Our operators. Gloo's reduce_scatter is left out: it reduces the full tensor on every rank, with twice the bytes."""

permute: Any = torch.ops.dtensor.collective_permute_start.default

__all__ = ["ANY_ORDER", "EXCHANGED", "FUNCTIONAL", "OVER_GLOO", "REDUCING", "Starts", "meet", "permute", "starts"]
