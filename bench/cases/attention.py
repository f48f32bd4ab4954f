"""attention: time of attention over a sequence that ranks have cut, by each way and by torch's context_parallel.

Forward and backward of `scaled_dot_product_attention`, compiled, on loopback and on slow links. The ways are those of
`dtensor.rules.families.attention`: an exchange to heads and back, keys and values gathered, and the ring, each of which
operators are made to take here. "dtensor" is what the compiler decides by itself, from prices of links that nobody has
measured. One device is each rank by itself with the whole sequence. torch's `context_parallel` runs eagerly, with its
balance of load, on this rank's part.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F

from dtensor import DTensor, Replicate, Shard, distribute_model, distribute_tensor, init_device_mesh

from ..effort import Effort
from ..links import LOOPBACK, RATES, each, on_links
from ..namespaces import End
from ..record import OURS, Record, Setting
from ..sides import reason
from ..timing import compared, interleaved, quartiles

WIDTH = 64
ONE, TORCH = "one device", "torch context_parallel"
HEADS, GATHERED, RING = "heads", "gathered", "ring"


@dataclass(frozen=True)
class Job:
    """Attention of so many heads over `length` tokens, a mask, and the ranks among which the tokens are cut."""

    length: int
    heads: int
    of_keys: int
    mask: str = "causal"
    ranks: int = 2

    @property
    def words(self) -> str:
        """What a reader sees of it."""
        return f"{self.length} tokens, {self.heads} heads, {self.of_keys} of keys, {self.mask}"


AMOUNTS: dict[str, tuple[tuple[Job, ...], int, tuple[str, ...]]] = {
    "tiny": ((Job(64, 2, 2),), 2, (LOOPBACK,)),
    "quick": ((Job(1024, 8, 8), Job(4096, 8, 2), Job(2048, 3, 3, "packed")), 5, (LOOPBACK, *RATES)),
    "full": (
        (
            *[Job(n, h, k) for n in (1024, 4096, 8192) for h, k in ((8, 8), (8, 2), (3, 3))],
            *[Job(n, 8, 2, mask) for n in (1024, 4096) for mask in ("packed", "windowed")],
            Job(65536, 1, 1),
            *[Job(4096, 8, k, ranks=4) for k in (8, 2)],
        ),
        7,
        (LOOPBACK, *RATES),
    ),
}
"""Jobs, rounds, and links."""


@dataclass(frozen=True)
class Found:
    """The results of the first rank: link -> side -> seconds in each round, and side -> why it does not run."""

    times: dict[str, dict[str, list[float]]]
    errors: dict[str, str]


def allowed(job: Job) -> dict[str, Any]:
    """What attention is told of a mask; documents of a batch that is packed have a third and two thirds of it."""
    if job.mask == "causal":
        return {"is_causal": True}
    at = torch.arange(job.length)
    seen, before = at[:, None] >= at, at[:, None] - at
    document = (at >= job.length // 3).long()
    return {"attn_mask": seen & ((document[:, None] == document) if job.mask == "packed" else (before < 512))}


def by_heads(attended: Any, *given: DTensor) -> DTensor:
    """The operands exchanged for heads, and the result back."""
    return attended(*[x.redistribute(placements=[Shard(1)]) for x in given]).redistribute(placements=[Shard(2)])


def gathered(attended: Any, query: DTensor, *others: DTensor) -> DTensor:
    """Keys and values whole."""
    return attended(query, *[x.redistribute(placements=[Replicate()]) for x in others])


def as_it_is(attended: Any, *given: DTensor) -> DTensor:
    """Whatever way is chosen; results and gradients are cut as the queries are."""
    cut = [x.redistribute(placements=[Shard(2)], grad_placements=[Shard(2)]) for x in given]
    return attended(*cut).redistribute(placements=[Shard(2)])


WAYS: dict[str, tuple[Callable[..., Any], bool]] = {
    OURS: (as_it_is, True),
    HEADS: (by_heads, False),
    GATHERED: (gathered, False),
    RING: (as_it_is, False),
}
"""Side -> how it calls attention, and whether layouts are decided."""


def on_rank(rank: int, job: Job, rounds: int, links: tuple[str, ...], end: End | None) -> Found:
    """Time each way, one device, and torch's, on each link."""
    mesh, generator = init_device_mesh("cpu", (job.ranks,)), torch.Generator().manual_seed(0)
    shapes = [(1, n, job.length, WIDTH) for n in (job.heads, job.of_keys, job.of_keys, job.heads)]
    whole = [torch.randn(shape, generator=generator) for shape in shapes]
    options, grouped = allowed(job), job.heads != job.of_keys
    placed = {k: distribute_tensor(m, mesh, [Shard(0)]) if k == "attn_mask" else m for k, m in options.items()}
    cut = [Shard(2)]
    runs: dict[str, Callable[[], Any]] = {}
    errors: dict[str, str] = {}
    choosing: Any = sys.modules["dtensor.rules.choose"]
    price = choosing._price
    ring = lambda rule, c, *rest: -1.0 if len(c.factors) > 1 else price(rule, c, *rest)  # noqa: E731
    for name, (way, decided) in WAYS.items():
        if name == HEADS and job.of_keys % job.ranks:
            continue

        def called(*given: Any, way: Any = way) -> Any:
            return way(lambda *g: F.scaled_dot_product_attention(*g, **placed, enable_gqa=grouped), *given)

        model = distribute_model(Whole(called), mesh, {}) if decided else called
        run = torch.compile(model, backend="dtensor", options={} if decided else {"decide": False}, fullgraph=True)
        parts = [distribute_tensor(x, mesh, cut) for x in whole]
        runs[name] = step(run, parts)
        with mock.patch.object(choosing, "_price", ring if name == RING else price):
            runs[name]()
    runs[ONE] = step(lambda *g: F.scaled_dot_product_attention(*g, **options, enable_gqa=grouped), whole)
    try:
        runs[TORCH] = torchs(job, mesh, [x.chunk(job.ranks, 2)[rank].contiguous() for x in whole], options)
        runs[TORCH]()
    except Exception as error:  # the failure of a peer is a result
        errors[TORCH] = reason(TORCH, error)
        runs.pop(TORCH, None)
    times: dict[str, dict[str, list[float]]] = {}
    for link in each(links, end):
        times[link] = interleaved(runs, rounds, before=dist.barrier, warm=1)
    return Found(times, errors)


class Whole(nn.Module):
    """A model that is a function, for which layouts are decided together."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Any) -> Any:
        """The function."""
        return self.function(*given)


def torchs(job: Job, mesh: Any, parts: list[torch.Tensor], options: dict[str, Any]) -> Callable[[], None]:
    """A step in torch's region, which replaces the function of `functional` by one for parts of the sequence."""
    run = step(lambda *g: F.scaled_dot_product_attention(*g, **options, enable_gqa=job.heads != job.of_keys), parts)

    def inside() -> None:
        with context_parallel(mesh, buffers=[torch.zeros(2 * job.ranks)], buffer_seq_dims=[0]):  # it asks for a buffer
            run()

    return inside


def step(way: Callable[..., Any], given: list[Any]) -> Callable[[], None]:
    """A forward and a backward, of queries, keys, values, and the gradient of the result."""
    *operands, weight = [x.detach().clone().requires_grad_(k < 3) for k, x in enumerate(given)]

    def run() -> None:
        for x in operands:
            x.grad = None
        way(*operands).backward(weight)

    return run


def run(effort: Effort) -> Iterator[Record]:
    """Yield records of each job and link."""
    jobs, rounds, links = effort.of(AMOUNTS)
    for job in effort.progress(jobs, "attention"):
        for at, found, without in on_links(links, on_rank, job.ranks, job, rounds):
            if without:
                yield Setting("attention", job.words, "", job.ranks, at[0]).missing("step", without)
            else:
                yield from _records(job, found)


def _records(job: Job, found: Found) -> Iterator[Record]:
    for link, times in found.times.items():
        at = Setting("attention", job.words, "", job.ranks, link)
        for peer, note in found.errors.items():
            yield at.missing("step", note, peer)
        for peer in times:
            if peer != OURS:
                yield at.timed("step", "ms", compared(times[OURS], times[peer], 1e3), peer)
        ways = {name: quartiles(times[name])[1] for name in WAYS if name in times and name != OURS}
        fastest = min(ways, key=lambda name: ways[name])
        yield at.timed("step, of the fastest way", "ms", compared(times[OURS], times[fastest], 1e3), fastest)


__all__ = ["run"]
