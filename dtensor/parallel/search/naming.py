"""From names to tensors of a step, and back: what is fixed, the plan that is found, and what it is expected to cost."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from ...errors import PlacementError
from ...layout.layout import Layout
from ...layout.placements import Placement, Replicate, Shard, as_placement, as_placements
from ..whole_model.by_name import pattern_for
from ..whole_model.inputs import entry_of, is_by_name
from ..whole_model.plan import Activation, Axes, Plan, matches
from ..whole_model.prediction import Prediction
from .choices import Choices
from .engine import Assignment, Run
from .states import State, fitting, placements_of, state_of
from .steps import Steps, Tensor, pattern
from .tape import BUFFER, INPUT, PARAMETER

INPUTS = "inputs"
"""The name in `fixed` of all arguments of the model's forward, or with a dot and a name, of one."""


class Unlike(Exception):
    """Layers that a step counts as one are placed differently."""


def fixed_states(
    steps: Steps, fixed: Mapping[str, Mapping[str, Placement]], sizes: Mapping[str, int]
) -> dict[Tensor, State]:
    """The states of the tensors that `fixed` names, as `dtensor.search` takes it.

    Raises:
        PlacementError: a name matches nothing, an axis is not one of the mesh, or placements do not fit.
    """
    found: dict[Tensor, State] = {}
    for name, axes in fixed.items():
        placed = [as_placement(p) for p in axes.values()]
        if any(p.is_partial() for p in placed):
            raise PlacementError(f"fixed: {name!r} is Partial on an axis; write Shard(dim) or Replicate()")
        if name == INPUTS or name.startswith(f"{INPUTS}."):
            wanted = name.removeprefix(INPUTS).removeprefix(".")
            tensors = [t for t in steps.of_kind(INPUT) if not wanted or entry_of(t.name, {wanted: ()}) is not None]
            if wanted and not tensors:
                raise PlacementError(_no_input(wanted, steps))
        else:
            known_names = [n for (kind, n) in steps.tape.values if kind in (PARAMETER, BUFFER)]
            names = {n for n in known_names if fnmatchcase(n, name)}
            names |= {first for other, first in steps.tape.ties.items() if fnmatchcase(other, name)}
            if not names:
                raise PlacementError(f"fixed: {name!r} matches no parameter or buffer of the model")
            tensors = list({steps.which[v] for (_, n), v in steps.tape.values.items() if n in names})
        for t in tensors:
            given = _of_input(axes, t) if t.kind == INPUT else axes
            state = _state_of(given, t.like.shape, sizes, f"fixed: {name!r}")
            if found.setdefault(t, state) != state:
                raise PlacementError(
                    f"fixed: {name!r} and another name give {t.name} different placements; layers that are alike are "
                    "placed alike"
                )
    return found


def assignment_of(plan: Plan, steps: Steps, sizes: Mapping[str, int]) -> Assignment:
    """A plan in tensors and borders of a step.

    Raises:
        PlacementError: a name matches nothing, or placements do not fit.
        Unlike: layers that count as one are placed differently.
    """
    made = Assignment()
    for given, into in ((plan.parameters, made.stored), (plan.used, made.used)):
        matched: set[str] = set()
        for (kind, name), v in steps.tape.values.items():
            if kind not in (PARAMETER, BUFFER):
                continue
            names = [name, *[other for other, first in steps.tape.ties.items() if first == name]]
            found = [p for p in [pattern_for(n, given) for n in names] if p is not None]
            matched.update(found)
            t = steps.which[v]
            if found or into is made.stored:
                state = _state_of(given[found[0]] if found else {}, v.shape, sizes, repr(name))
            else:
                state = made.stored[t]  # it is used as it is stored
            if into.setdefault(t, state) != state:
                raise Unlike(f"{name} and {t.like.name} are alike, and placed differently")
        if unknown := [p for p in given if p not in matched]:
            raise PlacementError(f"{unknown[0]!r} matches no parameter or buffer of the model")
    for t in steps.of_kind(INPUT):
        made.stored[t] = _state_of(_of_input(plan.input(t.name), t), t.like.shape, sizes, f"inputs: {t.name}")
    for name in plan.inputs if is_by_name(plan.inputs) else ():
        if not any(entry_of(t.name, {name: ()}) for t in steps.of_kind(INPUT)):
            raise PlacementError(_no_input(name, steps))
    for step, modules in steps.places.items():
        if not step.like.operands[0].dtype.is_floating_point:
            continue
        places = [f"{module}.{step.like.what}" for module in modules]
        entries = [next((e for e in reversed([*plan.activations]) if matches(place, e)), "") for place in places]
        placed = [plan.activations.get(entry) for entry in entries]
        if any(activation != placed[0] for activation in placed):
            raise Unlike(f"{places[0]} and {places[-1]} are alike, and placed differently")
        for activation in [a for a in placed[:1] if a is not None]:
            calls = [other.like.operands[0].shape for other, first in steps.decided.items() if first is step]
            shape = max(calls, key=len)
            to, gradient = (_state_of(s, shape, sizes, repr(places[0])) for s in (activation.to, activation.gradient))
            made.borders[step] = to, gradient
    return made


def _state_of(axes: Axes, shape: tuple[int, ...], sizes: Mapping[str, int], said: str) -> State:
    """The state of a tensor of that shape; of an axis that is left out, replicated."""
    if unknown := [a for a in axes if a not in sizes]:
        raise PlacementError(f"{said} names the axis {unknown[0]!r}, and the mesh has {list(sizes)}")
    placed = [as_placement(axes.get(a, Replicate())) for a in sizes]
    try:
        return state_of(Layout.of(as_placements(placed, len(placed), len(shape)), len(shape)))
    except PlacementError as error:
        raise PlacementError(f"{said} of shape {list(shape)}: {error}") from None


def plan_of(made: Assignment, steps: Steps, sizes: Mapping[str, int]) -> Plan:
    """An assignment in names."""
    axes = list(sizes)

    def words(s: State) -> Axes:
        return {a: p for a, p in zip(axes, placements_of(s)) if not p.is_replicate()}

    parameters, used = _named(steps, made.stored, words, {}), _named(steps, made.used, words, made.stored)
    inputs = {t.name: made.stored.get(t, ()) for t in steps.of_kind(INPUT) if t.like.ndim}
    alike = like_all(made, steps)
    placed: Any = {name: words(s) for name, s in inputs.items() if words(s)} if alike is None else words(alike)
    activations: dict[str, Activation] = {}
    everywhere = [f"{module}.{step.like.what}" for step, modules in steps.places.items() for module in modules]
    for step, (s, gradient) in made.borders.items():
        places = [f"{module}.{step.like.what}" for module in steps.places[step]]
        name = pattern(places[0])
        alone = {place for place in everywhere if matches(place, name)} == set(places)
        activations |= dict.fromkeys([name] if alone else places, Activation(words(s), words(gradient)))
    return Plan(dict(sizes), parameters, used, placed, activations)


def like_all(made: Assignment, steps: Steps) -> State | None:
    """The state that all inputs have, as far as their dims allow; None if there is none."""
    inputs = sorted(steps.of_kind(INPUT), key=lambda t: -t.like.ndim)
    first: State = made.stored.get(inputs[0], ()) if inputs else ()
    same = all(fitting(first, t.like.ndim) == made.stored.get(t, fitting(first, 0)) for t in inputs)
    return first if same else None


def _of_input(axes: Axes, t: Tensor) -> Axes:
    """Placements of inputs, without those along dims that this one does not have."""
    return {a: p for a, p in axes.items() if not (isinstance(p, Shard) and p.dim >= t.like.ndim)}


def _no_input(name: str, steps: Steps) -> str:
    return f"inputs: the model is given no {name!r}, but {', '.join([repr(t.name) for t in steps.of_kind(INPUT)])}"


def _named(
    steps: Steps, states: Mapping[Tensor, State], words: Callable[[State], Axes], otherwise: Mapping[Tensor, State]
) -> dict[str, Axes]:
    """States of parameters and buffers by name: by pattern where no other tensor has the same one.

    Args:
        otherwise: states that need not be said, of those that have none in `states`.
    """
    found: dict[str, Axes] = {}
    whole: State = ()
    values = {n: steps.which[v] for (kind, n), v in steps.tape.values.items() if kind in (PARAMETER, BUFFER)}
    wanted = {n: words(states.get(t, otherwise.get(t, whole))) for n, t in values.items()}
    for n, t in values.items():
        if t in states and wanted[n] != words(otherwise.get(t, whole)):
            alike = [u for u in values.values() if u is not t and u.name == t.name]
            found[n if alike else t.name] = wanted[n]
    for n in [*values, *steps.tape.ties]:  # a pattern may match more than it is meant for
        first = steps.tape.ties.get(n, n)
        try:
            entry = pattern_for(n, found)
            said = found[entry] if entry is not None else None
        except PlacementError:
            said = {"": Replicate()}
        if said is not None and said != wanted[first]:
            found[n] = wanted[first]
    return found


def prediction(
    run: Run, bound: float, choices: Choices, others: Mapping[str, Run], took: tuple[float, float]
) -> Prediction:
    """What a run of the step costs, with the ten moves that take most seconds."""
    merged: dict[Any, list[Any]] = {}
    for (step, _, a, b, price), n in run.moves.items():
        at = pattern(step.like.path) if step is not None else ""
        name = "gradient" if step is None else "border" if step.border else step.name.removesuffix(".default")
        entry = merged.setdefault((at, name, _text(a), _text(b)), [0, 0.0])
        entry[0] += n
        entry[1] += n * price
    most = sorted(merged.items(), key=lambda item: -item[1][1])[:10]
    return Prediction(
        seconds=run.seconds,
        computing=run.computing,
        waiting=run.waiting,
        beside=run.beside,
        updating=run.updating,
        bound=bound,
        memory=run.peak,
        static=run.static,
        modules={name: (a, b) for name, (a, b) in run.by_path.items()},
        held={name: (a, b) for name, (a, b) in run.held.items()},
        others={name: (r.seconds, r.peak) for name, r in others.items()},
        moves=tuple([(at, op, a, b, n, s) for (at, op, a, b), (n, s) in most if s]),
        gathered=tuple(sorted(choices.gathered)),
        took=took,
    )


def _text(s: State) -> str:
    return "".join([str(p) for p in placements_of(s)])


__all__ = ["Unlike", "assignment_of", "fixed_states", "plan_of", "prediction"]
