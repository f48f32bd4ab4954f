"""`dtensor.compile.report(model)`: what a compiled program communicates, without a dump.

    print(dtensor.compile.report(model))      a few lines: totals, what is most exposed, what requested it
    dtensor.compile.report(model).manifests   everything, as in `dtensor.compile.recording.manifest`

The last few hundred frames that went through the passes are kept. Code that came from Inductor's caches did not go
through them. Frames of graphs from other libraries are kept only if they were dumped.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from torch import nn

from dtensor.errors import ArgumentError

from ..recording.frames import Frame, recent_frames
from ..recording.manifest import manifest
from .reading import Dumped
from .summary import MOST, described

NAMED = 8
"""How many functions an error names."""


@dataclass(frozen=True)
class Report:
    """What some compiled functions communicate on this rank; prints as a summary.

    Attributes:
        names: names of the functions, in the order in which they were compiled.
        manifests: one manifest for each (`dtensor.compile.recording.manifest`).
    """

    names: tuple[str, ...]
    manifests: tuple[dict[str, Any], ...]

    @property
    def collectives(self) -> list[dict[str, Any]]:
        """All collectives, in order."""
        return [c for m in self.manifests for c in m["collectives"]]

    @property
    def bytes(self) -> int:
        """Bytes that this rank puts on the wire for all of them."""
        return sum([c["bytes"] for c in self.collectives])

    def most_exposed(self, most: int = MOST) -> list[dict[str, Any]]:
        """Return the collectives with the longest estimated exposed time, at most `most` of them."""
        return sorted(self.collectives, key=lambda c: -c["exposed"])[:most]

    def __str__(self) -> str:
        return described([Dumped(0, name, Path(), m) for name, m in zip(self.names, self.manifests, strict=True)])


def report(model: nn.Module | Callable[..., Any] | None = None) -> Report:
    """Return what was compiled of a model or function.

    Args:
        model: what was passed to `torch.compile`, or what it returned; None for everything that was compiled.

    Returns:
        The report on the frames compiled of it, in order.

    Raises:
        ValueError: nothing was compiled of it; the message lists what was.
    """
    found = frames_of(model)
    if not found:
        frames = frames_of(None)
        names = sorted({f"{f.name} ({Path(f.file).name}:{f.line})" for f in frames})
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        known = ", ".join(names[:NAMED]) + more or "nothing"
        raise ArgumentError(
            f"no graph of {_called(model)} went through the passes in this process; these did: {known}. Run it once "
            "first, give the function that is compiled, or look at a dump: code from a cache skips the passes"
        )
    return Report(tuple([f"{k:03}_{f.name}" for k, f in enumerate(found)]), tuple([manifest(f) for f in found]))


def frames_of(model: nn.Module | Callable[..., Any] | None) -> list[Frame]:
    """Return what was compiled of a model or function, in order; of everything for None."""
    frames = [f for f in recent_frames() if any(s.timeline is not None for s in f.stories.values())]
    codes = None if model is None else _codes(model)
    return [f for f in frames if codes is None or any(_is_of(f, code) for code in codes)]


def _codes(model: Any) -> set[CodeType]:
    if isinstance(model, nn.Module):
        return {type(m).forward.__code__ for m in model.modules() if hasattr(type(m).forward, "__code__")}
    code = getattr(inspect.unwrap(model), "__code__", None)
    return {code} if code is not None else set()


def _is_of(frame: Frame, code: CodeType) -> bool:
    """Whether a frame is a function, or its continuation after a graph break."""
    lines = [line for _, _, line in code.co_lines() if line]
    named = frame.name == code.co_name or f"resume_in_{code.co_name}_at" in frame.name
    return named and frame.file == code.co_filename and min(lines) <= frame.line <= max(lines)


def _called(model: Any) -> str:
    return "any program" if model is None else getattr(model, "__qualname__", type(model).__name__)


__all__ = ["Report", "frames_of", "report"]
