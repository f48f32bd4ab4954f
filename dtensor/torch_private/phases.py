"""Where the time goes while a frame is compiled: each moment belongs to one phase, on the thread that compiles.

Torch announces the steps of a compilation to its `ChromiumEventLogger`; those in `EVENTS` begin a phase. The rest of
the library names its own with `phase`. A phase inside another interrupts it, so that the seconds of all add up to the
whole.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch._dynamo.utils import ChromiumEventLogger
from torch._guards import CompileContext

TRACING, PASSES, GENERATING, COMPILING = "tracing", "passes", "generating code", "compiling kernels"
LOADING, WAITING, SAVING = "loading", "waiting", "saving"

PHASES = (TRACING, PASSES, GENERATING, COMPILING, LOADING, WAITING, SAVING)
"""All phases, in the order of execution. Tracing is Dynamo's and AOTAutograd's; passes are those of this library."""

BACKWARD = "entire_backward_compile"
"""Torch's name for compiling a backward when it first runs."""

EVENTS = {
    BACKWARD: GENERATING,
    "_recursive_joint_graph_passes": GENERATING,
    "inductor_compile": GENERATING,
    "PyCodeCache.load_by_key_path": COMPILING,
    "compile_file": COMPILING,
    "async_compile.wait": COMPILING,
    "CachingAutotuner.slow_precompile_config": COMPILING,
    "CachingAutotuner.benchmark_all_configs": COMPILING,
}
"""Torch's name for a step -> the phase that it begins."""


@dataclass(eq=False)
class Compilation:
    """What is known of one frame, or of a backward that is compiled when it first runs, while it is compiled.

    Attributes:
        name: qualified name of the frame's function.
        began: when it began, as `time.perf_counter` gives it.
        seconds: phase -> its seconds so far, but for the one that lasts.
        phase: the phase that lasts.
        whom: what it waits for; "" if it waits for nobody.
        made: whether it led to compiled code.
    """

    name: str
    began: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    phase: str = TRACING
    whom: str = ""
    made: bool = False
    _since: float = 0.0
    _outer: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def __post_init__(self) -> None:
        self._since = self.began

    def enter(self, event: str, phase: str) -> None:
        """Begin a phase, for which `event` stands. What torch does to load a frame belongs to the loading."""
        if self.phase == LOADING and event in EVENTS:
            return
        self._outer.append((event, self.phase))
        self._change(phase)

    def leave(self, event: str) -> None:
        """Return to the phase that `event` interrupted."""
        while any(name == event for name, _ in self._outer):
            name, before = self._outer.pop()
            self._change(before)
            if name == event:
                return

    def _change(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._since
        self.phase, self._since = phase, now


class Watcher(Protocol):
    """What `watch_compilations` tells of every compilation, on the thread that compiles."""

    def began(self, compilation: Compilation) -> None:
        """It has begun."""
        ...

    def ended(self, compilation: Compilation) -> None:
        """It has ended, also by an error."""
        ...


class _Here(threading.local):
    compilation: Compilation | None = None


_here = _Here()
_watchers: list[Watcher] = []
_names: dict[Any, str] = {}


def watch_compilations(watcher: Watcher) -> Callable[[], None]:
    """Tell `watcher` of every compilation from now on, until what is returned is called."""
    if ChromiumEventLogger.log_event_start is not _started:
        ChromiumEventLogger.log_event_start = _started
        ChromiumEventLogger.log_event_end = _ended
    _watchers.append(watcher)
    return lambda: _watchers.remove(watcher)


@contextmanager
def compilation(name: str) -> Iterator[Compilation]:
    """A context in which something is compiled. Within another one it is a part of that."""
    if _here.compilation is not None:
        yield _here.compilation
        return
    made = _here.compilation = Compilation(name)
    told = list(_watchers)
    try:
        for watcher in told:
            watcher.began(made)
        yield made
    finally:
        _finish(made, told)


def _finish(made: Compilation, told: list[Watcher]) -> None:
    _here.compilation = None
    made.enter("end", made.phase)
    for watcher in told:
        watcher.ended(made)


def current() -> Compilation | None:
    """What this thread compiles."""
    return _here.compilation


@contextmanager
def phase(name: str, whom: str = "") -> Iterator[None]:
    """A context that is a phase of what this thread compiles; without effect if it compiles nothing."""
    made = _here.compilation
    if made is None:
        yield
        return
    before, made.whom = made.whom, whom
    made.enter(name, name)
    try:
        yield
    finally:
        made.leave(name)
        made.whom = before


def wait_for(whom: str) -> None:
    """Name what this thread waits for."""
    if _here.compilation is not None:
        _here.compilation.whom = whom


_own_start, _own_end = ChromiumEventLogger.log_event_start, ChromiumEventLogger.log_event_end


def _started(self: Any, event_name: str, *args: Any, **kwargs: Any) -> None:
    made = _here.compilation
    if made is None and event_name == BACKWARD:
        made = _here.compilation = Compilation(
            f"{_names.get(_id(), 'a graph')} (backward)", phase=GENERATING, made=True
        )
        for watcher in list(_watchers):
            watcher.began(made)
    if made is not None:
        if event_name == "entire_frame_compile":
            _names[_id()] = made.name
        elif event_name in EVENTS:
            made.enter(event_name, EVENTS[event_name])
    _own_start(self, event_name, *args, **kwargs)


def _ended(self: Any, event_name: str, *args: Any, **kwargs: Any) -> None:
    _own_end(self, event_name, *args, **kwargs)
    made = _here.compilation
    if made is not None and event_name in EVENTS:
        made.leave(event_name)
        if event_name == BACKWARD and not made._outer:
            _finish(made, list(_watchers))


def _id() -> Any:
    """What torch calls the compilation of this thread: the backward has that of its forward."""
    return CompileContext.current_compile_id()


__all__ = ["COMPILING", "GENERATING", "LOADING", "PASSES", "PHASES", "SAVING", "TRACING", "WAITING", "Compilation"]
__all__ += ["Watcher", "compilation", "current", "phase", "wait_for", "watch_compilations"]
