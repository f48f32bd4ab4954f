"""What starts a collective, and is waited for with `_c10d_functional.wait_tensor`: torch's functional collectives, or
over gloo sends and receives of our own.

    all_gather_start(x, size, group)                         as all_gather_into_tensor
    all_to_all_start(x, output_splits, input_splits, group)  as all_to_all_single

Gloo's all_gather, as the functional collective of torch 2.13 calls it, damages the heap while several are under way.
Its all_to_all tells a peer that it is ready to receive by the connection on which it sends: the word stands behind what
was sent before, the peer waits for it, and what should go both ways at once goes one way after the other, as soon as
messages are longer than what a socket holds. Here each rank says first that it is ready for all that will come, and
then sends.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ._torch import OpOverload, c10d, register_work, resolve_process_group

library = torch.library.Library("dtensor", "DEF")
library.define("all_gather_start(Tensor x, int size, str group) -> Tensor")
library.define("all_to_all_start(Tensor x, SymInt[] output_splits, SymInt[] input_splits, str group) -> Tensor")

TAG = 0xD7
"""The tag of our messages, so that they are not taken for those that a program sends itself."""


class Starts(NamedTuple):
    """The operators that start collectives, on what is contiguous.

    `all_to_all` sends `input_splits[r]` rows to each rank r. Without a `reduce_scatter` ranks exchange the parts.
    """

    all_gather: OpOverload
    all_to_all: OpOverload
    reduce_scatter: OpOverload | None


def starts(group: str, device: torch.device) -> Starts:
    """What starts a collective on tensors of the device in the group.

    Its backend is gloo where its name ends so, as may that of one around it ("counting-gloo"). Gloo's messages are CPU
    tensors: of others it has collectives only.
    """
    backends = str(torch.distributed.get_backend_config(resolve_process_group(group))).split(",")
    if not any(b.startswith(f"{device.type}:") and b.endswith("gloo") for b in backends):
        return FUNCTIONAL
    return OVER_GLOO if device.type == "cpu" else FUNCTIONAL._replace(reduce_scatter=None)


@torch.no_grad()
def _all_gather_start(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    y = x.new_empty((size * x.shape[0], *x.shape[1:]))
    rows = y.view(size, *x.shape).unbind()
    mine = rows[resolve_process_group(group).rank()].copy_(x)
    return _started(y, rows, [mine] * size, group)


@torch.no_grad()
def _all_to_all_start(x: torch.Tensor, output_splits: list[int], input_splits: list[int], group: str) -> torch.Tensor:
    rank = resolve_process_group(group).rank()
    y = x.new_empty((sum(output_splits), *x.shape[1:]))
    into, sent = y.split(output_splits), x.split(input_splits)
    into[rank].copy_(sent[rank])
    return _started(y, into, sent, group)


def _started(y: torch.Tensor, into: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """`y`, which is there after a wait: `sent[r]` goes to each rank r, what it sends goes to `into[r]`."""
    group = resolve_process_group(name)
    n, rank = group.size(), group.rank()
    works = [group.recv([into[r]], r, TAG) for k in range(1, n) if into[r := (rank - k) % n].numel()]
    works += [group.send([sent[r]], r, TAG) for k in range(1, n) if sent[r := (rank + k) % n].numel()]
    for work in works:
        register_work(y, work)
    return y


def _fake_all_gather(x, size, group):
    return x.new_empty((size * x.shape[0], *x.shape[1:]))


def _fake_all_to_all(x, output_splits, input_splits, group):
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
OVER_GLOO = Starts(torch.ops.dtensor.all_gather_start.default, torch.ops.dtensor.all_to_all_start.default, None)
"""Ours. Gloo's reduce_scatter is left out: it reduces the whole tensor on every rank, and so sends twice the bytes."""

__all__ = ["FUNCTIONAL", "OVER_GLOO", "Starts", "library", "starts"]
