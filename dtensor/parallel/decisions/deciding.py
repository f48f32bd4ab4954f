"""Decides all layouts of a recorded program together.

tape -> steps, options by the rules of their operators -> integer program -> layouts of each operator

Parameters, inputs and what the program redistributes itself are where it says. The rest is chosen by the solver of the
search (`dtensor.parallel.search.solving`), at the same prices.
"""

from dataclasses import dataclass, replace
from importlib.metadata import version
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
from ..search.tape import BORDER
from .recording import Recording

GAP = 1e-4
"""How far from the best, as a fraction of the seconds, decisions may be."""

WIDE = 20_000
"""Programs of more variables may be further from the best, where it takes the solver long to come closer: those whose
tensors are so small that their time is that of starting collectives."""

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
    """

    layouts: tuple[OperatorLayouts, ...]
    mesh: Any
    seconds: float
    bound: float


def decide(recording: Recording) -> Decisions | None:
    """The layouts of a recorded program; None if the solver finds none."""
    tape, mesh = recording.tape, recording.mesh
    known = facts(mesh)
    network = known.network if known.measured or mesh.device_type != "cpu" else _assumed(known.network)
    choices = Choices(mesh, network, known.machine or MACHINES.get(mesh.device_type, MACHINES["cpu"]))
    steps = _steps(recording)
    training = any(op.backward for op in tape.ops)
    regime = replace(USUAL, training=training, states=0.0, by_operator=True)
    fixed = {steps.which[v]: s for v, s in recording.fixed.items() if v in steps.which}
    tangents = {
        steps.which[v]: steps.which[result]
        for v, result in recording.tangents.items()
        if v in steps.which and result in steps.which
    }
    returned = [steps.which[v] for v in (*tape.results, *recording.handed_back) if v in steps.which]
    program = Program(steps, choices, regime, fixed=fixed, returned=returned, tangents=tangents)
    solution = program.solve(gap=GAP, limit=LIMIT, most=WIDE)
    if solution is None:
        return None
    layouts: list[OperatorLayouts] = []
    at: dict[Any, int] = {}
    for op in tape.ops:
        if op.func == BORDER:
            continue
        step = steps.of[op]
        inputs = tuple([solution.uses.get((step, k)) for k in range(len(op.operands))])
        outputs = tuple([None if t is None else solution.states.get(t) for t in step.outputs])
        dims = tuple([v.ndim for v in op.operands])
        at[op] = len(layouts)
        maker, back = recording.node.get(op, (None, 0))
        node = None if maker not in at else (at[maker], back)
        layouts.append(OperatorLayouts(op.func, dims, inputs, outputs, node))
    return Decisions(tuple(layouts), mesh, solution.seconds, solution.bound)


def _steps(recording: Recording) -> Steps:
    """The steps of a program: layers that are alike are decided once, unless the user has cut them differently."""
    steps, states = steps_of(recording.tape), dict[Tensor, State]()
    for v, s in recording.fixed.items():
        if v in steps.which and states.setdefault(steps.which[v], s) != s:
            return steps_of(recording.tape, alike=False)
    return steps


def _assumed(network: Network) -> Network:
    return Network.of(network.sizes, tuple([replace(link, **ETHERNET) for link in network.links]), network.merged)


def fingerprint() -> Any:
    """What decisions depend on apart from the program, its meshes and their links, for cache keys of compiled code."""
    return version("highspy"), *sorted({repr((f.measured, f.machine)) for f in known_meshes()})


__all__ = ["Decisions", "decide", "fingerprint"]
