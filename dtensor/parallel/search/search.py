"""`dtensor.search` finds a plan for a model on a mesh, `dtensor.predict` says what a plan costs.

record a step -> integer program -> states of all tensors -> what the engine needs to be told of them -> plan
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ArgumentError, ArgumentTypeError, PlacementError, shown
from ...layout.placements import Placement
from ...mesh.mesh import backend_of, facts
from ...prices.calibrated import links_here
from ...prices.links import INTER, INTRA, Link, Network
from ...prices.machine import MACHINES, Machine
from ...program.stages import Stage
from ..whole_model.plan import Plan, modules_of, recomputed_of
from ..whole_model.prediction import Prediction
from .best import Best
from .choices import Choices
from .engine import Assignment, Engine, Run
from .known import priced
from .naming import Unlike, assignment_of, fixed_states, plan_of, prediction
from .recording import Loss, record
from .regime import Regime
from .repeats import steps_of
from .states import State
from .steps import Steps, Tensor, pattern
from .tape import INPUT

WORTH = 0.02
"""The part of a step that cutting it into microbatches has to save, as it takes longer to compile."""

PER_HOST = 8
"""Ranks of a host, for a mesh that is given by its sizes."""

Mode = Literal["training", "forward"]


UNITS = {"memory": " of bytes, such as 80e9", "gap": ", such as 0.01", "limit": " of seconds"}


@Stage("searching a plan")
def search(
    model: nn.Module,
    mesh: DeviceMesh | Mapping[str, int],
    inputs: Any,
    *,
    memory: float | None = None,
    fixed: Mapping[str, Mapping[str, Placement]] | None = None,
    links: Mapping[str, Link] | None = None,
    machine: Machine | None = None,
    device_type: str = "cuda",
    loss: Loss | None = None,
    mode: Mode = "training",
    optimizer_states: float = 2.0,
    gap: float = 0.01,
    limit: float = 20.0,
    recomputed: Mapping[str, int] | None = None,
    split_batch: int | None = None,
    gradients: torch.dtype | None = None,
    what_if: bool = False,
) -> Plan:
    """Find the placements with which a step takes least time.

    Nothing is computed and nothing is sent: the step is recorded once on fake tensors, and priced. Where process groups
    exist, every rank of the mesh calls this; the first one searches, and all get its plan.

    Args:
        model: the model, as written for one device. Its parameters may be on the meta device.
        mesh: the mesh, with named axes; or, for one that is not there, a dict from names of axes to numbers of ranks,
            the last axes within hosts of 8.
        inputs: arguments of the model's forward, of the sizes of the whole batch: a tensor, a tuple, or a dict of
            names. They may be on the meta device.
        memory: bytes that a rank may hold at once; None for any.
        fixed: names of parameters, or patterns of them -> their placements by axis, which the plan keeps; "inputs" for
            all arguments, "inputs.tokens" for one.
        links: axis -> its link, in place of those of the mesh. The engine chooses by those of the mesh nevertheless;
            `dtensor.prepare` changes these.
        machine: what a rank computes with. None: as `dtensor calibrate` measured it, or else the usual one of the
            mesh's device type.
        device_type: of a mesh that is not there: "cuda" or "cpu".
        loss: computes the loss from what the model returns. None: its own `loss`, or a number that it returns, or the
            sum of what it returns.
        mode: "training" for forward, backward and the optimizer's update, or "forward".
        optimizer_states: how many tensors of its size the optimizer keeps for a parameter: 2 for Adam, 1 for SGD with
            momentum, else 0.
        gap: how far from the best, as a fraction of the time, the solver may stop.
        limit: seconds after which the solver stops with the best that it has; under each condition of `what_if`, again.
        recomputed: name of modules, or a pattern -> n, for each n-th of them to keep no activations: the backward runs
            their forward again. None: with a bound on memory, as few layers as is fastest, else none.
        split_batch: number of microbatches that compiled code computes in turns, so that one computes while another
            communicates. None: 1 or 2, as is faster; see the plan's `options`.
        gradients: a narrower dtype in which gradients of parameters may be sent, such as torch.bfloat16. This rounds
            them. None: their own.
        what_if: search again for a batch that is not cut, for each axis with a link twice as fast, and for twice the
            memory, each of which takes as long; see `Prediction.what_if`.

    Returns:
        The plan, for `distribute_model`. Its `prediction` holds what it is expected to cost, and a bound; see
        `Prediction`.

    Raises:
        PlacementError: no plan fits into `memory`; a pattern in `fixed` matches nothing; axes of the mesh have no
            names; or the forward needs values of tensors.
        ValueError: an argument is out of its range.
    """
    for name, value in (("memory", memory), ("gap", gap), ("limit", limit)):
        if value is not None and not (isinstance(value, Real) and value > 0):
            raise ArgumentError(f"{name} is a positive number{UNITS[name]}; got {value!r}")
    _whole("split_batch", split_batch)
    regime = Regime(mode == "training", optimizer_states, split_batch or 1, gradients)
    step = _Step(mesh, links, device_type, machine, mode, regime)

    def found() -> Plan:
        best: tuple[Best, Mapping[str, int], Assignment, Run, float] | None = None
        tried: Best | None = None
        until = time.monotonic() + limit
        ways = [1, 2] if split_batch is None else [split_batch]  # microbatches with which a plan may still be faster
        for again in [recomputed] if recomputed is not None else _recomputations(model, mode, memory):
            if not ways or (tried is not None and time.monotonic() > until):
                break
            engine = step.engine(model, inputs, loss, Plan(step.sizes, recomputed=again))
            pinned = fixed_states(engine.steps, fixed or {}, step.sizes)
            for parts in tuple(ways):
                below = float("inf") if best is None else best[3].seconds
                if parts != ways[0] and (best is None or time.monotonic() > until):
                    continue
                if best is not None and parts > best[3].parts:
                    if best[3].waiting <= WORTH * below:
                        ways.remove(parts)
                        continue
                    below *= 1 - WORTH
                elif best is not None:  # to compute more again has to save more than the solver leaves
                    below *= 1 - gap
                here = engine if parts == engine.regime.parts else step.engine_of(engine.steps, parts=parts)
                tried = Best(here, pinned, memory, gap, until, below)
                with Stage("solving", inside=True):
                    found = tried.found()
                if found is not None and found[1].seconds < below and parts in (split_batch, found[1].parts):
                    best = tried, again, *found
                    enough = tried.free
                else:
                    enough = best is not None and not tried.short
                if enough:  # to compute more again does not help
                    ways.remove(parts)
        if best is None:
            assert tried is not None
            raise PlacementError(tried.too_large())
        tried, again, made, run, bound = best
        with Stage("polishing", inside=True):
            made, run, bound = tried.finished(made, run, bound)
        engine, pinned = tried.engine, tried.pinned
        predicted = step.prediction(engine, run, bound)
        if what_if:
            others = step.what_if(engine, pinned, memory, gap, limit)
            predicted = replace(predicted, what_if={name: (r.seconds, r.peak) for name, r in others})
        options = {"split_batch": run.parts} if run.parts > 1 else {}
        plan = replace(plan_of(made, engine.steps, step.sizes), recomputed=again, options=options)
        return replace(plan, gradients=gradients if run.sent else None, prediction=predicted)

    return found() if isinstance(mesh, Mapping) else _once(mesh, found)


def predict(
    model: nn.Module,
    mesh: DeviceMesh | Mapping[str, int],
    inputs: Any,
    plan: Plan,
    *,
    links: Mapping[str, Link] | None = None,
    machine: Machine | None = None,
    device_type: str = "cuda",
    loss: Loss | None = None,
    mode: Mode = "training",
    optimizer_states: float = 2.0,
) -> Plan:
    """Predict what a step costs with a plan of your own, or with one that was changed.

    Args:
        model, mesh, inputs, links, machine, device_type, loss, mode, optimizer_states: as `search` takes them.
        plan: the plan.

    Returns:
        The plan, with its `prediction`. The bound is 0.0: nothing was searched.

    Raises:
        PlacementError: the plan is for another mesh, a name in it matches nothing, or placements do not fit.
        ValueError: an argument is out of its range.
    """
    if not isinstance(plan, Plan):
        raise ArgumentTypeError(
            f"predict takes a Plan; got {shown(plan)}, write predict(model, mesh, inputs, Plan.load(file)) or a "
            f"plan of "
            "dtensor.search"
        )
    parts = plan.options.get("split_batch", 1)
    _whole("the plan's option split_batch", parts)
    regime = Regime(mode == "training", optimizer_states, parts, plan.gradients)
    step = _Step(mesh, links, device_type, machine, mode, regime)
    if dict(plan.mesh) != step.sizes:
        raise PlacementError(f"the plan is for a mesh {dict(plan.mesh)}, and the mesh has {step.sizes}")
    modules_of(plan, [name for name, _ in model.named_modules()])
    engine = step.engine(model, inputs, loss, plan)
    try:
        assigned = assignment_of(plan, engine.steps, step.sizes)
    except Unlike:
        engine = step.apart(engine)
        assigned = assignment_of(plan, engine.steps, step.sizes)
    run = engine.run(assigned)
    return replace(plan, prediction=step.prediction(engine, run, 0.0))


def _whole(name: str, parts: Any) -> None:
    if parts is not None and (not isinstance(parts, int) or parts < 1):
        raise ArgumentError(f"{name} is a number of microbatches, 1 or more; got {parts!r}")


class _Step:
    """What is priced, and on what; the arguments are those of `search`."""

    def __init__(
        self,
        mesh: DeviceMesh | Mapping[str, int],
        links: Mapping[str, Link] | None,
        device_type: str,
        machine: Machine | None,
        mode: Mode,
        regime: Regime,
    ) -> None:
        if mode not in ("training", "forward"):
            raise ArgumentError(f'mode is "training" or "forward"; got {mode!r}')
        self.sizes, network, own, device = _mesh(mesh, links, device_type)
        machine = machine or _machine(mesh, device) or MACHINES.get(device, MACHINES["cpu"])
        self._choices = Choices(torch.device(device), network, machine, own)
        self._regime = regime if regime.training else replace(regime, states=0.0)
        self._began = self._recorded = 0.0

    def engine(self, model: nn.Module, inputs: Any, loss: Loss | None, plan: Plan) -> Engine:
        """Record the step, with what the plan computes again."""
        self._began = time.monotonic()
        again = recomputed_of(plan, [name for name, _ in model.named_modules()])
        with Stage("recording the step", inside=True):
            tape = record(
                model,
                inputs,
                loss=loss,
                training=self._regime.training,
                recomputed=again if self._regime.training else (),
            )
        self._recorded = time.monotonic()
        return self.engine_of(steps_of(tape))

    def apart(self, engine: Engine) -> Engine:
        """The same step, in which layers that are alike may be placed differently."""
        return self.engine_of(steps_of(engine.steps.tape, alike=False))

    def engine_of(self, steps: Steps, choices: Choices | None = None, parts: int | None = None) -> Engine:
        """The step on the mesh, or with other choices or another number of microbatches."""
        regime = self._regime if parts is None else replace(self._regime, parts=parts)
        return Engine(steps, choices or self._choices, regime)

    def prediction(self, engine: Engine, run: Run, bound: float) -> Prediction:
        """What the step costs, with well-known plans beside it."""
        plain = engine if engine.regime.parts == 1 else self.engine_of(engine.steps, parts=1)
        others = {name: run for name, (_, run) in priced(plain).items()}
        took = self._recorded - self._began, time.monotonic() - self._recorded
        return prediction(run, bound, self._choices, others, took)

    def what_if(
        self, engine: Engine, pinned: dict[Tensor, State], memory: float | None, gap: float, limit: float
    ) -> Iterator[tuple[str, Run]]:
        """The best plans under other conditions, of which each is searched."""
        here = self._choices
        whole: State = (None,) * len(self.sizes)
        uncut = {**pinned, **dict.fromkeys([t for t in engine.steps.of_kind(INPUT) if t not in pinned], whole)}
        ways = [("every rank with the whole batch", engine, uncut, memory)]
        for k, axis in enumerate(self.sizes):
            links = list(here.network.links)
            links[k] = replace(links[k], bandwidth=2 * links[k].bandwidth)
            choices = Choices(here.mesh, Network.of(here.network.sizes, tuple(links)), here.machine)
            ways.append(
                (f"{axis} twice as fast", self.engine_of(engine.steps, choices, engine.regime.parts), pinned, memory)
            )
        if memory is not None:
            ways.append(("twice the memory", engine, pinned, 2 * memory))
        for name, other, kept, most in ways:
            best = Best(other, kept, most, gap, time.monotonic() + limit)
            found = best.found()
            if found is not None:
                yield name, best.finished(*found)[1]


def _recomputations(model: nn.Module, mode: Mode, memory: float | None) -> Iterator[Mapping[str, int]]:
    """What to try to compute again in the backward, least first."""
    yield {}
    layers = layers_of(model)
    if mode == "training" and memory is not None and layers:
        yield from [dict.fromkeys(layers, n) for n in (4, 2, 1)]


def layers_of(model: nn.Module) -> list[str]:
    """Patterns of the names of modules that repeat, such as layers, and are in no other module that does."""
    numbered = [(n, m) for n, m in model.named_modules() if n.rpartition(".")[2].isdigit()]
    counts = Counter([(pattern(name), type(module)) for name, module in numbered])
    found: list[str] = []
    for name in dict.fromkeys([name for (name, _), n in counts.items() if n > 1]):
        if not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


def _once(mesh: DeviceMesh, found: Callable[[], Plan]) -> Plan:
    """What the first rank of a mesh finds, on all of its ranks; what it raises, too."""
    ranks = mesh.mesh.flatten().tolist()
    if len(ranks) == 1 or dist.get_backend() == "fake":
        return found()
    first = dist.get_rank() == ranks[0]
    said: list[Any] = [None]
    if first:
        try:
            said[0] = found()
        except Exception as error:  # whatever it is, no rank may wait for a plan that does not come
            said[0] = error
    group = None if len(ranks) == dist.get_world_size() else facts(mesh).groups.get(tuple(range(mesh.ndim)))
    if group is None and len(ranks) != dist.get_world_size():
        raise PlacementError("search on a slice of a mesh is not supported; search on the mesh that it was sliced from")
    dist.broadcast_object_list(said, src=ranks[0])
    if isinstance(said[0], Exception):
        raise said[0]
    return said[0]


def _machine(mesh: DeviceMesh | Mapping[str, int], device: str) -> Machine | None:
    """What `dtensor calibrate` measured here, for a mesh that is there."""
    return None if isinstance(mesh, Mapping) else links_here(backend_of(mesh), device).machine


def _mesh(
    mesh: DeviceMesh | Mapping[str, int], links: Mapping[str, Link] | None, device: str
) -> tuple[dict[str, int], Network, Network | None, str]:
    """The axes of a mesh, its network with the links given, its own if that is another, and its device type."""
    links = links or {}
    if isinstance(mesh, Mapping):
        sizes, stride = {str(axis): int(n) for axis, n in mesh.items()}, 1
        found: list[Link] = []
        for n in reversed(sizes.values()):
            stride *= n
            found.insert(0, INTRA if stride <= PER_HOST else INTER)
        network, own = Network.of(tuple(sizes.values()), tuple(found)), None
    else:
        names = mesh.mesh_dim_names
        if not names:
            raise PlacementError(
                "a plan names the axes of the mesh, and those of this one have no names; make it with "
                "init_device_mesh(…, mesh_dim_names=(…))"
            )
        sizes, device = dict(zip(names, mesh.shape)), mesh.device_type
        network = own = facts(mesh).network
    if unknown := [axis for axis in links if axis not in sizes]:
        raise ArgumentError(f"links: the mesh has axes {list(sizes)} and no {unknown[0]!r}")
    given = Network.of(network.sizes, tuple([links.get(axis, known) for axis, known in zip(sizes, network.links)]))
    return sizes, given, own, device


__all__ = ["PER_HOST", "Mode", "layers_of", "predict", "search"]
