"""Keeps what is compiled, as entries of a package."""

import logging
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dtensor.layout.chunks import uneven_noted
from dtensor.mesh.mesh import forget_all_but_meshes
from dtensor.torch_private.frame_data import sizes_seen
from dtensor.torch_private.frames import FrameRecorder, Unsupported
from dtensor.torch_private.kernels.libraries import noted_kernels
from dtensor.torch_private.phases import SAVING, phase

from ..backends.compare_ranks import Collectives, overheard
from ..recording.frames import recent_frames
from .entries import Entry, Noted, NotPortable, by_reference, take_apart
from .hooks import hooks
from .identities import digest

log: logging.Logger = logging.getLogger("dtensor")


@dataclass
class Kept:
    """What was compiled.

    Attributes:
        entries: one for each compiled frame.
        left_out: names of frames that cannot be taken to another process, and why.
        plain: digests of frames that Dynamo left to Python.
        collectives: what the graphs communicate: the ranks, and what ranks compare.
    """

    entries: list[Entry] = field(default_factory=list[Entry])
    left_out: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    plain: set[str] = field(default_factory=set[str])
    collectives: list[Collectives] = field(default_factory=list[Collectives])


@contextmanager
def kept(
    frame: Any, compiler: str, keep: Callable[[Entry | NotPortable | None, list[Collectives]], None]
) -> Iterator[FrameRecorder]:
    """A context in which Dynamo compiles `frame`; `keep` is called with what it made, or with why that cannot be kept.

    It is called with None if Dynamo left the frame to Python, and not at all if it raised.
    """
    code: types.CodeType = frame.f_code
    forget_all_but_meshes()  # so that all lengths are computed again, and uneven ones noted
    recorder = FrameRecorder(reduce=by_reference)
    sizes, before = sizes_seen(), recent_frames()
    registered = hooks(code, frame.f_locals, frame.f_globals)
    with noted_kernels() as kernels, uneven_noted() as lengths, overheard() as heard:
        yield recorder
    if recorder.code is None and not recorder.refused:
        keep(None, heard)
        return
    try:
        with phase(SAVING):
            seen = {code: known for code, known in sizes_seen().items() if known != sizes.get(code)}
            noted = Noted(kernels, lengths, seen, registered, before)
            made: Entry | NotPortable = take_apart(code, recorder, noted, compiler)
    except NotPortable as why:
        made = why
    except Exception as error:  # the frame is compiled, and runs; it is only not kept
        made = NotPortable(f"{type(error).__name__}: {error}")
    keep(made, heard)


class Keeper:
    """Keeps everything that is compiled."""

    anew: ClassVar[bool] = True

    def __init__(self) -> None:
        self.kept: Kept = Kept()

    @contextmanager
    def recording(self, frame: Any, compiler: str) -> Iterator[FrameRecorder]:
        """As `dtensor.torch_private.frames.Handler`."""
        name = frame.f_code.co_qualname

        def keep(made: Entry | NotPortable | None, heard: list[Collectives]) -> None:
            if made is None:
                self.kept.plain.add(digest(frame.f_code))
                return
            if isinstance(made, NotPortable):
                log.warning("%s is left out of the package: %s", name, made)
                self.kept.left_out.append((name, str(made)))
                return
            self.kept.entries.append(made)
            self.kept.collectives += heard

        try:
            with kept(frame, compiler, keep) as recorder:
                yield recorder
        except Unsupported:  # Dynamo leaves the frame to Python, unless the user forbids it
            self.kept.plain.add(digest(frame.f_code))
            raise

    def answer(self, frame: Any, compiler: str) -> None:
        """As `dtensor.torch_private.frames.Handler`: nothing is taken from elsewhere."""


__all__ = ["Keeper", "Kept", "kept"]
