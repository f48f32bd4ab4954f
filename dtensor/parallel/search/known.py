"""Well-known plans, with which a plan that is found is compared."""

from collections.abc import Sequence

from .choices import Choices
from .engine import Assignment
from .states import State, fits
from .steps import Steps, Tensor
from .tape import INPUT, PARAMETER


def known(steps: Steps, choices: Choices) -> dict[str, Assignment]:
    """Well-known plans: replicas, and parameters cut over one axis or all, with the batch cut over all axes."""
    sizes = choices.network.sizes
    axes = range(len(sizes))
    inputs = [t for t in steps.of_kind(INPUT) if t.like.ndim]
    cut: State = (None,) * len(sizes)
    for a in axes:
        more = (*cut[:a], 0, *cut[a + 1 :])
        cut = more if all(fits(more, t.like.shape, sizes) for t in inputs) else cut
    batch = dict.fromkeys(inputs, cut)
    found = {"replicas (DDP)": Assignment(stored=dict(batch))}

    def sharded(over: Sequence[int]) -> Assignment:
        made = Assignment(stored=dict(batch))
        for t in steps.of_kind(PARAMETER):
            s = _first_cut(t, over, sizes)
            if s is not None:
                made.stored[t] = s
                made.used[t] = (None,) * len(sizes)
        return made

    found["fully sharded (FSDP)"] = sharded(axes)
    if len(sizes) > 1:
        found["fully sharded over the last axis, replicas over the others (HSDP)"] = sharded([len(sizes) - 1])
    return found


def _first_cut(t: Tensor, over: Sequence[int], sizes: Sequence[int]) -> State | None:
    for dim in range(t.like.ndim):
        s: State = tuple([dim if a in over else None for a in range(len(sizes))])
        if fits(s, t.like.shape, sizes):
            return s
    return None


__all__ = ["known"]
