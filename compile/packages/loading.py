"""Loads packages: frames that a package holds are not compiled."""

import logging
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

from dtensor.errors import PackageError
from dtensor.program import environment
from dtensor.program.stages import SWITCH
from dtensor.torch_private.frames import FrameRecorder, no_longer
from dtensor.torch_private.phases import LOADING, phase

from .archive import World, read
from .entries import Entry, changed_settings, changed_source, put_together
from .identities import digest

log: logging.Logger = logging.getLogger("dtensor")

AGAIN = "make the package again"


@dataclass
class Package:
    """A package that this process loaded.

    Attributes:
        path: its file.
        plain: digests of frames that are not compiled.
        strict: whether a frame that it does not hold is an error.
        refused: why nothing is taken from it; "" if it fits.
        taken: names of the frames that were taken from it, in order.
        missed: names of frames that were compiled, and why.
    """

    anew: ClassVar[bool] = False

    path: Path
    world: World = field(repr=False)
    entries: Sequence[Entry] = field(repr=False)
    plain: set[str] = field(default_factory=set[str], repr=False)
    strict: bool = False
    refused: str = ""
    taken: list[str] = field(default_factory=list[str])
    missed: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    _compared: bool = field(default=False, repr=False)

    def answer(self, frame: Any, compiler: str) -> Any:
        """As `dtensor.torch_private.frames.Handler`.

        Raises:
            PackageError: with `strict`, the frame is not in the package, or does not fit.
        """
        name = frame.f_code.co_qualname
        code = digest(frame.f_code)
        if code in self.plain and not any(e.digest == code for e in self.entries):
            return None
        with phase(LOADING):
            self._compare()
            found, why = (None, f"{self.refused}; {AGAIN}") if self.refused else self._entry(frame, compiler)
        if found is not None:
            if not self.taken:
                tell(f"dtensor: {name} is taken from the package {self.path}, and not compiled")
            self.taken.append(name)
            log.info("%s is taken from the package %s, not compiled", name, self.path)
            return found
        if code in self.plain:
            return None
        if self.strict:
            raise PackageError(f"{name} cannot be taken from the package {self.path}: {why}")
        self.missed.append((name, why))
        log.warning("%s is compiled, not taken from the package %s: %s", name, self.path, why)
        return None

    def unload(self) -> None:
        """Take nothing from the package any more. What was taken stays."""
        no_longer(self)

    def _compare(self) -> None:
        """Compare where the package was made with this process, when the first frame is asked for: by then there are
        meshes."""
        if not self._compared:
            self._compared = True
            self.refused = self.refused or self.world.difference(World.here())

    def _entry(self, frame: Any, compiler: str) -> tuple[Any, str]:
        code, why = digest(frame.f_code), ""
        for entry in [e for e in self.entries if e.digest == code]:
            if entry.compiler != compiler:
                difference = f"torch.compile was given {entry.compiler}, and is given {compiler}; {AGAIN}"
            elif difference := changed_settings(entry) or changed_source(entry):
                difference += f"; {AGAIN}"
            else:
                found, difference = put_together(entry, frame)
                if found is not None:
                    return found, ""
            why = why or difference
        return None, why or self._unknown(frame)

    def _unknown(self, frame: Any) -> str:
        if any(e.function == frame.f_code.co_qualname for e in self.entries):
            return f"its source has changed; {AGAIN}"
        return "the package does not hold it; call it while the package is made (dtensor package --steps N)"

    def recording(self, frame: Any, compiler: str) -> AbstractContextManager[FrameRecorder | None]:
        """As `dtensor.torch_private.frames.Handler`: what is compiled is not kept."""
        return nullcontext()


def tell(line: str) -> None:
    """Write a line to standard error, on rank 0, unless DTENSOR_PROGRESS=0."""
    if environment.is_on(SWITCH) is not False and not (dist.is_initialized() and dist.get_rank()):
        print(line, file=sys.stderr, flush=True)


def opened(path: Path, sha256: str = "", strict: bool = False) -> Package:
    """Read a package, and compare where it was made with this process.

    Raises:
        PackageError: as `archive.read`.
    """
    world, entries, plain = read(path, sha256)
    made = Package(path, world, entries, plain, strict)
    made.refused = world.difference(World.here(), meshes=False)
    return made


__all__ = ["Package", "opened"]
