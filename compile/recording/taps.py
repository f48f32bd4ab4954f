"""The taps of a frame, as the pass `record` takes them: its values are registered in `dtensor.runs.records`."""

from dataclasses import dataclass
from typing import Any

from dtensor.runs.records import taps
from dtensor.runs.records.operator_kinds import new_value, short

from .frames import Frame


@dataclass(frozen=True)
class FrameTaps:
    """Implements `dtensor.passes.stages.Taps` for the graphs of a frame."""

    frame: Frame

    def graph(self, direction: str) -> int:
        """Register a graph."""
        return taps.graph(self.frame, direction)

    def site(
        self, phase: str, module: str, line: str, op: str, number: int, kind: str, spec: Any, inputs: tuple[int, ...]
    ) -> int:
        """Register a value."""
        name = short(op) if kind == "op" else op
        return taps.site(taps.Site(phase, module, line, name, number, kind, spec, inputs))

    def holds_new_value(self, op: str) -> bool:
        """Whether the result is recorded."""
        return new_value(op)


__all__ = ["FrameTaps"]
