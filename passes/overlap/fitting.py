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
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from dtensor.comm.collectives import KEPT
from dtensor.comm.host_memory import to_host
from dtensor.errors import ArgumentError, UnsupportedError
from dtensor.prices.machine import Machine
from dtensor.prices.operators import is_fused
from dtensor.prices.solver import COST, INF, Columns, Model, Rows
from dtensor.program.stages import Stage

from ..graph import estimate, groups, ir, sizes
from ..graph.copying import copy_graph
from ..graph.lifetimes import Lifetimes, is_view
from ..graph.source import place
from .again import compute_again, fetch_early, is_repeatable

ROUNDS = 24
"""How often the program is solved at most."""

CLOSE = 0.01
"""A peak that is lower than it may be by at most this fraction of the memory is close enough."""

MARGIN = 0.015
"""The fraction of the memory that is left free where a compiler fuses operators, which may write more than was said."""

GAP, SECONDS, NODES = 1e-3, 600.0, 400
"""How far from the best a solution may be, and where the search for a better one ends. Nodes end it, as they are the
same on all ranks."""

PRICES, STEPS = (1e-12, 1e-6), 8
"""Seconds per byte held between which a price is looked for, and how often: at the last everything is put away."""

DEAR = 100.0
"""How many times as much as all else it costs to take twice the memory."""

LEAST = 4096
"""Bytes of values that are worth a copy to the host."""


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
) -> Policy:
    """The policy that takes the least seconds of those with which a rank never holds more than `memory`.

    Args:
        graph: forward and backward of a whole step.
        later: the nodes of the backward.
        memory: bytes, inputs of the graph included.
        finished: makes of a graph the one that runs.
        fused: whether a compiler fuses operators.
        host: whether values may be put on the host.

    Raises:
        ValueError: no such policy was found; the message has the bytes that the smallest takes.
        NotImplementedError: ranks have shards of other sizes, and so other graphs, by which each would decide alone.
    """
    uneven = next((node for node in graph.nodes if not sizes.is_even(node)), None)
    if uneven is not None:
        raise UnsupportedError(
            f"memory={memory:,}: what a step holds is decided by its graph, which differs between ranks where shards "
            f"differ in size, as those of {place(uneven) or 'a parameter or input'} do; make what is cut a multiple of "
            "the ranks (pad a vocabulary, for instance), or leave memory= out"
        )
    return _Fitting(graph, later, finished, fused, host).within(memory)


@dataclass(eq=False)
class _Value:
    """A value of the forward that the backward may need: one tensor, with its views.

    Attributes:
        node: makes its memory.
        call: the call that computes it, of which it may be one of several results.
        place: of the node.
        bytes: on the rank that has most of it.
        reads: places in the backward that read it.
        last: place of the last node of the forward that reads it.
        made_of: values of which it is computed.
        kinds: the ways in which it may be there: "held", "away", "again".
        makes: values that are computed of it.
        seconds: that it takes to compute it again.
        writing: seconds that it takes to hold it, if it is written for that alone.
        unwritten: whether it is computed where it is read, and never written, if it is not held.
    """

    node: fx.Node
    call: fx.Node
    place: int
    bytes: int
    reads: list[int] = field(default_factory=list[int])
    last: int = 0
    made_of: list["_Value"] = field(default_factory=list["_Value"])
    kinds: tuple[str, ...] = ()
    makes: list["_Value"] = field(default_factory=list["_Value"])
    seconds: float = 0.0
    writing: float = 0.0
    unwritten: bool = False


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
        self.home: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            self.home[node] = self.home[node.all_input_nodes[0]] if is_view(node) else node
        self.values: dict[fx.Node, _Value] = {}
        self._find()
        self._price(host)

    # What there is to decide.

    def _find(self) -> None:
        returned = {self.home[x] for node in self.nodes if node.op == "output" for x in node.all_input_nodes}
        todo: list[_Value] = []
        for node in self.nodes:
            for x in node.all_input_nodes:
                home = self.home[x]
                if node in self.later and self._is_open(home, returned):
                    value = self._value(home, todo)
                    value.reads.append(self.place[node])
        while todo:
            value = todo.pop()
            for home in dict.fromkeys([self.home[x] for x in value.call.all_input_nodes]):
                if self._is_open(home, returned):
                    value.made_of.append(self._value(home, todo))
        for node in self.nodes:
            for x in node.all_input_nodes:
                value = self.values.get(self.home[x])
                if value is not None and node not in self.later:
                    value.last = max(value.last, self.place[node])
        for value in self.values.values():
            for x in value.made_of:
                x.makes.append(value)

    def _is_open(self, home: fx.Node, returned: Collection[fx.Node]) -> bool:
        """Whether it is to be decided where the backward has a value from."""
        made = home.op == "call_function" and home not in self.later and home not in returned
        made = made and home.target is not to_host
        return made and isinstance(ir.value(home), torch.Tensor)

    def _value(self, node: fx.Node, todo: list[_Value]) -> _Value:
        if node not in self.values:
            call = node.all_input_nodes[0] if node.target is getitem else node
            self.values[node] = _Value(node, call, self.place[node], sizes.nbytes(node), last=self.place[node])
            todo.append(self.values[node])
        return self.values[node]

    def _in_order(self, *, reverse: bool = False) -> list[_Value]:
        return sorted(self.values.values(), key=lambda v: v.place, reverse=reverse)

    def _price(self, host: bool) -> None:
        for value in self.values.values():
            mark, call = value.node.meta.get("recompute"), value.call
            kept = KEPT in value.node.meta.get("custom", ())
            again = is_repeatable(call) and is_repeatable(value.node) and not ir.is_written(value.node)
            if again and mark in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE):
                value.kinds = ("again",)
                continue
            saved = kept or mark in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
            dense = ir.memory_order(ir.value(value.node)) is not None and not ir.is_written(value.node)
            away = host and not kept and dense and value.bytes >= LEAST
            value.kinds = ("held", *(["away"] if away else []), *(["again"] if again and not saved else []))
        for value in self.values.values():
            readers = [x for x in value.node.users if x not in self.later]
            value.unwritten = self.fused and is_fused(value.call.target)
            alone = value.unwritten and all(is_fused(x.target) or is_view(x) for x in readers)
            value.writing = value.bytes / self.machine.memory if alone else 0.0
            value.seconds = self._seconds(value)

    def _seconds(self, value: _Value) -> float:
        """Seconds that it takes to compute a value again; of one of several results, what all of them take."""
        call, machine = value.call, self.machine
        if value.unwritten:
            return 0.5 * value.bytes / machine.memory
        moved = sum([sizes.nbytes(x) for x in (*call.all_input_nodes, value.node)])
        found = machine.seconds(estimate.flops_of(call), moved, ir.value(value.node).dtype)
        c = ir.collective(call)
        if c is not None and c.op != "shard":
            found += groups.seconds(c.op, max(value.bytes, sizes.nbytes(c.x)), c.group)
        return found

    # The program.

    def within(self, memory: int) -> Policy:
        """The policy, as `fitted`."""
        most = memory * (1 - MARGIN if self.fused else 1.0)
        best = self._by_places(most) or self._by_price(most)
        if isinstance(best, Policy):
            return best
        given = sum([sizes.nbytes(node) for node in self.nodes if node.op == "placeholder"])
        raise ArgumentError(
            f"a step of at most memory={memory:,} bytes was not found; the smallest that was takes {best:,}, {given:,} "
            "of these for parameters, states of optimizers and inputs. Give it as much, cut parameters over more "
            "ranks, or take a smaller batch"
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

    def _by_price(self, most: float) -> Policy | int:
        """A policy that fits, as bytes that are held cost no more than it takes; or the least bytes, if none does.

        Where peaks are many, those of constraints on some of them give way to others.
        """
        low, high = PRICES
        found, least = None, 0
        for k in range(STEPS):
            price = high if k == 0 else (low * high) ** 0.5
            with Stage(f"fitting into memory by price, round {k + 1}", inside=True):
                solved = self._solved({}, most, price=price)
                policy = Policy(frozenset()) if solved is None else self._policy(solved[1])
                peak, _ = self._measured(policy)
            if peak <= most:
                found, high = policy, price
            elif k == 0:
                least = peak
                break
            else:
                low = price
        return least if found is None else found

    def _solved(
        self, others: dict[int, float], memory: float, *, price: float = 0.0
    ) -> tuple[float, dict[_Value, str]] | None:
        """The cheapest way for each value that is needed, and what all of them cost.

        Args:
            others: place -> bytes there besides those that are decided.
            memory: what may be there in all; more is taken only if there is no other way.
            price: seconds that each byte costs that is held, and a thousand that are there only later.
        """
        columns, constraints = Columns(), Rows()
        which: dict[tuple[_Value, str], int] = {}
        calls: dict[fx.Node, int] = {}
        traffic: dict[int, float] = {}
        alone = 1 - self.machine.overlap
        for v in self._in_order():
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
        for v in self.values.values():
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

    def _bytes_at(
        self, at: int, which: dict[tuple[_Value, str], int], columns: Columns, rows: Rows
    ) -> dict[int, float]:
        """What values take at a place, beside what they take in the forward anyway: variable -> bytes.

        A value that is not held is there from when the backward needs it first until it is read last, be it by what is
        computed of it again.
        """
        by: dict[_Value, Known] = {}
        first: dict[_Value, Known] = {}
        terms: dict[int, float] = {}
        for v in self._in_order(reverse=True):
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

    def _there(self, chosen: dict[_Value, str], at: int) -> list[_Value]:
        """The values that a solution has at a place, as `_bytes_at`."""
        found: list[_Value] = []
        by: dict[_Value, bool] = {}
        first: dict[_Value, bool] = {}
        for v in self._in_order(reverse=True):
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

    def _policy(self, chosen: dict[_Value, str]) -> Policy:
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


def machine_of(graph: fx.Graph) -> Machine:
    """What most values of a graph are on, as all ranks know it."""
    kinds: list[Any] = [x.device.type for n in graph.nodes for x in ir.tensors(n)]
    return groups.machine("cuda" if kinds.count("cuda") > len(kinds) / 2 else "cpu")


__all__ = ["Policy", "applied", "fitted", "machine_of"]
