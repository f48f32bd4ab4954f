"""What the engine would do with a step under a plan: the layouts it chooses operator by operator, and their price.

This is `dispatch` on a tape: the same rules and the same choice of the cheapest candidate for the operands at hand,
with the prices of the search. So a plan found can be compared with what will run, and plans of one's own with it.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ...prices.links import WORK
from ...rules.choose import choose
from .choices import Choices, Option, seconds_of_optimizer
from .memory import Ends, Held, Memory, part_taken
from .regime import USUAL, Regime, on_parts
from .schedule import Half
from .states import State, first_start, fitting, layout_of, parts, state_of
from .steps import Step, Steps, Tensor, is_free, pattern
from .tape import INPUT, PARAMETER, Value

SUMS = 24
"""Bytes for each input that ranks exchange to compare it."""


@dataclass
class Assignment:
    """Where tensors are, in the terms of the search.

    Attributes:
        stored: tensor of parameters, buffers or inputs -> its state; all others are replicated.
        used: tensor of parameters -> the state in which the forward reads it.
        borders: border of the forward -> the state in which it hands a tensor on, and that of the gradient on its way
            back.
    """

    stored: dict[Tensor, State] = field(default_factory=dict[Tensor, State])
    used: dict[Tensor, State] = field(default_factory=dict[Tensor, State])
    borders: dict[Step, tuple[State, State]] = field(default_factory=dict[Step, tuple[State, State]])


@dataclass
class Run:
    """What the engine does with a step.

    Attributes:
        forward, backward: what runs when.
        parts: number of microbatches.
        sent: whether any gradient of a parameter is moved.
        waiting: seconds of moves that computation waits for.
        seconds: of the whole step.
        updating: seconds of the optimizer.
        peak: the most bytes that a rank holds. at_most: those that it may hold, as compilers order kernels.
        static: bytes of parameters, gradients and optimizer states.
        by_path: name of a module, as a pattern -> seconds of computation, and of moves.
        held: likewise -> bytes of parameters with what belongs to them, and bytes kept for the backward.
        moves: (step, operand) -> from which state to which, how often, and seconds each.
        states: step -> states of its outputs, of the last operator like it.
    """

    forward: Half
    backward: Half
    waiting: float = 0.0
    seconds: float = 0.0
    updating: float = 0.0
    parts: int = 1
    sent: bool = False
    peak: float = 0.0
    at_most: float = 0.0
    static: float = 0.0
    by_path: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    held: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    moves: Counter[Any] = field(default_factory=Counter[Any])
    states: dict[Step, tuple[State | None, ...]] = field(default_factory=dict[Step, tuple[State | None, ...]])

    def half(self, backward: bool) -> Half:
        """The forward or the backward."""
        return self.backward if backward else self.forward

    @property
    def least(self) -> float:
        """Seconds of the whole step, if all moves that can be hidden were hidden."""
        return self.waiting + self.forward.least + self.backward.least + self.updating

    @property
    def computing(self) -> float:
        """Seconds of computation."""
        return self.forward.computing + self.backward.computing

    @property
    def beside(self) -> float:
        """Seconds of moves that run beside computation."""
        return self.forward.beside + self.backward.beside


class Engine:
    """Runs assignments on a tape.

    Args:
        steps: the step.
        choices: the mesh and its options.
        regime: how it is run.

    Attributes:
        comparing: seconds in which ranks compare their inputs, whatever the placements.
    """

    def __init__(self, steps: Steps, choices: Choices, regime: Regime = USUAL) -> None:
        self.steps: Steps = steps
        self.choices: Choices = choices
        self.regime: Regime = regime
        self.training: bool = regime.training
        self.kept: float = regime.states
        self.axes: int = len(choices.network.sizes)
        self.whole: State = (None,) * self.axes
        self._chosen: dict[Any, tuple[tuple[State, ...], tuple[State | None, ...], int, float, float]] = {}
        self._ends = Ends(steps)
        self.comparing: float = self._comparing()

    def local(self, v: Value, state: State) -> float:
        """Bytes of a tensor that a rank holds."""
        return v.bytes / parts(state, self.choices.network.sizes)

    def run(self, given: Assignment) -> Run:
        """Price an assignment."""
        forward, backward = (Half(self.choices.network, self.choices.machine, self._ends.needs) for _ in range(2))
        made = Run(forward, backward, parts=self.regime.parts)
        sizes = self.choices.network.sizes
        if not all(
            self.regime.divides(t.like.shape, given.stored.get(t, self.whole), sizes) for t in self.steps.batch()
        ):
            made.parts = 1
        states: dict[Value, State] = {}
        same: dict[Value, Value] = {}  # what a border hands on as it is
        known: set[tuple[Value, State, bool]] = set()
        moved: set[tuple[Value, State]] = set()  # in the forward, which is saved for the backward
        read: dict[tuple[Value, bool], State] = {}
        memory = Memory(self._ends, len(self.steps.tape.ops))
        grown: dict[int, int] = {}
        makers: dict[int, Step] = {}
        start = 0.0
        for v in self.steps.tape.values.values():
            t = self.steps.which[v]
            states[v] = given.stored.get(t, self.whole)
            mine = self.local(v, states[v])
            trained = v.kind == PARAMETER and self.training and v.name in self.steps.tape.gradients
            static = mine * (2 + self.kept if trained else 1)
            made.static += static
            made.held.setdefault(pattern(v.name.rpartition(".")[0]), [0.0, 0.0])[0] += static
            start -= mine if trained else 0.0  # its gradient, until there is one
            if trained:
                made.updating += seconds_of_optimizer(mine, self.choices.machine, self.kept)
        self._compare_inputs(made, states)
        for index, op in enumerate(self.steps.tape.ops):
            step = self.steps.of[op]
            if step.plain:
                continue
            ins: list[State] = []
            for v in op.operands:
                s = states.get(v, self.whole)
                if v.kind == PARAMETER:
                    t = self.steps.which[v]
                    want = given.used.get(t)
                    if want is not None and want != s:
                        if (v, op.backward) not in read:
                            read[v, op.backward] = want
                            self._gather(made, memory, index, v, s, want, views=True)
                        s = want
                ins.append(s)
            if step.border:
                decided = given.borders.get(self.steps.decided[step], (ins[0], ins[0]))
                want = fitting(decided[op.forward is not None], op.operands[0].ndim)
                wanted, outs, took, extra = (want,), (want,), 0.0, 0.0
            else:
                wanted, outs, _, took, extra = self._choose(step, tuple(ins), made.parts)
            for v, a, b in zip(op.operands, ins, wanted):
                v = same.get(v, v)
                if step.border and a == b and op.outputs[0] is not None:
                    same[op.outputs[0]] = v
                saved = op.backward and (v, b) in moved and v.storage not in self._ends.own
                if op.backward:
                    memory.read(v.storage, part_taken(a, b, sizes, saved))
                if a == b or saved or (v, b, op.backward) in known:
                    continue
                known.add((v, b, op.backward))
                if v.storage in self._ends.own:
                    self._gather(made, memory, index, v, a, b, views=is_free(step))
                    continue
                if not op.backward:
                    moved.add((v, b))
                self._pay(made, index, step, v, a, b)
                if v.storage in memory:
                    memory.copy(index, v.storage, self.local(v, b), self.local(v, a), stays=step.border)
            half = made.half(op.backward)
            half.compute(index, took)
            if extra:
                made.waiting += extra
                half.wait(index, extra, index)
            place = made.by_path.setdefault(_pattern_of(step), [0.0, 0.0])
            place[0] += took
            place[1] += extra
            made.states[step] = outs
            for v, s in zip(op.outputs, outs):
                if v is not None and s is not None:
                    states[v] = s
                    grown.setdefault(v.storage, index)
                    if v.storage not in memory and not is_free(step) and v.storage in self.steps.last:
                        memory.make(index, v.storage, self.local(v, s))
                        makers[v.storage] = step
        for storage, bytes_ in memory.kept():
            made.held.setdefault(_pattern_of(makers[storage]), [0.0, 0.0])[1] += bytes_
        sums: dict[Any, list[Held]] = {}
        for name, g in self.steps.tape.gradients.items():
            p = self.steps.tape.values[PARAMETER, name]
            step = self.steps.of.get(g.maker) if g.maker is not None else None
            index, mine, s = grown.get(g.storage, 0), self.local(g, states[p]), states.get(g, self.whole)
            self._pay(made, index, step, g, s, states[p], final=True)
            how = tuple([(type(a), type(b)) for n, a, b in zip(sizes, s, states[p]) if a != b and n > 1])
            if how:
                sums.setdefault(how, []).append(Held(index, self.local(g, s), mine))
            else:
                memory.grow(index, mine)
        memory.gather(self.choices.bucket)
        for found in sums.values():
            memory.reduce(found, self.choices.bucket)
        made.peak, made.at_most = (made.static + most for most in memory.peak(start))
        made.seconds = forward.seconds() + backward.seconds() + made.updating
        return made

    def _compare_inputs(self, made: Run, states: dict[Value, State]) -> None:
        """A step begins with sums of all inputs, which the ranks compare (`dtensor.parallel.checks.input_check`)."""
        for v in self.steps.tape.of_kind(INPUT).values() if self.comparing else ():
            made.forward.compute(0, self.choices.machine.seconds(0.0, self.local(v, states[v]), v.dtype))
        made.forward.wait(0, self.comparing, -1)
        made.waiting += self.comparing

    def _comparing(self) -> float:
        network, count = self.choices.network, len(self.steps.tape.of_kind(INPUT))
        axes = tuple([a for a, n in enumerate(network.sizes) if n > 1])
        groups = [axes] if len(axes) == 1 or axes in network.merged else [(a,) for a in axes]
        every = [network.terms("all_reduce", group) for group in groups if count]
        return sum([fixed + per_byte * SUMS * count for fixed, per_byte in every])

    def _gather(self, made: Run, memory: Memory, index: int, v: Value, a: State, b: State, *, views: bool) -> None:
        """Move a parameter, or a view of one, for an operator; `views`: and for what reads views of it later. If it is
        the backward that does, it moves the parameter again."""
        op, ends = self.steps.tape.ops[index], self._ends
        t, p = self.steps.which.get(v), ends.own[v.storage]
        again = self.training and views and not op.backward and v.storage in ends.again and v not in ends.in_backward
        again = again and t in self.steps.reread
        held, again = again and v in self.steps.held, again and v not in self.steps.held
        self._pay(made, index, self.steps.of[op], v, a, b, again=ends.again[v.storage] if again else None)
        if self.local(v, b) == self.local(v, a):
            return
        for backward, at in [(op.backward or held, index), *([(True, ends.again[v.storage])] if again else [])]:
            memory.take(at, (p, backward), Held(at, self.local(v, b), self.local(v, a)))

    def _pay(
        self, made: Run, index: int, step: Step | None, v: Value, a: State, b: State, *,
        again: int | None = None, final: bool = False,
    ) -> None:  # fmt: skip
        """Pay for a move at an operator; `again`: for a parameter, at one of the backward too; `final`: of the gradient
        of a parameter."""
        if a == b:
            return
        t, backward = self.steps.which.get(v), final or (step is not None and step.backward)
        beside = final or (t is not None and self.steps.beside(t, backward))
        gradient = final or t in self.steps.late
        shared = gradient or t in self.steps.ahead
        made.sent |= final
        itemsize = self.regime.itemsize(v.dtype) if final else v.dtype.itemsize
        moves = self.choices.moves(v.shape, itemsize, shared)
        price, maker = moves.price(a, b), -1 if v.maker is None else self._ends.place[v.maker]
        places = [(index, made.half(backward))] + ([(again, made.backward)] if again is not None else [])
        made.moves[step, v.shape, a, b, price] += len(places)
        for way, cost in moves.way(a, b).items():
            sending = moves.sending(*way)
            if not beside and not (made.parts > 1 and on_parts(*way)):
                made.waiting += cost
                made.half(backward).wait(index, cost, maker, sending)
            elif beside and shared and sending.op in WORK:
                for at, half in places:
                    half.share(at, sending, gradient=gradient)
            else:
                axis, start = first_start(self.choices.network, *way)
                cost += 0.0 if beside else (made.parts - 1) * start
                taken = self.choices.machine.taken(self.choices.network.links[axis], gradient)
                for at, half in places:
                    half.send(at, cost, taken, maker)
        if step is not None:
            made.by_path.setdefault(_pattern_of(step), [0.0, 0.0])[1] += price * len(places)

    def _choose(self, step: Step, ins: tuple[State, ...], parts: int) -> Any:
        key = step, ins, parts
        found = self._chosen.get(key)
        if found is None:
            found = self._chosen[key] = self._decide(step, ins, parts)
        return found

    def _decide(self, step: Step, ins: tuple[State, ...], parts: int) -> Any:
        op = step.like
        if not op.operands:
            return (
                (),
                tuple([v and self.whole for v in op.outputs]),
                1,
                self.choices.seconds(step, Option((), (), 1), parts),
                0.0,
            )
        specs = [self.choices.spec(v, layout_of(s, v.ndim)) for v, s in zip(op.operands, ins)]
        rule = self.choices.rule(step)
        picked = choose(rule, specs, step.in_place, self.choices.choosing)
        wanted = tuple([state_of(x) for x in picked.inputs])
        outs = tuple([None if x is None or v is None else state_of(x) for x, v in zip(picked.outputs, op.outputs)])
        ways = {f: self._ways(axes) for f, axes in picked.axes.items()}
        split = 1
        for n in ways.values():
            split *= n
        option = Option(wanted, outs, split)
        extra = self.choices.across(step, rule, picked.axes)
        return wanted, outs, split, self.choices.seconds(step, option, parts), extra

    def _ways(self, axes: tuple[int, ...]) -> int:
        n = 1
        for a in axes:
            n *= self.choices.network.sizes[a]
        return n


def _pattern_of(step: Step) -> str:
    return pattern(step.like.path)


__all__ = ["Assignment", "Engine", "Run"]
