"""Options of `torch.compile(model, backend="dtensor", options={...})`: checked, frozen, part of the cache key."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from dtensor.passes import PIPELINE

INNER = ("inductor", "aot_eager", "eager")


@dataclass(frozen=True)
class Options:
    """What the backend does.

    Attributes:
        inner: who runs the graph: "inductor" generates code, "aot_eager" runs the passes' graph operator by operator,
            "eager" runs Dynamo's graph as it is, without AOTAutograd and passes.
        passes: names of the passes to run, in order; None for all of `dtensor.passes.PIPELINE`.
        disable: names of passes to leave out.
        verify: check the graph after every pass.
        memory_budget: bytes of gathered tensors that may be saved for the backward; what is over is gathered again.
            None gathers parameters again and saves the others (`dtensor.passes.Regather`).
        agreement: before a graph first runs, compare with the other ranks what it communicates (`dtensor.agreement`).
    """

    inner: str = "inductor"
    passes: tuple[str, ...] | None = None
    disable: tuple[str, ...] = ()
    verify: bool = True
    memory_budget: int | None = None
    agreement: bool = True

    @staticmethod
    def of(given: Mapping[str, Any] | None) -> "Options":
        """Check the options of a `torch.compile` call.

        Raises:
            ValueError: an unknown option, pass or inner compiler; the message names the nearest known one.
            TypeError: a value of the wrong type.
        """
        given = dict(given or {})
        known = [f.name for f in fields(Options)]
        for name in given:
            if name not in known:
                raise ValueError(f"unknown option {name!r} of backend 'dtensor'{_nearest(name, known)}")
        for name in ("passes", "disable"):
            if given.get(name) is not None:
                given[name] = _names(name, given[name])
        made = Options(**given)
        if made.inner not in INNER:
            raise ValueError(f"unknown inner compiler {made.inner!r}{_nearest(str(made.inner), INNER)}")
        for name in ("verify", "agreement"):
            if not isinstance(getattr(made, name), bool):
                raise TypeError(f"option {name!r} is True or False, got {getattr(made, name)!r}")
        budget = made.memory_budget
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
            raise TypeError(f"option 'memory_budget' is a number of bytes or None, got {budget!r}")
        return made


def _names(option: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not all(isinstance(n, str) for n in given):
        raise TypeError(f"option {option!r} is a list of pass names, got {given!r}")
    known = [p.name for p in PIPELINE]
    for name in given:
        if name not in known:
            raise ValueError(f"unknown pass {name!r} in option {option!r}{_nearest(name, known)}")
    return tuple(given)


def _nearest(name: str, known: Any) -> str:
    found = get_close_matches(name, list(known), n=1)
    listed = ", ".join(known)
    return f"; did you mean {found[0]!r}? Known: {listed}" if found else f"; known: {listed}"


__all__ = ["INNER", "Options"]
