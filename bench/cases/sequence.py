"""sequence: time of causal attention over a sequence that two ranks have cut, by each way, compared with one device.

Forward and backward, compiled, on loopback. The ways are those of `dtensor.rules.families.attention`: an exchange to
heads and back, keys and values gathered, and the ring, which operators are made to take here, as they choose the way
whose operands cost least to move. One device is each rank by itself with the whole sequence, with what torch runs.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from ..effort import Effort
from ..ranks import on_ranks
from ..record import Record, Setting
from ..timing import compared, interleaved

RANKS, WIDTH = 2, 64
ONE = "one device"
SIZES: dict[str, tuple[tuple[tuple[int, int, int], ...], int]] = {
    "tiny": (((64, 2, 2),), 2),
    "quick": (((2048, 8, 8), (4096, 8, 2)), 7),
    "full": (((2048, 8, 8), (4096, 8, 2), (2048, 3, 3), (8192, 4, 1)), 9),
}
"""(length, heads of queries, heads of keys), and rounds."""


def attended(query: Any, key: Any, value: Any) -> Any:
    """Causal attention, of several heads of queries for one of keys."""
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


def by_heads(query: DTensor, key: DTensor, value: DTensor) -> DTensor:
    """The operands exchanged for heads, and the result back."""
    moved = [x.redistribute(placements=[Shard(1)]) for x in (query, key, value)]
    return attended(*moved).redistribute(placements=[Shard(2)])


def gathered(query: DTensor, key: DTensor, value: DTensor) -> DTensor:
    """Keys and values whole."""
    return attended(query, *[x.redistribute(placements=[Replicate()]) for x in (key, value)])


WAYS: dict[str, Callable[..., Any]] = {"heads": by_heads, "gathered": gathered, "ring": attended}


def on_rank(rank: int, length: int, heads: int, of_keys: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way, and of one device, in each round."""
    mesh, generator = init_device_mesh("cpu", (RANKS,)), torch.Generator().manual_seed(0)
    whole = [torch.randn(1, n, length, WIDTH, generator=generator) for n in (heads, of_keys, of_keys, heads)]
    *alone, weight = [x.clone().requires_grad_(k < 3) for k, x in enumerate(whole)]
    *cut, of_cut = [distribute_tensor(x, mesh, [Shard(2)]).requires_grad_(k < 3) for k, x in enumerate(whole)]
    options = {"decide": False}
    runs = {
        name: step(torch.compile(way, backend="dtensor", options=options, fullgraph=True), cut, of_cut)
        for name, way in WAYS.items()
        if name != "heads" or not of_keys % RANKS
    }
    choosing: Any = sys.modules["dtensor.rules.choose"]
    price = choosing._price
    for name, run in runs.items():
        ring = name == "ring"
        least = lambda rule, c, *rest: -1.0 if len(c.factors) > 1 else price(rule, c, *rest)  # noqa: E731
        with mock.patch.object(choosing, "_price", least if ring else price):
            run()
    return interleaved({**runs, ONE: step(attended, alone, weight)}, rounds, before=dist.barrier, warm=1)


def step(way: Callable[..., Any], given: list[Any], weight: Any) -> Callable[[], None]:
    """A forward and a backward."""

    def run() -> None:
        for x in given:
            x.grad = None
        way(*given).backward(weight)

    return run


def run(effort: Effort) -> Iterator[Record]:
    """Yield a record for each size and way."""
    sizes, rounds = effort.of(SIZES)
    for length, heads, of_keys in effort.progress(sizes, "sequence"):
        times: dict[str, list[float]] = on_ranks(on_rank, RANKS, length, heads, of_keys, rounds)
        one = times.pop(ONE)
        for way, found in times.items():
            at = Setting("sequence", f"{length} tokens, {heads} heads, {of_keys} of keys", way, RANKS)
            yield at.timed("step", "ms", compared(found, one, 1e3), ONE)


__all__ = ["run"]
