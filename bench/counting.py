"""A process group that counts what is sent, and can suppress the sending.

It takes the place of gloo or NCCL, below all code that communicates: DTensors of either library, compiled or not,
FSDP2, DDP, hand-written collectives. So it sees exactly what is sent. With `counting_ranks`, this process is one rank
of many of which the others do not exist, and results are this rank's own data. With `over_gloo`, calls are forwarded to
gloo. Inside `silent()` they are not, so that one times the computation alone; `Counts.replayed` sends again what was
counted and nothing else, so that one times the communication alone.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # pyright: ignore[reportAttributeAccessIssue]
from torch._dynamo import trace_rules
from torch.futures import Future

from dtensor.prices.links import wire_bytes
from dtensor.torch_private.core import fake_store

BACKEND, OVER_GLOO = "counting", "counting-gloo"
GLOO = dist.ProcessGroup.BackendType.GLOO

SEND, RECEIVE = "send", "receive"
TOGETHER = {(RECEIVE, RECEIVE), (RECEIVE, SEND), (SEND, SEND)}
"""(previous operation, next operation): pairs of which the next may start before the previous has ended."""

BYTES: dict[str, Callable[[int, int], float]] = {
    "broadcast": lambda size, ranks: size,
    SEND: lambda size, ranks: size,
    RECEIVE: lambda size, ranks: 0,
}
"""Operations without a cost in `dtensor.prices.links` -> bytes that a rank sends, by size and number of ranks."""


@dataclass
class Counts:
    """Counts of what this rank sends.

    Attributes:
        collectives: number of collectives and messages by name.
        bytes: bytes that this rank sends; for collectives, in a ring algorithm (see `dtensor.prices.links`).
        again: (name, function that starts it again) of each, in order.
    """

    collectives: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    again: list[tuple[str, Callable[[], Any]]] = field(default_factory=list)

    def __str__(self) -> str:
        return ", ".join(f"{n} {op}" for op, n in sorted(self.collectives.items())) or "none"

    @property
    def calls(self) -> int:
        return self.collectives.total()

    def replayed(self) -> None:
        """Send everything again, one after the other; a run of receives and sends is one exchange."""
        last, ongoing = "", list[Any]()
        for op, begin in self.again:
            if (last, op) not in TOGETHER:
                _finish(ongoing)
            ongoing.append(begin())
            last = op
        _finish(ongoing)


def _finish(ongoing: list[Any]) -> None:
    while ongoing:
        ongoing.pop(0).wait()


@dataclass
class _State:
    counts: list[Counts] = field(default_factory=list)
    silent: bool = False


_state = _State()


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Context manager that counts what is sent."""
    counts = Counts()
    _state.counts.append(counts)
    try:
        yield counts
    finally:
        _state.counts.remove(counts)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Context manager in which nothing is sent: collectives return at once, with this rank's own data."""
    _state.silent = True
    try:
        yield
    finally:
        _state.silent = False


def _nbytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_nbytes, tensors))


def _done(result: Any) -> Any:
    future: Future = Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1)


def _own(output: torch.Tensor, given: torch.Tensor) -> None:
    """Copy `given` to `output`, or as much as fits; what is longer is filled with copies of it."""
    flat = _flat(given)
    for piece in _flat(output).split(flat.shape[0]) if flat.shape[0] else ():
        piece.copy_(flat[: piece.shape[0]])


class CountingGroup(dist.ProcessGroup):
    """The process group that counts; it has the methods that torch calls. `inner` is gloo's group, or None."""

    def __init__(self, rank: int, size: int, inner: Any = None):
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._size, self._inner = size, inner

    def _run(self, op: str, size: int, name: str, given: tuple, local: Callable[[], Any]) -> Any:
        """Count a collective of `size` bytes, and run it: method `name` of the inner group, or `local` instead."""
        if self._size > 1 and not _state.silent:
            for counts in _state.counts:
                if op != RECEIVE:
                    counts.collectives[op] += 1
                sent = BYTES.get(op, partial(wire_bytes, op))
                counts.bytes += round(sent(size, self._size))
                if self._inner is not None:
                    counts.again.append((op, self._resend(name, given)))
        if self._inner is None or _state.silent:
            return _done(local())
        return getattr(self._inner, name)(*given)

    def _resend(self, name: str, given: tuple) -> Callable[[], Any]:
        fresh = [_copied(x) for x in given]
        return lambda: getattr(self._inner, name)(*fresh)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._run("all_reduce", _nbytes(tensors), "allreduce", _given(tensors, opts), lambda: tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        given = _given(tensors, opts)
        return self._run("all_reduce", _nbytes(tensors), "allreduce_coalesced", given, lambda: tensors)

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> Any:
        def local() -> Any:
            _own(output, given)
            return [output]

        return self._run("all_gather", _nbytes(output), "all_gather_single", _given(output, given, opts), local)

    def all_gather_single_coalesced(self, outputs: Any, given: Any, opts: Any = None) -> Any:
        def local() -> Any:
            for out, x in zip(outputs, given):
                _own(out, x)
            return outputs

        return self._run(
            "all_gather", _nbytes(outputs), "all_gather_single_coalesced", _given(outputs, given, opts), local
        )

    def allgather(self, outputs: Any, given: Any, opts: Any = None) -> Any:
        def local() -> Any:
            for row, x in zip(outputs, given):
                for out in row:
                    out.copy_(x)
            return outputs

        return self._run("all_gather", _nbytes(outputs), "allgather", _given(outputs, given, opts), local)

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None) -> Any:
        def local() -> Any:
            _own(output, given)
            return [output]

        return self._run("reduce_scatter", _nbytes(given), "reduce_scatter_single", _given(output, given, opts), local)

    def reduce_scatter_single_coalesced(self, outputs: Any, given: Any, opts: Any = None) -> Any:
        def local() -> Any:
            for out, x in zip(outputs, given):
                _own(out, x)
            return outputs

        return self._run(
            "reduce_scatter", _nbytes(given), "reduce_scatter_single_coalesced", _given(outputs, given, opts), local
        )

    def all_to_all_single(self, output: Any, given: Any, out_sizes: Any, in_sizes: Any, opts: Any = None) -> Any:
        def local() -> Any:
            _own(output, given)
            return [output]

        asked = _given(output, given, out_sizes, in_sizes, opts)
        return self._run("all_to_all", _nbytes(given), "all_to_all_single", asked, local)

    def send(self, tensors: Any, rank: int, tag: int) -> Any:
        return self._run(SEND, _nbytes(tensors), "send", (tensors, rank, tag), lambda: tensors)

    def recv(self, tensors: Any, rank: int, tag: int) -> Any:
        def local() -> Any:
            for x in tensors:
                x.zero_()
            return tensors

        return self._run(RECEIVE, _nbytes(tensors), "recv", (tensors, rank, tag), local)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self._run("broadcast", _nbytes(tensors), "broadcast", _given(tensors, opts), lambda: tensors)

    def barrier(self, opts: Any = None) -> Any:
        return self._inner.barrier(*_given(opts)) if self._inner is not None else _done([])

    def scatter(self, outputs: Any, given: Any, opts: Any = None) -> Any:
        if self._inner is not None:
            return self._inner.scatter(*_given(outputs, given, opts))
        if given:
            outputs[0].copy_(given[0][0])
        return _done(outputs)

    def size(self) -> int:
        return self._size

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name

    def getBackendName(self) -> str:
        return BACKEND


def _given(*arguments: Any) -> tuple:
    return tuple([a for a in arguments if a is not None])


def _copied(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    return [_copied(y) for y in x] if isinstance(x, (list, tuple)) else x


def _alone(store: Any, rank: int, size: int, timeout: Any) -> CountingGroup:
    return CountingGroup(rank, size)


def _on_gloo(store: Any, rank: int, size: int, timeout: Any) -> CountingGroup:
    backend = dist.ProcessGroupGloo(store, rank, size, timeout)
    inner = dist.ProcessGroup(store, rank, size)
    inner._set_default_backend(GLOO)
    made = CountingGroup(rank, size, inner)
    for group in (inner, made):  # torch reads only the options of the outer one
        group._register_backend(torch.device("cpu"), GLOO, backend)
    return made


def register() -> None:
    """Register the backends with torch."""
    trace_rules.add(__name__)  # C++ calls the methods while DDP's forward is traced; they are not part of the model
    for name, create in ((BACKEND, _alone), (OVER_GLOO, _on_gloo)):
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, create, devices=["cpu", "cuda"])


@contextlib.contextmanager
def counting_ranks(world_size: int) -> Iterator[None]:
    """Context manager with a default process group of `world_size` ranks, of which only the first, this one, exists."""
    register()
    dist.init_process_group(BACKEND, rank=0, world_size=world_size, store=fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()


def over_gloo(rank: int, world_size: int, init_method: str, timeout: float) -> None:
    """Join a default process group that counts, and sends over gloo."""
    register()
    limit = timedelta(seconds=timeout)
    dist.init_process_group(OVER_GLOO, init_method=init_method, rank=rank, world_size=world_size, timeout=limit)


__all__ = ["Counts", "counted", "counting_ranks", "over_gloo", "silent"]
