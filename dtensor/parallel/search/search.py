"""`dtensor.search`: finds a plan for a model on a mesh.

    record a step -> integer program -> states of all tensors -> what the engine needs to be told of them -> plan

The program chooses for each operator freely. What runs chooses greedily, operator by operator, so the plan tells it
where parameters are, and where activations have to be for it to follow; whatever it would do anyway is left out. The
price of a plan is that of what the engine does.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from ...errors import PlacementError
from ...layout.cost import INTER, INTRA, Link, Network
from ...layout.layout import Layout
from ...layout.machine import MACHINES, Machine
from ...layout.placements import Placement, Replicate, Shard, as_placement, as_placements
from ...mesh.mesh import facts
from ..whole_model.plan import Activation, Axes, Plan, Prediction
from .engine import Assignment, Engine, Run
from .program import Program, Solution
from .states import State, fits, placements_of, state_of
from .steps import Choices, Step, Steps, Tensor, pattern, steps_of
from .tape import BUFFER, INPUT, PARAMETER, Loss, record

PER_HOST = 8
"""Ranks of a host, for a mesh that is given by its sizes."""

SAME = 1e-3
"""Plans whose prices differ by less than this fraction count as equal; the shorter one is taken."""

Mode = Literal["training", "forward"]


def search(
    model: nn.Module,
    mesh: Any,
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
        fixed: names of parameters, or patterns of them, or "inputs" -> their placements by axis, which the plan keeps.
        links: axis -> its link, in place of those of the mesh.
        machine: what a rank computes with; None for the usual one of the mesh's device type.
        device_type: of a mesh that is not there: "cuda" or "cpu".
        loss: computes the loss from what the model returns. None: its own `loss`, or a number that it returns, or the
            sum of what it returns.
        mode: "training" for forward, backward and the optimizer's update, or "forward".
        optimizer_states: how many tensors of its size the optimizer keeps for a parameter: 2 for Adam, 1 for SGD with
            momentum, else 0.
        gap: how far from the best, as a fraction of the time, the solver may stop.
        limit: seconds after which the solver stops with the best that it has.

    Returns:
        The plan, for `distribute_model`. Its `prediction` holds what it is expected to cost, and a bound: under the
        same model of cost, no placements take less.

    Raises:
        PlacementError: no plan fits into `memory`; a pattern in `fixed` matches nothing; axes of the mesh have no
            names; or the forward needs values of tensors.
        ImportError: the solver, highspy, is not installed.
        ValueError: an argument is out of its range.
    """
    if mode not in ("training", "forward"):
        raise ValueError(f'mode is "training" or "forward"; got {mode!r}')
    sizes, network, device = _mesh(mesh, links, device_type)

    def found() -> Plan:
        return _search(
            model,
            sizes,
            network,
            device,
            inputs,
            memory,
            fixed or {},
            machine or MACHINES.get(device, MACHINES["cpu"]),
            loss,
            mode == "training",
            optimizer_states if mode == "training" else 0.0,
            gap,
            limit,
        )

    return found() if isinstance(mesh, Mapping) else _once(mesh, found)


def _once(mesh: Any, found: Callable[[], Plan]) -> Plan:
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


def _mesh(mesh: Any, links: Mapping[str, Link] | None, device: str) -> tuple[dict[str, int], Network, str]:
    if isinstance(mesh, Mapping):
        sizes, stride = {str(axis): int(n) for axis, n in mesh.items()}, 1
        found: list[Link] = []
        for n in reversed(sizes.values()):
            stride *= n
            found.insert(0, INTRA if stride <= PER_HOST else INTER)
        network = Network.of(tuple(sizes.values()), tuple(found))
    else:
        names = mesh.mesh_dim_names
        if not names:
            raise PlacementError(
                "a plan names the axes of the mesh, and those of this one have no names; make it with "
                "init_device_mesh(…, mesh_dim_names=(…))"
            )
        sizes, network, device = dict(zip(names, mesh.shape)), facts(mesh).network, mesh.device_type
    if unknown := [axis for axis in links or {} if axis not in sizes]:
        raise ValueError(f"links: the mesh has axes {list(sizes)} and no {unknown[0]!r}")
    given = tuple([(links or {}).get(axis, own) for axis, own in zip(sizes, network.links)])
    return sizes, Network.of(network.sizes, given), device


class _Mesh:
    """What specs of a mesh that is not there refer to."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type


def _search(
    model: nn.Module,
    sizes: dict[str, int],
    network: Network,
    device: str,
    inputs: Any,
    memory: float | None,
    fixed: Mapping[str, Mapping[str, Placement]],
    machine: Machine,
    loss: Loss | None,
    training: bool,
    states: float,
    gap: float,
    limit: float,
) -> Plan:
    began = time.monotonic()
    tape = record(model, inputs, loss=loss, training=training)
    recorded = time.monotonic()
    steps = steps_of(tape)
    choices = Choices(_Mesh(device), network, machine)
    engine = Engine(steps, choices, training=training, states=states)
    pinned = _fixed(steps, fixed, sizes)
    found = _Search(steps, choices, engine, pinned, training, states, memory, gap, limit)
    assignment, run, bound = found.best()
    others = {name: found.engine.run(a) for name, a in known(steps, choices).items()}
    predicted = _prediction(run, bound, steps, choices, others, (recorded - began, time.monotonic() - recorded))
    return replace(plan_of(assignment, steps, sizes), prediction=predicted)


class _Search:
    def __init__(
        self,
        steps: Steps,
        choices: Choices,
        engine: Engine,
        pinned: dict[Tensor, State],
        training: bool,
        states: float,
        memory: float | None,
        gap: float,
        limit: float,
    ) -> None:
        self.steps, self.choices, self.engine, self.pinned = steps, choices, engine, pinned
        self.training, self.states, self.memory, self.gap, self.limit = training, states, memory, gap, limit
        self.sizes = choices.network.sizes

    def best(self) -> tuple[Assignment, Run, float]:
        """The cheapest assignment that fits, what the engine does with it, and the bound."""
        over, bound = 0.0, 0.0
        least: Run | None = None
        for _ in range(4):
            solution = self._solve(over)
            if solution is None:  # too little time or memory
                break
            bound = bound or solution.bound
            made = self._followed(solution)
            run = self.engine.run(made)
            if least is None or run.peak < least.peak:
                least = run
            if self.memory is None or run.peak <= self.memory:
                made, run = self._polished(*self._shorter(made, run), bound)
                return self._or_known(made, run, bound)
            over += 1.02 * (run.peak - self.memory)
        replicated = Assignment(stored=dict(self.pinned))
        made, run, bound = self._or_known(replicated, self.engine.run(replicated), bound)
        if self._holds(run):
            return made, run, bound
        raise PlacementError(self._too_large(least))

    def _solve(self, over: float) -> Solution | None:
        program = Program(
            self.steps,
            self.choices,
            training=self.training,
            memory=self.memory,
            transient=over,
            states=self.states,
            fixed=self.pinned,
        )
        return program.solve(gap=self.gap, limit=self.limit)

    def _too_large(self, least: Run | None) -> str:
        program = Program(self.steps, self.choices, training=self.training, states=self.states, fixed=self.pinned)
        smallest = program.least_memory(limit=self.limit)
        need = max(smallest, 0.0)
        return (
            f"no plan found fits into {self.memory:,.0f} bytes: parameters, what belongs to them and what the backward "
            f"reads take at least {need:,.0f}"
            + (f", and the smallest plan that was tried {least.peak:,.0f}" if least is not None else "")
            + "; use more ranks, a smaller batch, or activation checkpointing"
        )

    def _followed(self, solution: Solution) -> Assignment:
        """All that the solution says of parameters and of borders."""
        made = Assignment()
        for t in self.steps.tensors:
            if t in solution.states and t.step is None:
                made.stored[t] = solution.states[t]
            if t.kind == PARAMETER:
                uses = [solution.uses.get(u) for u in t.users if not u[0].backward]
                first = next((s for s in uses if s is not None), None)
                if first is not None and first != made.stored.get(t) and not any(isinstance(x, str) for x in first):
                    made.used[t] = first
        back = {self.steps.of[op.forward]: self.steps.of[op] for op in self.steps.tape.ops if op.forward is not None}
        for step in self.steps.steps:
            out = step.outputs[0] if step.border else None
            if out is None or step.backward or out not in solution.states or not out.like.dtype.is_floating_point:
                continue
            s = _wanted(out, solution)
            grad = back[step].outputs[0] if step in back else None
            if not any(isinstance(x, str) for x in s):
                made.borders[step] = s, s if grad is None or grad not in solution.states else _wanted(grad, solution)
        return made

    def _shorter(self, made: Assignment, run: Run) -> tuple[Assignment, Run]:
        """The assignment without what changes nothing, by halves."""
        groups = self._groups(made)
        best, price = made, run

        def without(some: Sequence[tuple[str, str]]) -> bool:
            nonlocal best, price
            gone = {step for key in some for step in groups[key]}
            tried = replace(best, borders={s: v for s, v in best.borders.items() if s not in gone})
            cost = self.engine.run(tried)
            if cost.seconds <= run.seconds * (1 + SAME) and self._holds(cost):
                best, price = tried, cost
                return True
            return False

        def halves(some: list[tuple[str, str]]) -> None:
            if not some or without(some) or len(some) == 1:
                return
            halves(some[: len(some) // 2])
            halves(some[len(some) // 2 :])

        halves(list(groups))
        for t in list(best.used):
            tried = replace(best, used={k: v for k, v in best.used.items() if k is not t})
            cost = self.engine.run(tried)
            if cost.seconds <= run.seconds * (1 + SAME) and self._holds(cost):
                best, price = tried, cost
        return self._tidy(best, price)

    def _tidy(self, made: Assignment, run: Run) -> tuple[Assignment, Run]:
        """The same with parameters cut along their first dim, where that costs nothing."""
        for t, s in list(made.stored.items()):
            if t.kind == INPUT or t in self.pinned:
                continue
            used = made.used.get(t, s)
            first = tuple([0 if isinstance(x, int) and u is None else x for x, u in zip(s, used)])
            if first == s or not fits(first, t.like.shape, self.sizes):
                continue
            tried = replace(made, stored={**made.stored, t: first})
            cost = self.engine.run(tried)
            if cost.seconds <= run.seconds * (1 + SAME) and self._holds(cost):
                made = tried
        return made, self.engine.run(made)

    def _holds(self, run: Run) -> bool:
        return self.memory is None or run.peak <= self.memory

    def _or_known(self, made: Assignment, run: Run, bound: float) -> tuple[Assignment, Run, float]:
        """That, or a well-known plan if one is cheaper."""
        for a in known(self.steps, self.choices).values():
            if any(a.stored.get(t, self.engine.whole) != s for t, s in self.pinned.items()):
                continue
            cost = self.engine.run(a)
            if self._holds(cost) and (cost.seconds < run.seconds * (1 - SAME) or not self._holds(run)):
                made, run = a, cost
        return made, run, min(bound, run.seconds)

    def _polished(self, made: Assignment, run: Run, bound: float) -> tuple[Assignment, Run]:
        """The same with single activations elsewhere, where that helps, until it is near enough to the bound."""
        states = sorted({s for pair in made.borders.values() for s in pair}, key=str)
        for group in self._groups(made).values():
            fitting = [s for s in states if all(fits(s, step.like.operands[0].shape, self.sizes) for step in group)]
            for s in fitting:
                for way in (0, 1):  # the tensor itself, or its gradient
                    if run.seconds * (1 - self.gap) <= bound:
                        return made, run
                    if way == 0 and any(isinstance(x, str) for x in s):
                        continue
                    moved = {k: (s, v[1]) if way == 0 else (v[0], s) for k, v in made.borders.items() if k in group}
                    tried = replace(made, borders={**made.borders, **moved})
                    cost = self.engine.run(tried)
                    if cost.seconds < run.seconds * (1 - SAME) and self._holds(cost):
                        made, run = tried, cost
        return made, run

    def _groups(self, made: Assignment) -> dict[tuple[str, str], list[Step]]:
        """The borders at which it moves something, by the name of the activation."""
        groups: dict[tuple[str, str], list[Step]] = {}
        for step in made.borders:
            groups.setdefault((pattern(step.like.path), step.like.what), []).append(step)
        return groups


def _wanted(t: Tensor, solution: Solution, behind: frozenset[Tensor] = frozenset()) -> State:
    """The state in which all users of a tensor take it, be it behind a border, or else that in which it is made.

    Args:
        behind: the borders on the way to it; a module that repeats may be next to itself.
    """
    found: set[State] = set()
    for user, k in t.users:
        if user.backward != (t.step is not None and t.step.backward):
            continue
        out = user.outputs[0] if user.border else None
        taken = solution.uses.get((user, k))
        if out is not None and out in solution.states and out is not t and out not in behind:
            found.add(_wanted(out, solution, behind | {t}))
        elif taken is not None:
            found.add(taken)
    (first, *others) = found or {solution.states[t]}
    return solution.states[t] if others else first


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


def _fixed(steps: Steps, fixed: Mapping[str, Mapping[str, Placement]], sizes: Mapping[str, int]) -> dict[Tensor, State]:
    found: dict[Tensor, State] = {}
    for name, axes in fixed.items():
        if unknown := [a for a in axes if a not in sizes]:
            raise PlacementError(f"fixed: {name!r} names the axis {unknown[0]!r}, and the mesh has {list(sizes)}")
        placed = [as_placement(axes.get(a, Replicate())) for a in sizes]
        if any(p.is_partial() for p in placed):
            raise PlacementError(f"fixed: {name!r} is Partial on an axis; write Shard(dim) or Replicate()")
        if name == "inputs":
            tensors = steps.of_kind(INPUT)
        else:
            known_names = [n for (kind, n) in steps.tape.values if kind in (PARAMETER, BUFFER)]
            names = {n for n in known_names if fnmatchcase(n, name)}
            names |= {first for other, first in steps.tape.ties.items() if fnmatchcase(other, name)}
            if not names:
                raise PlacementError(f"fixed: {name!r} matches no parameter or buffer of the model")
            tensors = list({steps.which[v] for (_, n), v in steps.tape.values.items() if n in names})
        for t in tensors:
            if name == "inputs":
                found[t] = tuple([p.dim if isinstance(p, Shard) and p.dim < t.like.ndim else None for p in placed])
                continue
            try:
                found[t] = state_of(Layout.of(as_placements(placed, len(placed), t.like.ndim), t.like.ndim))
            except PlacementError as error:
                raise PlacementError(f"fixed: {name!r} of shape {list(t.like.shape)}: {error}") from None
    return found


def plan_of(made: Assignment, steps: Steps, sizes: Mapping[str, int]) -> Plan:
    """An assignment in names."""
    axes = list(sizes)

    def words(s: State) -> Axes:
        return {a: p for a, p in zip(axes, placements_of(s)) if not p.is_replicate()}

    parameters, used = _named(steps, made.stored, words), _named(steps, made.used, words, all_of=True)
    inputs: Axes = {}
    for t in steps.of_kind(INPUT):
        inputs |= words(made.stored.get(t, ()))
    activations: dict[str, Activation] = {}
    for step, (s, gradient) in made.borders.items():
        activations[f"{pattern(step.like.path)}.{step.like.what}"] = Activation(words(s), words(gradient))
    return Plan(dict(sizes), parameters, used, inputs, activations)


def _named(
    steps: Steps, states: Mapping[Tensor, State], words: Callable[[State], Axes], all_of: bool = False
) -> dict[str, Axes]:
    """States of parameters and buffers by name: by pattern where no other tensor has the same one."""
    found: dict[str, Axes] = {}
    tensors = [t for kind in (PARAMETER, BUFFER) for t in steps.of_kind(kind)]
    for t in tensors:
        if t not in states or not (all_of or words(states[t])):
            continue
        alike = [u for u in tensors if u is not t and u.name == t.name]
        names = [n for (_, n), v in steps.tape.values.items() if steps.which[v] is t]
        for name in names if alike else [t.name]:
            found[name] = words(states[t])
    return found


def _prediction(
    run: Run, bound: float, steps: Steps, choices: Choices, others: Mapping[str, Run], took: tuple[float, float]
) -> Prediction:
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
        others={name: (r.seconds, r.peak) for name, r in others.items()},
        moves=tuple([(at, op, a, b, n, s) for (at, op, a, b), (n, s) in most if s]),
        gathered=tuple(sorted(choices.gathered)),
        took=took,
    )


def _text(s: State) -> str:
    return "".join([str(p) for p in placements_of(s)])


__all__ = ["Mode", "known", "plan_of", "search"]
