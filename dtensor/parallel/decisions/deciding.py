"""Decides all layouts of a recorded program together.

tape -> steps, options by the rules of their operators -> integer program -> layouts of each operator

Parameters, inputs and what the program redistributes itself are where it says. The rest is chosen by the solver of the
search (`dtensor.parallel.search.solving`), at the same prices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...dispatch.whole_graph import OperatorLayouts
from ...mesh.mesh import facts, known_meshes
from ...prices.links import Network
from ...prices.machine import MACHINES
from ..search.choices import Choices
from ..search.regime import USUAL
from ..search.repeats import steps_of
from ..search.solving.program import Program
from ..search.states import State
from ..search.steps import Steps, Tensor
from ..search.tape import Op
from . import files
from .recording import Recording

GAP = 1e-4
"""How far from the best, as a fraction of the seconds, decisions may be."""

WIDE = 20_000
"""Programs of more variables may be further from the best, where it takes the solver long to come closer: those whose
tensors are so small that their time is that of starting collectives."""

FOR_ALIKE = 1e-3
"""What fraction of a step layers may cost that are decided alike; they may not send more. Llama's, which by the model
of cost took 1.2 % more, took 4 to 12 % more when measured."""

MANY = 2000
"""In programs of more operators all layers that are alike are decided alike."""

LIMIT = 60.0
"""Seconds after which the solver takes what it has. It is not meant to be reached: ranks might decide differently."""


ETHERNET = {"alpha": 3e-4, "start": 3e-4, "bandwidth": 6e7}
"""What links between processes on CPUs are taken for that were not measured, in seconds and bytes per second: Ethernet
of 1 Gbit/s that two ranks of a host share, and what gloo takes for the smallest collective. Sending less than one must
costs little on a faster link, sending more costs much on this one."""


@dataclass(frozen=True)
class Decisions:
    """What was decided for a program.

    Attributes:
        layouts: of each operator, in order.
        mesh: the mesh on which they run.
        seconds: of a step, as the model of cost has it.
        bound: no decisions take fewer seconds under that model.
        text: the same as the content of a file; see `files`.
    """

    layouts: tuple[OperatorLayouts, ...]
    mesh: Any
    seconds: float
    bound: float
    text: str


def decide(recording: Recording, folder: str = "") -> Decisions | None:
    """The layouts of a recorded program; None if the solver finds none.

    Args:
        recording: the program.
        folder: decisions that were dumped; what it has for this program is taken, and nothing is decided.

    Raises:
        Refused: a file in the folder says what cannot be.
    """
    known = facts(recording.mesh)
    device = recording.mesh.device_type
    network = known.network if known.measured or device != "cpu" else _assumed(known.network)
    choices = Choices(recording.mesh, network, known.machine or MACHINES.get(device, MACHINES["cpu"]))
    found = files.read(Path(folder), recording) if folder else None
    if found is None:
        found = _solved(recording, choices)
    else:
        _check(folder, recording, choices, found[0])
    return None if found is None else _decisions(recording, *found)


def _solved(recording: Recording, choices: Choices) -> tuple[list[files.Sides], float, float] | None:
    """The sides of each operator, the seconds of a step, and the bound on them.

    Layers that are alike are decided alike, for the sake of readers, and of compilers, which then make one kernel for
    all; unless that costs, or the user has cut them differently.
    """
    alike, steps = None, steps_of(recording.tape)
    if _may_be_alike(recording, steps):
        alike = _solution(recording, choices, steps)
        if alike is not None and len(recording.tape.ops) > MANY:
            return alike[1:]
    each = _solution(recording, choices, steps_of(recording.tape, alike=False))
    if alike is None or each is None:
        found = alike or each
        return found and found[1:]
    bound = min(each[3], alike[2])
    costs = alike[2] * (1 - FOR_ALIKE) > bound or alike[0] > each[0]
    return each[1:] if costs else (*alike[1:3], bound)


def _may_be_alike(recording: Recording, steps: Steps) -> bool:
    """Whether there are layers that are alike, in which the program says the same of where tensors are."""
    states: dict[Tensor, State] = {}
    fixed = [(steps.which[v], s) for v, s in recording.fixed.items() if v in steps.which]
    return len(steps.steps) < len(recording.tape.ops) and all(states.setdefault(t, s) == s for t, s in fixed)


def _solution(
    recording: Recording, choices: Choices, steps: Steps
) -> tuple[float, list[files.Sides], float, float] | None:
    """The bytes that a rank sends, and the same, where what is one step is decided once."""
    training = any(op.backward for op in recording.tape.ops)
    regime = replace(USUAL, training=training, states=0.0, by_operator=True)
    fixed = {steps.which[v]: s for v, s in recording.fixed.items() if v in steps.which}
    tangents = {
        steps.which[v]: steps.which[result]
        for v, result in recording.tangents.items()
        if v in steps.which and result in steps.which
    }
    results = (*recording.tape.results, *recording.handed_back)
    returned = [steps.which[v] for v in results if v in steps.which]
    program = Program(steps, choices, regime, fixed=fixed, returned=returned, tangents=tangents)
    solution = program.solve(gap=GAP, limit=LIMIT, most=WIDE)
    if solution is None:
        return None
    sides: list[files.Sides] = []
    for op in files.operators(recording):
        step = steps.of[op]
        takes = tuple([solution.uses.get((step, k)) for k in range(len(op.operands))])
        sides.append((takes, tuple([None if t is None else solution.states.get(t) for t in step.outputs])))
    return solution.sent, sides, solution.seconds, solution.bound


def _decisions(recording: Recording, sides: Sequence[files.Sides], seconds: float, bound: float) -> Decisions:
    layouts: list[OperatorLayouts] = []
    at: dict[Op, int] = {}
    for k, (op, (takes, makes)) in enumerate(zip(files.operators(recording), sides, strict=True)):
        at[op] = k
        maker, back = recording.node.get(op, (None, 0))
        node = None if maker not in at else (at[maker], back)
        layouts.append(OperatorLayouts(op.func, tuple([v.ndim for v in op.operands]), takes, makes, node))
    return Decisions(tuple(layouts), recording.mesh, seconds, bound, files.text(recording, sides, seconds, bound))


def _check(folder: str, recording: Recording, choices: Choices, sides: Sequence[files.Sides]) -> None:
    """Refuse layouts that the rules of operators do not allow."""
    steps = steps_of(recording.tape, alike=False)
    reduced = choices.made(steps.steps)
    for k, (op, given) in enumerate(zip(files.operators(recording), sides, strict=True)):
        step = steps.of[op]
        if step.plain or not step.sources:
            continue
        allowed = [(o.inputs, o.outputs) for o in choices.options(step, reduced)]
        if not any(map(partial(_fits, given), allowed)):
            raise files.refused(folder, k, op, given, allowed)


def _fits(given: files.Sides, allowed: files.Sides) -> bool:
    """Whether layouts are those of an option, which may leave some to be any."""
    return (
        given[1] == allowed[1]
        and len(given[0]) == len(allowed[0])
        and all(b is None or a == b for a, b in zip(given[0], allowed[0]))
    )


def _assumed(network: Network) -> Network:
    return Network.of(network.sizes, tuple([replace(link, **ETHERNET) for link in network.links]), network.merged)


def fingerprint() -> Any:
    """What decisions depend on apart from the program, its meshes and their links, for cache keys of compiled code."""
    return version("highspy"), *sorted({repr((f.measured, f.machine)) for f in known_meshes()})


__all__ = ["Decisions", "decide", "fingerprint"]
