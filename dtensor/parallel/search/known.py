"""Well-known plans, with which a plan that is found is compared."""

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

from .choices import Choices
from .engine import Assignment, Engine, Run
from .states import State, fits
from .steps import Steps, Tensor
from .tape import INPUT, PARAMETER
from .tensor_parallel import Cuts, tensor_parallel

SEQUENCE = -2
"""The dim along which activations are cut between layers: that before the features."""


def known(steps: Steps, choices: Choices) -> dict[str, Assignment]:
    """Well-known plans, by name: replicas; parameters cut over one axis or all; tensor parallelism over the last axis,
    with activations between layers whole or cut along the sequence, and with parameters whole or cut over the others.
    Batches are cut over all axes, or all but the last.
    """
    return dict(_known(steps, choices))


def priced(engine: Engine) -> dict[str, tuple[Assignment, Run]]:
    """The same, and what the engine does with each."""
    found = _priced.get(engine)
    if found is None:
        plans = known(engine.steps, engine.choices)
        found = _priced[engine] = {name: (a, engine.run(a)) for name, a in plans.items()}
    return found


_priced: WeakKeyDictionary[Engine, dict[str, tuple[Assignment, Run]]] = WeakKeyDictionary()


def _known(steps: Steps, choices: Choices) -> Iterator[tuple[str, Assignment]]:
    sizes = choices.network.sizes
    axes = range(len(sizes))
    last, others = axes[-1], axes[:-1]
    batch = _batch(steps, axes, sizes)
    yield "replicas (DDP)", Assignment(stored=dict(batch))
    yield "fully sharded (FSDP)", _sharded(steps, batch, axes, sizes)
    if others:
        name = "fully sharded over the last axis, replicas over the others (HSDP)"
        yield name, _sharded(steps, batch, [last], sizes)
    cuts = tensor_parallel(steps, choices, last)
    if not cuts.parameters:
        return
    batch = _batch(steps, others, sizes)
    for beside, over in (("", ()), (", fully sharded over the others (2-d)", others)):
        for along in (False, True):
            if over or not beside:
                name = "tensor parallel" + (", sequence parallel" if along else "") + " over the last axis"
                made = _sharded(steps, batch, over, sizes, cuts)
                _moved(made, cuts, batch, sizes, along)
                yield (name if others else name.removesuffix(" over the last axis")) + beside, made


def _batch(steps: Steps, axes: Sequence[int], sizes: Sequence[int]) -> dict[Tensor, State]:
    """Inputs cut over these axes, as far as all of them can be."""
    inputs = [t for t in steps.of_kind(INPUT) if t.like.ndim]
    cut: State = (None,) * len(sizes)
    for a in axes:
        more = (*cut[:a], 0, *cut[a + 1 :])
        cut = more if all(fits(more, t.like.shape, sizes) for t in inputs) else cut
    return dict.fromkeys(inputs, cut)


def _sharded(
    steps: Steps, batch: dict[Tensor, State], over: Sequence[int], sizes: Sequence[int], cuts: Cuts | None = None
) -> Assignment:
    """Parameters stored in shards over some axes, beside what tensor parallelism over the last one cuts."""
    made = Assignment(stored=dict(batch))
    whole: State = (None,) * len(sizes)
    for t in steps.of_kind(PARAMETER):
        dim = None if cuts is None else cuts.parameters.get(t)
        used = (*whole[:-1], dim) if dim is not None else whole
        stored = _first_cut(t, over, used, sizes)
        if stored != whole:
            made.stored[t] = stored
        if stored != used:
            made.used[t] = used
    return made


def _first_cut(t: Tensor, over: Sequence[int], used: State, sizes: Sequence[int]) -> State:
    """The state with these axes along the first dim that they divide; as it is used, if there is none."""
    for dim in range(t.like.ndim) if over else ():
        s: State = tuple([dim if a in over else entry for a, entry in enumerate(used)])
        if fits(s, t.like.shape, sizes):
            return s
    return used


def _moved(made: Assignment, cuts: Cuts, batch: dict[Tensor, State], sizes: Sequence[int], along: bool) -> None:
    """Activations where weights that are cut read and make them: whole there, and between them whole or cut along the
    sequence."""
    rest = next(iter(batch.values()), (None,) * len(sizes))[:-1]
    whole: State = (*rest, None)
    for borders, enters in ((cuts.entering, True), (cuts.leaving, False)):
        for step in borders:
            shape = step.like.operands[0].shape
            cut: State = (*rest, len(shape) + SEQUENCE)
            if not fits(whole, shape, sizes):
                continue
            between = cut if along and len(shape) + SEQUENCE >= 0 and fits(cut, shape, sizes) else whole
            made.borders[step] = (whole, between) if enters else (between, whole)


__all__ = ["known", "priced"]
