"""What a plan is expected to cost, and how that is said."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Prediction:
    """What a plan is expected to cost, for each rank.

    Attributes:
        seconds: of a step. computing: of its computation. waiting: of communication that computation waits for.
            beside: of communication of parameters and gradients, which runs beside computation. updating: of the
            optimizer's update.
        bound: no placements take less, under the same model of cost, with as much recomputed, as many microbatches, and
            each view read where it is made. The engine may move a tensor behind a view by itself, which can save a few
            percent more. 0.0 if it was not computed.
        memory: the most bytes held at once. static: of these, parameters with their gradients and optimizer states.
        modules: name of a module, as a pattern -> seconds of computation, and of communication, of all of that name.
        held: name of a module, as a pattern -> bytes of parameters with what belongs to them, and bytes kept for the
            backward, of all of that name.
        others: name of a well-known plan -> its seconds and memory.
        moves: the most expensive redistributions: (module, operator, from, to, how often, seconds of all).
        gathered: operators without a sharding rule, whose operands are gathered.
        took: seconds of recording the step, and of solving.
        what_if: another condition -> seconds and memory of the best plan under it, if these were searched.
    """

    seconds: float = 0.0
    computing: float = 0.0
    waiting: float = 0.0
    beside: float = 0.0
    updating: float = 0.0
    bound: float = 0.0
    memory: float = 0.0
    static: float = 0.0
    modules: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    held: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    others: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    moves: tuple[tuple[str, str, str, str, int, float], ...] = ()
    gathered: tuple[str, ...] = ()
    took: tuple[float, float] = (0.0, 0.0)
    what_if: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    @property
    def gap(self) -> float:
        """How much of its time, at most, a better plan could save, as a fraction."""
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds else 0.0


def summary(p: Prediction) -> str:
    """What a step is expected to take and to hold, in words."""
    return (
        f"A step is expected to take {duration(p.seconds)}: {duration(p.computing)} of computation, "
        f"{duration(p.waiting)} of communication that it waits for, {duration(p.beside)} beside it, "
        f"{duration(p.updating)} of the optimizer. A rank holds at most {amount(p.memory)}, {amount(p.static)} of it "
        "parameters, gradients and optimizer states."
    )


def duration(seconds: float) -> str:
    """Seconds in words, with three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def amount(bytes_: float) -> str:
    """Bytes in words, with three digits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_ >= scale:
            return f"{bytes_ / scale:.3g} {unit}"
    return f"{bytes_:.0f} B"


__all__ = ["Prediction", "amount", "duration", "summary"]
