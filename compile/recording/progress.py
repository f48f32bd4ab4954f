"""What a user who waits for a program to compile is told: a line for each frame, and on a terminal what goes on now.

    INFO dtensor: rank 0: Transformer.forward is compiled after 9.31 s: tracing 2.90, passes 0.41, generating code …
    Transformer.forward: waiting for rank 3 12 s                                       (on a terminal, while it lasts)

Rank 0 tells of all that it compiles or takes from elsewhere; another rank only of what it compiles by itself. Seconds
are those of the wall clock.
"""

import logging
import sys
import threading
import time

import torch.distributed as dist

from dtensor.mesh import environment
from dtensor.mesh.mesh import known_meshes
from dtensor.torch_private.phases import COMPILING, GENERATING, LOADING, PHASES, Compilation

SWITCH = "DTENSOR_PROGRESS"
"""The variable that asks for the line where standard error is no terminal, too (1), or forbids it (0)."""

FIRST, EVERY = 1.0, 0.5
"""Seconds after which the line appears, and after which it is written again."""

CLEAR = "\r\x1b[2K"
"""What removes the line that the cursor is in."""

WIDTH = 100
"""The most characters of the line."""

log: logging.Logger = logging.getLogger("dtensor")


class Progress:
    """Tells of every compilation of this process; see `dtensor.torch_private.phases.Watcher`."""

    def __init__(self) -> None:
        self._lines: dict[Compilation, Line] = {}

    def began(self, compilation: Compilation) -> None:
        """Show the line, if somebody may look at it."""
        if is_shown():
            self._lines[compilation] = Line(compilation)

    def ended(self, compilation: Compilation) -> None:
        """Remove the line, and log the parts."""
        line = self._lines.pop(compilation, None)
        if line is not None:
            line.stop()
        if compilation.made and (_rank() == 0 or GENERATING in compilation.seconds):
            log.info("%s", told(compilation))


class Line:
    """A line on the terminal that names the phase of a compilation and its seconds, until it is stopped."""

    def __init__(self, compilation: Compilation) -> None:
        self._compilation: Compilation = compilation
        self._stop: threading.Event = threading.Event()
        self._thread: threading.Thread = threading.Thread(target=self._show, name="dtensor progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Remove it."""
        self._stop.set()
        self._thread.join()

    def _show(self) -> None:
        shown = self._stop.wait(FIRST)
        try:
            while not shown:
                sys.stderr.write(CLEAR + now(self._compilation)[:WIDTH])
                sys.stderr.flush()
                if self._stop.wait(EVERY):
                    sys.stderr.write(CLEAR)
                    sys.stderr.flush()
                    return
        except (OSError, ValueError):
            pass  # the terminal is gone


def now(compilation: Compilation) -> str:
    """What a compilation does now, and for how many seconds it has lasted, such as `f: waiting for rank 3, 12 s`."""
    whom = f" for {compilation.whom}" if compilation.whom else ""
    return f"{compilation.name}: {compilation.phase}{whom}, {time.perf_counter() - compilation.began:.0f} s"


def told(compilation: Compilation) -> str:
    """The parts of a compilation that has ended."""
    parts = [f"{name} {compilation.seconds[name]:.2f}" for name in PHASES if name in compilation.seconds]
    compiled = GENERATING in compilation.seconds or COMPILING in compilation.seconds
    how = "taken from elsewhere" if LOADING in compilation.seconds and not compiled else "compiled"
    total = sum(compilation.seconds.values())
    return f"rank {_rank()}: {compilation.name} is {how} after {total:.2f} s: {', '.join(parts)}"


def is_shown() -> bool:
    """Whether there is a line: on rank 0 of a program with a mesh, if its standard error is a terminal.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    asked = environment.is_on(SWITCH)
    wanted = bool(known_meshes()) and sys.stderr.isatty() if asked is None else asked
    return wanted and _rank() == 0


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


__all__ = ["Line", "Progress", "is_shown", "now", "told"]
