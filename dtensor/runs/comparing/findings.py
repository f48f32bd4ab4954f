"""Findings: a difference that nothing explains, where it is and what it looks like."""

from dataclasses import dataclass

from .locating import Region
from .values import RecordedValue


@dataclass(repr=False)
class Finding:
    """A difference that is not explained.

    Attributes:
        what: "value" (the runs differ), "collective" (a redistribution changed the tensor), "replicas" (ranks that
            should hold the same do not) or "nonfinite" (NaN or infinity out of finite inputs).
        value: the value, in the run that has the fault.
        other: the value of the other run, or the input of the collective; None for the others.
        ranks: the ranks that hold what differs; all of its ranks if that is unknown.
        region: where in the global tensor; None if unknown.
        relative: the difference, relative to the norm.
        allowed: how large that might have been.
        said: what the difference looks like, such as "2 times as large".
        between: what was computed between the inputs that agree and the value.
        run: "A" if it is in the first run, else "B".
    """

    what: str
    value: RecordedValue
    other: RecordedValue | None
    ranks: tuple[int, ...]
    region: Region | None
    relative: float
    allowed: float
    said: str = ""
    between: tuple[RecordedValue, ...] = ()
    run: str = "B"

    def __repr__(self) -> str:
        apart = f"{self.relative:.1e} of its norm, {self.allowed:.1e} allowed"
        return f"<Finding {self.what} of {self.value}, step {self.value.step}, on ranks {list(self.ranks)}: {apart}>"


__all__ = ["Finding"]
