"""experts: time of a layer of experts that ranks have dealt out, against a dispatch by hand and experts gathered.

Forward and backward, tokens cut over the ranks that hold the experts, on loopback and on slow links. "dtensor" is
`dtensor.parallel.experts` in a compiled model of `distribute_model`. By hand each token is sent to the ranks of its
experts by an all-to-all whose sizes are read to the host, and back; that does not compile as one graph, so it runs
eagerly. Where experts are gathered, each rank has all of them for its own tokens, compiled. One device is each rank by
itself with all tokens. Results are compared with it before anything is timed.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from dtensor import DTensor, Replicate, Shard, distribute_model, distribute_tensor, init_device_mesh
from dtensor.parallel import expert_gate, experts

from ..effort import Effort
from ..links import LOOPBACK, RATES, each, on_links
from ..namespaces import End
from ..record import OURS, Record, Setting
from ..timing import compared, interleaved

HAND, GATHERED, ONE = "dispatch by hand", "experts gathered", "one device"
SLOW = tuple([link for link in RATES if link != "100mbit"])


@dataclass(frozen=True)
class Job:
    """A layer of `count` experts between rows of `width` and `inner` numbers, of which a token has `chosen`."""

    tokens: int
    width: int
    inner: int
    count: int
    chosen: int
    routing: str = "even"
    ranks: int = 2

    @property
    def words(self) -> str:
        """What a reader sees of it."""
        sizes = f"{self.tokens} tokens of {self.width}, {self.count} experts of {self.inner}, {self.chosen} each"
        return f"{sizes}, {self.routing}"


AMOUNTS: dict[str, tuple[tuple[Job, ...], int, tuple[str, ...]]] = {
    "tiny": ((Job(16, 8, 8, 4, 2),), 2, (LOOPBACK,)),
    "quick": (
        tuple([Job(1024, 256, 384, 8, 2, routing) for routing in ("even", "skewed")]),
        5,
        (LOOPBACK, *SLOW),
    ),
    "full": (
        tuple([Job(1024, 256, 384, 8, k, r, n) for k in (2, 4) for r in ("even", "skewed") for n in (2, 4)]),
        15,
        (LOOPBACK, *SLOW),
    ),
}
"""Jobs, rounds, and links."""


def gated(h: torch.Tensor) -> torch.Tensor:
    """What stands between both products."""
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def routed(job: Job) -> torch.Tensor:
    """For each token its experts. Skewed: half of the tokens have the first one."""
    scores = torch.rand(job.tokens, job.count, generator=torch.Generator().manual_seed(1))
    if job.routing == "skewed":
        scores[::2, 0] += 1
    return scores.topk(job.chosen).indices


class Layer(nn.Module):
    """A layer of experts as one operator; `whole`: of experts that are gathered before."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor, whole: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.whole = nn.Parameter(up.clone()), nn.Parameter(down.clone()), whole
        self.gate = expert_gate(gated, up)

    def forward(self, x: Any, index: Any, weight: Any) -> Any:
        """The layer; results are cut as tokens are."""
        up: Any = self.up
        down: Any = self.down
        if self.whole:
            up, down = (p.redistribute(placements=[Replicate()]) for p in (up, down))
        out: Any = experts(x, index, weight, up, down, gate=self.gate)
        return out.redistribute(placements=[Shard(0)]) if isinstance(out, DTensor) else out


class Exchange(torch.autograd.Function):
    """Rows sent to the ranks, so many to each; the gradient goes back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.sizes = sent, received
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        sent, received = ctx.sizes
        return Exchange.apply(grad, received, sent), None, None


def dispatched(x: Any, index: Any, weight: Any, up: Any, down: Any, count: int) -> torch.Tensor:
    """Each token's row sent to the ranks of its experts, and what these make of it sent back."""
    own, ranks, chosen = up.shape[0], dist.get_world_size(), index.shape[1]
    order = index.reshape(-1).argsort(stable=True)
    counts = torch.bincount(index.reshape(-1), minlength=count)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    sent, received = (c.view(ranks, own).sum(1).tolist() for c in (counts, arriving))
    rows: Any = Exchange.apply(x[order // chosen], sent, received)
    of_expert = torch.arange(own).repeat(ranks).repeat_interleave(arriving)
    by_expert = of_expert.argsort(stable=True)
    parts = rows[by_expert].split(arriving.view(ranks, own).sum(0).tolist())
    made = torch.cat([gated(part @ up[e]) @ down[e] for e, part in enumerate(parts)])
    back: Any = Exchange.apply(made[by_expert.argsort()], received, sent)
    return (back[order.argsort()].view(*index.shape, -1) * weight.unsqueeze(-1)).sum(1)


def on_rank(rank: int, job: Job, rounds: int, links: tuple[str, ...], end: End | None) -> dict[str, Any]:
    """Time each side on each link: link -> side -> seconds in each round."""
    mesh, generator = init_device_mesh("cpu", (job.ranks,), mesh_dim_names=("ep",)), torch.Generator().manual_seed(0)
    shapes = [(job.tokens, job.width), (job.tokens, job.chosen), (job.tokens, job.width)]
    x, weight, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    up, down = (
        torch.randn(job.count, n, m, generator=generator) / n**0.5
        for n, m in ((job.width, 2 * job.inner), (job.inner, job.width))
    )
    index, over = routed(job), {"up": {"ep": Shard(0)}, "down": {"ep": Shard(0)}}
    runs: dict[str, Callable[[], torch.Tensor]] = {}
    plain = Layer(up, down)
    runs[ONE] = step(plain, (x, index, weight), grad, plain.parameters())
    cut = [distribute_tensor(t, mesh, [Shard(0)]) for t in (x, index, weight, grad)]
    for name, whole in ((OURS, False), (GATHERED, True)):
        model = distribute_model(Layer(up, down, whole), mesh, over, check_inputs=False)
        run = torch.compile(model, backend="dtensor", options={} if name == OURS else {"decide": False}, fullgraph=True)
        runs[name] = step(run, tuple(cut[:3]), cut[3], model.parameters())
    mine = [t.chunk(job.ranks)[rank].contiguous() for t in (x, index, weight, grad)]
    held = [nn.Parameter(t.chunk(job.ranks)[rank].clone()) for t in (up, down)]
    by_hand = functools.partial(dispatched, up=held[0], down=held[1], count=job.count)
    runs[HAND] = step(by_hand, tuple(mine[:3]), mine[3], held)
    for name, run in runs.items():
        check(name, run(), runs[ONE](), job, rank)
    times: dict[str, dict[str, list[float]]] = {}
    for link in each(links, end):
        times[link] = interleaved(runs, rounds, before=dist.barrier, warm=1)
    return times


def check(name: str, found: torch.Tensor, expected: torch.Tensor, job: Job, rank: int) -> None:
    """Raise AssertionError unless the tokens' gradients are those of one device."""
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    wanted = expected if whole.shape == expected.shape else expected.chunk(job.ranks)[rank]
    torch.testing.assert_close(whole, wanted, rtol=1e-3, atol=1e-4, msg=f"{name}: {{}}".format)


def step(layer: Callable[..., Any], given: tuple[Any, ...], grad: Any, parameters: Any) -> Callable[[], torch.Tensor]:
    """A forward and a backward; returns the gradient of the tokens."""
    x, index, weight = given
    x = x.detach().requires_grad_()
    held = [x, *parameters]

    def run() -> torch.Tensor:
        for p in held:
            p.grad = None
        layer(x, index, weight).backward(grad)
        assert x.grad is not None
        return x.grad

    return run


def run(effort: Effort) -> Iterator[Record]:
    """Yield records of each job and link."""
    jobs, rounds, links = effort.of(AMOUNTS)
    for job in effort.progress(jobs, "experts"):
        for at, found, without in on_links(links, on_rank, job.ranks, job, rounds):
            if without:
                yield Setting("experts", job.words, "", job.ranks, at[0]).missing("step", without)
            else:
                yield from _records(job, found)


def _records(job: Job, found: dict[str, Any]) -> Iterator[Record]:
    for link, times in found.items():
        at = Setting("experts", job.words, "", job.ranks, link)
        for peer in (HAND, GATHERED, ONE):
            yield at.timed("step", "ms", compared(times[OURS], times[peer], 1e3), peer)


__all__ = ["run"]
