"""What a user who waits for a program to compile is told.

A compilation is a stage (`dtensor.program.stages`), which is told every few seconds if it lasts. Once it has ended its
parts are logged, and a frame that is compiled again says why:

    INFO dtensor: rank 0: Transformer.forward is compiled after 9.31 s: tracing 2.90, passes 0.41, generating code …
    INFO dtensor.progress: rank 0: Transformer.forward is compiled again: gradients are off now, and were on

Rank 0 tells of all that it compiles or takes from elsewhere; another rank only of what it compiles by itself. Seconds
are those of the wall clock.
"""

import logging

from dtensor.mesh.mesh import known_meshes
from dtensor.program.stages import Stage, rank, say
from dtensor.torch_private.phases import COMPILING, GENERATING, LOADING, PHASES, Compilation

from .recompiled import why_again

log: logging.Logger = logging.getLogger("dtensor")


class Progress:
    """Tells of every compilation of this process; see `dtensor.torch_private.phases.Watcher`.

    The stages of compilations are told only in a program with a mesh: others are none of this library's.
    """

    def __init__(self) -> None:
        self._stages: dict[Compilation, Stage] = {}
        self._said: set[str] = set()

    def began(self, compilation: Compilation) -> None:
        """Begin a stage."""
        if known_meshes():
            stage = self._stages[compilation] = Stage(f"compiling {compilation.name}", compilation.steps)
            stage.__enter__()

    def repeated(self, compilation: Compilation) -> None:
        """Say why the frame is compiled again, once for each reason."""
        stage, why = self._stages.get(compilation), why_again(compilation.again)
        if stage is None:
            return
        stage.what = f"compiling {compilation.name} again"
        text = f"{compilation.name} is compiled again: {why}"
        if rank() == 0 and text not in self._said:
            self._said.add(text)
            say(text)

    def ended(self, compilation: Compilation) -> None:
        """End the stage, and log the parts."""
        stage = self._stages.pop(compilation, None)
        shown = stage is not None and stage.told
        if stage is not None:
            stage.told = False  # what follows says more
            stage.__exit__(None)
        if compilation.made and (rank() == 0 or GENERATING in compilation.seconds):
            if shown:
                say(told(compilation))
            else:
                log.info("rank %d: %s", rank(), told(compilation))


def told(compilation: Compilation) -> str:
    """The parts of a compilation that has ended."""
    parts = [f"{name} {compilation.seconds[name]:.2f}" for name in PHASES if name in compilation.seconds]
    compiled = GENERATING in compilation.seconds or COMPILING in compilation.seconds
    how = "taken from elsewhere" if LOADING in compilation.seconds and not compiled else "compiled"
    total = sum(compilation.seconds.values())
    return f"{compilation.name} is {how} after {total:.2f} s: {', '.join(parts)}"


__all__ = ["Progress", "told"]
