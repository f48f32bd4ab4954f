"""wire: collectives and bytes of a training step, by direction, compared with the optimum by hand and with torch.

The counts are exact, and nothing is timed: one process is the first rank of a mesh whose other ranks do not exist, and
counts the calls of its process groups. Directions are forward, backward and optimizer; the last one counts because
gradients that the backward leaves partial are reduced when the optimizer reads them. Bytes are those that a rank sends
in a ring algorithm (`dtensor.prices.links`). Compiled sides run all passes; Inductor's code generation is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dtensor import init_device_mesh
from dtensor.tools.demo_plans import PLANS

from ..counting import Counts, counted, counting_ranks
from ..effort import Effort
from ..models import Model, Sizes, named
from ..plans import NO_COLLECTIVES, RANKS
from ..record import OURS, Record, Setting
from ..sides import Wrap, batch, forget, made, reason
from ..uncoded import UNCODED

DIRECTIONS = ("forward", "backward", "optimizer")
MODELS = {
    "tiny": ("mlp",),
    "quick": ("mlp", "transformer-2", "llama-2"),
    "full": ("mlp", "transformer-2", "transformer-8", "transformer-32", "llama-2", "llama-8"),
}
SIZES = Sizes(dim=64, seq=32, batch=8)
"""The same for all levels: counts do not depend on sizes, except through the choice of buckets."""


@dataclass(frozen=True)
class Step:
    """What one step of a side sends, by direction, or the reason why it does not run."""

    counts: dict[str, Counts]
    error: str = ""

    @property
    def total(self) -> Counts:
        whole = Counts()
        for c in self.counts.values():
            whole.collectives += c.collectives
            whole.bytes += c.bytes
        return whole


def count(side: str, model: Model, plan: str, world: int, wrap: Wrap | None = None) -> Step:
    """Count the third step of a side, because DDP agrees on the order of its buckets in the second."""
    forget()
    with counting_ranks(world):
        mesh = init_device_mesh("cpu", PLANS[plan].mesh_shape(world), mesh_dim_names=PLANS[plan].axes)
        trainer = made(side, model, plan, mesh, wrap or UNCODED[side])
        given = batch(model, plan, mesh, 0)
        for _ in range(2):
            trainer.step(*given)
        with counted() as forward:
            loss = trainer.forward(*given)
        with counted() as backward:
            trainer.backward(loss)
        with counted() as update:
            trainer.update()
    return Step(dict(zip(DIRECTIONS, (forward, backward, update))))


def tried(side: str, model: Model, plan: str, world: int) -> Step:
    """Call `count`; if a peer raises an exception, return that as the reason why it does not run."""
    try:
        return count(side, model, plan, world)
    except Exception as error:  # the failure of a peer is a result
        if side == OURS:
            raise
        return Step({}, reason(side, error))


def run(effort: Effort) -> Iterator[Record]:
    """Yield records of all models and plans."""
    jobs = [(name, plan) for name in effort.of(MODELS) for plan in RANKS]
    for name, plan in effort.progress(jobs, "wire"):
        model, world = named(name, SIZES), RANKS[plan]
        ours = tried(OURS, model, plan, world)
        for peer in UNCODED:
            if peer == OURS or (peer == "torch tuned" and plan in NO_COLLECTIVES):
                continue
            yield from compared(Setting("wire", model.name, plan, world), ours, peer, tried(peer, model, plan, world))


def compared(at: Setting, ours: Step, peer: str, theirs: Step) -> Iterator[Record]:
    """Yield the records of one peer: collectives and bytes by direction, and of the entire step."""
    if theirs.error:
        yield at.missing("step", theirs.error, peer)
        return
    pairs = [(d, ours.counts[d], theirs.counts[d]) for d in DIRECTIONS] + [("step", ours.total, theirs.total)]
    for direction, a, b in pairs:
        if not a.calls and not b.calls:
            continue
        note = f"{a} | {b}"
        yield at.counted(f"{direction}: collectives", "collectives", a.calls, peer, b.calls, note=note)
        yield at.counted(f"{direction}: bytes", "bytes", a.bytes, peer, b.bytes)


__all__ = ["Step", "count", "run", "tried"]
