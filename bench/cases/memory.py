"""memory: peak bytes of a rank in a training step, compared with peers, the limit by hand, and the bound.

The bytes are counted from the allocations that the profiler reports for a step: parameters and everything that lives
between steps, plus what the step adds at its peak. One process is the first rank of a mesh of which the others do not
exist. Sides are compiled as in `step`. The bound is the simulation of the schedule by this library (`dtensor.compile`):
the memory that the order of a graph needs, without the savings of the compiler's fusions.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.nn.parallel import DistributedDataParallel

from dtensor import init_device_mesh
from dtensor.compile import report
from dtensor.tools.demo_plans import PLANS

from ..counting import counting_ranks
from ..effort import Effort
from ..models import Model, Sizes, named
from ..plans import NO_COLLECTIVES, RANKS
from ..record import OURS, Record, Setting
from ..sides import Trainer, Wrap, batch, forget, made, reason
from ..uncoded import UNCODED
from .step import PEERS, REAL

MODELS = {
    "tiny": (("mlp", "tp"),),
    "quick": tuple([("transformer-2", plan) for plan in ("tp", "ddp", "fsdp")]),
    "full": tuple([(name, plan) for name in ("mlp", "transformer-2", "transformer-8", "llama-2") for plan in RANKS]),
}
SIDES = {"tiny": ("torch eager", "by hand"), "quick": PEERS, "full": PEERS}
SIZES = {"tiny": Sizes(dim=16, seq=4, batch=2), "quick": REAL, "full": REAL}
BOUND = "the bound"


def ours_alone(fn: Any) -> Any:
    """Compile with this library's backend, without the agreement, as there are no other ranks."""
    return torch.compile(fn, backend="dtensor", fullgraph=True, options={"agreement": False})


def peak(trainer: Trainer, given: tuple[Any, Any], device: str) -> int:
    """Return the bytes that a step adds, at its peak, to those allocated before it."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer.step(*given)
        return torch.cuda.max_memory_allocated() - before
    return allocated(lambda: trainer.step(*given))


def allocated(run: Callable[[], object]) -> int:
    """Return the most bytes on the CPU that a call holds at once of those that it allocates.

    What was allocated before counts as never freed: the profiler knows the sizes of blocks from earlier profiles only.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, record_shapes=True) as seen:
        run()
    tree: list[Any] = list(seen.profiler.kineto_results.experimental_event_tree())  # pyright: ignore[reportOptionalMemberAccess]
    changes: list[tuple[int, int, int]] = []
    while tree:
        event = tree.pop()
        tree += event.children
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.typed[1].ptr, event.typed[1].alloc_size))
    live: dict[int, int] = {}
    held = most = 0
    for _, block, change in sorted(changes):
        if change > 0:
            live[block] = change
            held += change
        else:
            held -= live.pop(block, 0)
        most = max(most, held)
    return most


def persistent(trainer: Trainer) -> int:
    """Return the bytes of parameters and buffers on this rank, and of the buckets that DDP keeps for gradients."""
    found = 0
    for t in (*trainer.model.parameters(), *trainer.model.buffers()):
        local: Any = t.to_local() if hasattr(t, "to_local") else t  # pyright: ignore
        found += local.nbytes
    if isinstance(trainer.model, DistributedDataParallel):
        found += sum([bucket.buffer().nbytes for bucket in trainer.model.reducer._get_zeros_like_grad_buckets()])
    return found


def measured(side: str, model: Model, plan: str, device: str, wrap: Wrap | None = None) -> tuple[int, int, int]:
    """Return the bytes at the peak of the third step, the bytes that persist between steps, and the bound; the bound is
    0 for sides of other libraries."""
    forget()
    world = RANKS[plan]
    with counting_ranks(world):
        mesh = init_device_mesh(device, PLANS[plan].mesh_shape(world), mesh_dim_names=PLANS[plan].axes)
        trainer = made(side, model, plan, mesh, wrap or (ours_alone if side == OURS else None))
        inputs, targets = (x.to(device) for x in batch(model, plan, mesh, 0))
        for _ in range(2):
            trainer.step(inputs, targets)
        base = persistent(trainer)
        found = base + peak(trainer, (inputs, targets), device)
        bound = max(g["peak_bytes"] for g in report().manifests[-1]["graphs"].values()) if side == OURS else 0
    return found, base, bound


def run(effort: Effort) -> Iterator[Record]:
    """Yield records of all models and plans."""
    for name, plan in effort.progress(effort.of(MODELS), "memory"):
        model = named(name, effort.of(SIZES))
        at = Setting("memory", model.name, plan, RANKS[plan])
        code = effort.level != "tiny"
        most, base, bound = measured(OURS, model, plan, effort.device, None if code else UNCODED[OURS])
        yield at.counted("peak", "bytes", most, BOUND, bound)
        for peer in effort.of(SIDES):
            if peer == "torch tuned" and plan in NO_COLLECTIVES:
                continue
            try:
                theirs, their_base, _ = measured(peer, model, plan, effort.device, None if code else UNCODED[peer])
            except Exception as error:  # the failure of a peer is a result
                yield at.missing("peak", reason(peer, error), peer)
                continue
            yield at.counted("peak", "bytes", most, peer, theirs)
            yield at.counted("between steps", "bytes", base, peer, their_base)


__all__ = ["measured", "peak", "run"]
