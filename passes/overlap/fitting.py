"""What a backward finds in memory, on the host, or computes and gathers again, such that a step fits into memory.

    values that the backward needs -> program for HiGHS -> graph as all passes will leave it -> bytes at its peak
                                            ^---------------- where it is too much ----------------'

A value is held, put on the host, or computed again of what is there; the program asks for the least seconds that this
takes. How much is held at which place is known for sure only of the graph that later passes make: what is gathered
early, and gradients in buckets, depend on what is decided here. So the program has a constraint only on those places at
which the peak has been, with all other bytes as they were there; it is solved again until the peak is low enough.
(Checkmate, Jain et al., MLSys 2020, asks for the whole schedule in one program, of a size that grows with the square of
the graph's.)
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import fx

from dtensor.errors import ArgumentError, UnsupportedError
from dtensor.prices.machine import Machine
from dtensor.prices.solver import COST, INF, Columns, Model, Rows
from dtensor.program.stages import Stage
from dtensor.torch_private.symbolic_sizes import guard_at_most_example, has_hint

from ..graph import estimate, ir, sizes
from ..graph.copying import copy_graph
from ..graph.lifetimes import Lifetimes
from ..graph.source import place
from .again import compute_again, fetch_early
from .needed import Value, machine_of, needed_values

ROUNDS = 24
"""How often the program is solved at most."""

CLOSE = 0.01
"""A peak that is lower than it may be by at most this fraction of the memory is close enough."""

GAP, SECONDS, NODES = 1e-3, 600.0, 400
"""How far from the best a solution may be, and where the search for a better one ends. Nodes end it, as they are the
same on all ranks."""

PRICES, STEPS = (1e-12, 1e-6), 8
"""Seconds per byte held between which a price is looked for, and how often: at the last everything is put away."""

DEAR = 100.0
"""How many times as much as all else it costs to take twice the memory."""


@dataclass(frozen=True)
class Policy:
    """Where the backward has values of the forward from. What is in neither is computed again.

    Attributes:
        held: they stay in memory.
        away: they are put on the host.
    """

    held: frozenset[fx.Node]
    away: frozenset[fx.Node] = frozenset()


def fitted(
    graph: fx.Graph,
    later: Collection[fx.Node],
    memory: int,
    finished: Callable[[fx.Graph], fx.Graph],
    *,
    fused: bool,
    host: bool = True,
    spare: int = 0,
) -> Policy:
    """The policy that takes the least seconds of those with which a rank never holds more than `memory`.

    Args:
        graph: forward and backward of a whole step.
        later: the nodes of the backward.
        memory: bytes, inputs of the graph included.
        finished: makes of a graph the one that runs.
        fused: whether a compiler fuses operators.
        host: whether values may be put on the host.
        spare: bytes of the memory that are left free.

    Raises:
        ValueError: no such policy was found; the message has the bytes that the smallest takes.
        NotImplementedError: ranks have shards of other sizes, and so other graphs, by which each would decide alone; or
            a size depends on data.
    """
    uneven = next((node for node in graph.nodes if not sizes.is_even(node)), None)
    if uneven is not None:
        raise UnsupportedError(
            f"memory={memory:,}: what a step holds is decided by its graph, which differs between ranks where shards "
            f"differ in size, as those of {place(uneven) or 'a parameter or input'} do; make what is cut a multiple of "
            "the ranks (pad a vocabulary, for instance), or leave memory= out"
        )
    _hold_sizes(graph, memory)
    return _Fitting(graph, later, finished, fused, host).within(memory, spare)


def _hold_sizes(graph: fx.Graph, memory: int) -> None:
    """Let larger inputs be compiled anew, as with them a step would hold more than was counted."""
    for node in graph.nodes:
        lengths = [n for x in ir.tensors(node) for n in x.shape]
        for size in [n for n in [ir.value(node), *lengths] if isinstance(n, torch.SymInt)]:
            if not has_hint(size):
                raise UnsupportedError(
                    f"memory={memory:,}: what a step holds is not known before it runs, as {place(node) or node.name} "
                    "has a size that depends on data; give it a fixed size, or leave memory= out"
                )
            if node.op == "placeholder":
                guard_at_most_example(size)


class _Fitting:
    def __init__(
        self,
        graph: fx.Graph,
        later: Collection[fx.Node],
        finished: Callable[[fx.Graph], fx.Graph],
        fused: bool,
        host: bool,
    ) -> None:
        self.graph, self.later, self.finished, self.fused = graph, set(later), finished, fused
        self.nodes = list(graph.nodes)
        self.place = {node: k for k, node in enumerate(self.nodes)}
        self.machine = machine_of(graph)
        self.values = needed_values(graph, self.later, self.machine, fused=fused, host=host)
        self.least: int | None = None

    def within(self, memory: int, spare: int) -> Policy:
        """The policy, as `fitted`."""
        most = float(memory - spare)
        best = self._by_places(most) or self._by_price(most)
        if best is not None:
            return best
        least = (self.least or 0) + spare
        given = sum([sizes.nbytes(node) for node in self.nodes if node.op == "placeholder"])
        raise ArgumentError(
            f"a step of at most memory={memory:,} bytes was not found; the smallest that was takes {least:,}, "
            f"{given:,} of these for parameters, states of optimizers and inputs. Give it as much, cut parameters over "
            "more ranks, or take a smaller batch"
        )

    def _by_places(self, most: float) -> Policy | None:
        """The cheapest policy found by constraints on the places where the peak has been; None if none fits."""
        aim = most
        others: dict[int, float] = {}
        best: tuple[float, Policy] | None = None
        seen: set[Policy] = set()
        for k in range(ROUNDS):
            with Stage(f"fitting into memory, round {k + 1}", inside=True):
                found = self._solved(others, aim)
                policy = None if found is None else self._policy(found[1])
                peak, held = (0, {}) if policy is None or policy in seen else self._measured(policy)
            if found is None or policy is None:
                break
            if policy in seen:
                if best is not None:
                    break
                aim -= most * CLOSE
                continue
            seen.add(policy)
            cost, chosen = found
            if peak <= most and (best is None or cost < best[0]):
                best = cost, policy
            if peak <= most and (not others or peak >= most * (1 - CLOSE)):
                break
            worst = max(held, key=lambda at: (held[at], -at))
            for at in dict.fromkeys([*others, worst]):
                others[at] = held.get(at, 0) - sum([v.bytes for v in self._there(chosen, at)])
        return None if best is None else best[1]

    def _by_price(self, most: float) -> Policy | None:
        """A policy that fits, as bytes that are held cost no more than it takes; None if none does.

        Where peaks are many, those of constraints on some of them give way to others.
        """
        low, high = PRICES
        found = None
        for k in range(STEPS):
            price = high if k == 0 else (low * high) ** 0.5
            with Stage(f"fitting into memory by price, round {k + 1}", inside=True):
                solved = self._solved({}, most, price=price)
                policy = Policy(frozenset()) if solved is None else self._policy(solved[1])
                peak, _ = self._measured(policy)
            if peak <= most:
                found, high = policy, price
            elif k == 0:
                break
            else:
                low = price
        return found

    def _solved(
        self, others: dict[int, float], memory: float, *, price: float = 0.0
    ) -> tuple[float, dict[Value, str]] | None:
        """The cheapest way for each value that is needed, and what all of them cost.

        Args:
            others: place -> bytes there besides those that are decided.
            memory: what may be there in all; more is taken only if there is no other way.
            price: seconds that each byte costs that is held, and a thousand that are there only later.
        """
        columns, constraints = Columns(), Rows()
        which: dict[tuple[Value, str], int] = {}
        calls: dict[fx.Node, int] = {}
        traffic: dict[int, float] = {}
        alone = 1 - self.machine.overlap
        for v in self.values:
            travel = v.bytes / self.machine.host
            for kind in v.kinds:
                cost = v.bytes * (1e-18 + (1.0 if kind == "held" else 1e-3) * price)  # of equals one that holds less
                if kind == "held":
                    cost += v.writing
                elif kind == "away":
                    cost += 2 * travel * alone + 2 * self.machine.host_start
                elif v.call is v.node:
                    cost += v.seconds
                which[v, kind] = columns.add(cost, integer=True)
                if kind == "away":
                    traffic[which[v, kind]] = travel
                if kind == "again" and v.call is not v.node:
                    if v.call not in calls:
                        calls[v.call] = columns.add(v.seconds)
                    constraints.add({calls[v.call]: 1.0, which[v, kind]: -1.0}, 0.0, INF)
        for v in self.values:
            ways = {which[v, kind]: 1.0 for kind in v.kinds}
            constraints.add(ways, 1.0 if v.reads else 0.0, 1.0)
            if "again" in v.kinds:
                for x in v.made_of:
                    terms = {which[x, kind]: 1.0 for kind in x.kinds}
                    constraints.add({**terms, which[v, "again"]: -1.0}, 0.0, INF)
        whole = sum(columns.cost) or 1.0
        if traffic:
            # What travels longer than the forward, or the backward, computes is waited for.
            forward, backward = self._computing()
            late = columns.add(1.0, upper=1e6)
            for seconds in (forward, backward):
                constraints.add({**traffic, late: -1.0}, -INF, seconds)
        for at, rest in others.items():
            terms = self._bytes_at(at, which, columns, constraints)
            over = columns.add(DEAR * whole, upper=1e3)
            constraints.add({**{k: n / memory for k, n in terms.items()}, over: -1.0}, -INF, 1 - rest / memory)
        found = Model(columns, constraints, COST / whole).solve(GAP, SECONDS, most=NODES)
        if found is None:
            return None
        return found.value / COST * whole, {v: kind for (v, kind), k in which.items() if found.x[k] > 0.5}

    def _bytes_at(self, at: int, which: dict[tuple[Value, str], int], columns: Columns, rows: Rows) -> dict[int, float]:
        """What values take at a place, beside what they take in the forward anyway: variable -> bytes.

        A value that is not held is there from when the backward needs it first until it is read last, be it by what is
        computed of it again.
        """
        by: dict[Value, Known] = {}
        first: dict[Value, Known] = {}
        terms: dict[int, float] = {}
        for v in reversed(self.values):
            again = [(c, which[c, "again"]) for c in v.makes if (c, "again") in which]
            by[v] = _is_needed(any(k <= at for k in v.reads), [(by[c], r) for c, r in again], columns, rows)
            first[v] = _is_new(any(k < at for k in v.reads), [(first[c], r) for c, r in again], columns, rows)
            # One of these is needed at the place or later: the value itself, or what is computed of it there.
            ends: list[list[Known]] = [[True]] if any(k >= at for k in v.reads) else [[r, first[c]] for c, r in again]
            for kind in v.kinds:
                began: Known = v.last < at if kind == "held" else by[v]
                ways = [[which[v, kind], began, *end] for end in ends]
                ways = [[one for one in way if one is not True] for way in ways if not any(one is False for one in way)]
                if not ways or (kind == "again" and v.unwritten):
                    continue
                if [which[v, kind]] in ways:
                    terms[which[v, kind]] = float(v.bytes)
                    continue
                there = columns.add()
                terms[there] = float(v.bytes)
                for way in ways:
                    rows.add({there: 1.0, **dict.fromkeys(way, -1.0)}, 1.0 - len(way), INF)
        return terms

    def _there(self, chosen: dict[Value, str], at: int) -> list[Value]:
        """The values that a solution has at a place, as `_bytes_at`."""
        found: list[Value] = []
        by: dict[Value, bool] = {}
        first: dict[Value, bool] = {}
        for v in reversed(self.values):
            again = [c for c in v.makes if chosen.get(c) == "again"]
            by[v] = any(k <= at for k in v.reads) or any(by[c] for c in again)
            first[v] = not any(k < at for k in v.reads) and all(first[c] for c in again)
            needed = any(k >= at for k in v.reads) or any(first[c] for c in again)
            kind = chosen.get(v)
            held = kind == "held" and v.last < at
            back = kind is not None and kind != "held" and by[v] and not (kind == "again" and v.unwritten)
            if needed and (held or back):
                found.append(v)
        return found

    def _computing(self) -> tuple[float, float]:
        """Seconds that products of forward and backward take."""
        found = [0.0, 0.0]
        for node in self.nodes:
            if node.op == "call_function" and (flops := estimate.flops_of(node)):
                found[node in self.later] += self.machine.seconds(flops, 0.0, torch.float32)
        return found[0], found[1]

    def _policy(self, chosen: dict[Value, str]) -> Policy:
        of = {kind: frozenset([v.node for v, k in chosen.items() if k == kind]) for kind in ("held", "away")}
        return Policy(of["held"], of["away"])

    def _measured(self, policy: Policy) -> tuple[int, dict[int, int]]:
        """The bytes at the peak of the graph that will run, and the most at each place of this one."""
        trial = copy_graph(self.graph)
        twin = dict(zip(self.nodes, trial.nodes, strict=True))
        applied(trial, {twin[n] for n in self.later}, policy, self.machine, twin)
        after = Lifetimes(self.finished(trial), fused=self.fused)
        known = {node.name: k for node, k in self.place.items() if node.all_input_nodes}
        found: dict[int, int] = {}
        at = 0
        for node, held in zip(after.nodes, after.held):
            at = known.get(node.name, at)
            found[at] = max(found.get(at, 0), after.given + held)
        self.least = after.peak if self.least is None else min(self.least, after.peak)
        return after.peak, found


Known = int | bool
"""Whether something is the case: a variable, or a constant."""


def _is_needed(reads: bool, makes: list[tuple[Known, int]], columns: Columns, rows: Rows) -> Known:
    """Whether the backward needs a value up to a place, or more than that.

    Args:
        reads: whether it reads it.
        makes: for each value that may be computed of it whether that is needed, and the variable that says if it is
            computed again.
    """
    makes = [(n, r) for n, r in makes if n is not False]
    if reads or not makes:
        return reads
    found = columns.add()
    for n, r in makes:
        known = {} if n is True else {n: -1.0}
        rows.add({found: 1.0, r: -1.0, **known}, -float(len(known)), INF)
    return found


def _is_new(reads: bool, makes: list[tuple[Known, int]], columns: Columns, rows: Rows) -> Known:
    """Whether the backward does not need a value before a place, or more than that. The arguments are those of
    `_is_needed`, but for `makes`, which says of each value whether it is new as well."""
    makes = [(n, r) for n, r in makes if n is not True]
    if reads or not makes:
        return not reads
    found = columns.add()
    old: dict[int, float] = {}
    for n, r in makes:
        if n is False:
            old[r] = 1.0
        else:
            both = columns.add()
            rows.add({r: 1.0, both: -1.0}, 0.0, INF)
            rows.add({n: 1.0, both: 1.0}, -INF, 1.0)
            old[both] = 1.0
    rows.add({found: 1.0, **old}, 1.0, INF)
    return found


def applied(
    graph: fx.Graph,
    later: Collection[fx.Node],
    policy: Policy,
    machine: Machine,
    twin: dict[fx.Node, fx.Node] | None = None,
) -> int:
    """Rewrite a graph by a policy, and return how many nodes it has more. `twin` has the graph's own node for each node
    of the policy."""
    held, away = ([n if twin is None else twin[n] for n in some] for some in (policy.held, policy.away))
    found = compute_again(graph, later, held, away)
    fetch_early(graph, machine)
    return found


__all__ = ["Policy", "applied", "fitted"]
