"""Where the time goes while a frame is compiled: each moment belongs to one phase, on the thread that compiles.

Torch announces the steps of a compilation to its `ChromiumEventLogger`; those in `EVENTS` begin a phase, those in
`STEPS` are only named to who waits. The rest of the library names its own with `phase`. A phase inside another
interrupts it, so that the seconds of all add up to the whole.
"""

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
from torch._guards import CompileContext

from .on_demand import when_imported, with_dynamo

TRACING, PASSES, GENERATING, COMPILING = "tracing", "passes", "generating code", "compiling kernels"
LOADING, WAITING, SAVING = "loading", "waiting", "saving"

PHASES = (TRACING, PASSES, GENERATING, COMPILING, LOADING, WAITING, SAVING)
"""All phases, in the order of execution. Tracing is Dynamo's and AOTAutograd's; passes are those of this library."""

BACKWARD = "entire_backward_compile"
"""Torch's name for compiling a backward when it first runs."""

DYNAMO = "bytecode_tracing"
"""Torch's name for what Dynamo does with the code of a frame."""

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

STEPS = {
    DYNAMO: "Dynamo",
    "build_guards": "guards",
    "backend_compile": "backend",
    "create_aot_dispatcher_function": "AOTAutograd",
    "aot_collect_metadata": "inputs and results",
    "aot_trace_joint_graph": "joint graph",
    "_recursive_joint_graph_passes": "Inductor's passes on the joint graph",
    "min_cut_rematerialization_partition": "partition",
    "compile_fx.<locals>.fw_compiler_base": "forward graph",
    "compile_fx.<locals>.bw_compiler": "backward graph",
    "inductor_compile": "Inductor",
    "_recursive_post_grad_passes": "Inductor's passes",
    "GraphLowering.run": "lowering",
    "Scheduler.__init__": "fusing",
    "Scheduler.codegen": "generating code",
    "PyCodeCache.load_by_key_path": "loading the code",
    "compile_file": "g++",
    "async_compile.wait": "compiling kernels",
    "CachingAutotuner.slow_precompile_config": "compiling kernels",
    "CachingAutotuner.benchmark_all_configs": "choosing the fastest kernel",
}
"""Torch's name for a step -> what it is called."""


@dataclass(frozen=True)
class PhaseStep:
    """A step that a compilation is in.

    Attributes:
        event: torch's name for it, or that of a phase.
        before: the phase that it interrupted.
        what: what it is called; "" if it has no name.
        began: when it began, as `time.monotonic` gives it.
    """

    event: str
    before: str
    what: str
    began: float = field(default_factory=time.monotonic)


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
        again: why no code that was compiled before holds, as Dynamo says it for each; none if there is no such code.
        thread: the thread that compiles.
    """

    name: str
    began: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    phase: str = TRACING
    whom: str = ""
    made: bool = False
    again: tuple[str, ...] = ()
    thread: int = field(default_factory=threading.get_ident)
    _since: float = 0.0
    _outer: list[PhaseStep] = field(default_factory=list[PhaseStep])

    def __post_init__(self) -> None:
        self._since = self.began

    def enter(self, event: str, phase: str, what: str = "") -> None:
        """Begin a step, for which `event` stands. What torch does to load a frame belongs to the loading."""
        if self.phase == LOADING and event in EVENTS:
            return
        self._outer.append(PhaseStep(event, self.phase, what))
        self._change(phase)

    def leave(self, event: str) -> None:
        """Return to the phase that `event` interrupted."""
        while any(step.event == event for step in self._outer):
            step = self._outer.pop()
            self._change(step.before)
            if step.event == event:
                return

    def steps(self) -> list[tuple[str, float]]:
        """What it is in now, outermost first, and when each began, as `time.monotonic` gives it."""
        named = [
            (f"{s.what} for {self.whom}" if s.event == WAITING else s.what, s.began) for s in self._outer if s.what
        ]
        within = _within(self.thread, self._outer[-1].event if self._outer else "")
        return [*named, (within, time.monotonic())] if within else named

    def _change(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._since
        self.phase, self._since = phase, now


class Watcher(Protocol):
    """What `watch_compilations` tells of every compilation, on the thread that compiles."""

    def began(self, compilation: Compilation) -> None:
        """It has begun."""
        ...

    def repeated(self, compilation: Compilation) -> None:
        """It has turned out that the frame was compiled before, and why that does not hold (`Compilation.again`)."""
        ...

    def ended(self, compilation: Compilation) -> None:
        """It has ended, also by an error."""
        ...


class _Here(threading.local):
    compilation: Compilation | None = None


_here = _Here()
_compiling: dict[int, str] = {}
"""The threads that compile -> the line of the user's from which they do."""

places: list[Callable[[FrameType], str]] = []
"""What finds the line of the user's that a thread is at; `dtensor.job` adds it."""
_watchers: list[Watcher] = []
_names: dict[Any, str] = {}


def watch_compilations(watcher: Watcher) -> Callable[[], None]:
    """Tell `watcher` of every compilation from now on, until what is returned is called."""
    _listen()
    _modules_tell()
    _watchers.append(watcher)
    return lambda: _watchers.remove(watcher)


@contextmanager
def compilation(name: str) -> Iterator[Compilation]:
    """A context in which something is compiled. Within another one it is a part of that."""
    if _here.compilation is not None:
        yield _here.compilation
        return
    _note_place()
    made = _here.compilation = Compilation(name)
    told = list(_watchers)
    try:
        for watcher in told:
            watcher.began(made)
        yield made
    finally:
        _finish(made, told)


def repeats(reasons: Iterable[str]) -> None:
    """This thread compiles a frame again, for these reasons."""
    made = _here.compilation
    if made is not None and not made.again:
        made.again = tuple(reasons)
        for watcher in list(_watchers):
            watcher.repeated(made)


def _note_place() -> None:
    _compiling[threading.get_ident()] = "".join([place(sys._getframe()) for place in places])


def _finish(made: Compilation, told: list[Watcher]) -> None:
    _here.compilation = None
    _compiling.pop(threading.get_ident(), None)
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
    made.enter(name, name, name)
    try:
        yield
    finally:
        made.leave(name)
        made.whom = before


def wait_for(whom: str) -> None:
    """Name what this thread waits for."""
    if _here.compilation is not None:
        _here.compilation.whom = whom


@with_dynamo
@functools.cache
def _listen() -> None:
    """Listen to what torch announces."""
    from torch._dynamo.utils import ChromiumEventLogger

    own_start, own_end = ChromiumEventLogger.log_event_start, ChromiumEventLogger.log_event_end

    def started(self: Any, event_name: str, *args: Any, **kwargs: Any) -> None:
        _note_start(event_name)
        own_start(self, event_name, *args, **kwargs)

    def ended(self: Any, event_name: str, *args: Any, **kwargs: Any) -> None:
        own_end(self, event_name, *args, **kwargs)
        _note_end(event_name)

    ChromiumEventLogger.log_event_start, ChromiumEventLogger.log_event_end = started, ended


def _note_start(event_name: str) -> None:
    made = _here.compilation
    if made is None and event_name == BACKWARD:
        _note_place()
        made = _here.compilation = Compilation(
            f"{_names.get(_id(), 'a graph')} (backward)", phase=GENERATING, made=True
        )
        for watcher in list(_watchers):
            watcher.began(made)
    if made is not None:
        if event_name == "entire_frame_compile":
            _names[_id()] = made.name
        elif event_name in EVENTS or event_name in STEPS:
            made.enter(event_name, EVENTS.get(event_name, made.phase), STEPS.get(event_name, ""))


def _note_end(event_name: str) -> None:
    made = _here.compilation
    if made is not None and (event_name in EVENTS or event_name in STEPS):
        made.leave(event_name)
        if event_name == BACKWARD and not made._outer:
            _finish(made, list(_watchers))


def _line_of(translator: Any, *_: Any) -> str:
    """The line of the user's that Dynamo is at."""
    return f"at {os.path.basename(translator.f_code.co_filename)}:{translator.lineno}"


def _operator_of(interpreter: Any, *_: Any) -> str:
    """The operator that an interpreter of a graph is at."""
    nodes = list(interpreter.graph.nodes)
    return f"operator {1 + nodes.index(getattr(interpreter, AT))} of {len(nodes)}"


def _kernel_of(scheduler: Any, nodes: list[Any], *_: Any) -> str:
    """The kernel that Inductor writes."""
    return f"kernel {1 + nodes.index(scheduler.current_node)} of {len(nodes)}"


def _compiled_of(_: Any, scope: dict[str, Any], of: int) -> str:
    """The kernel that Inductor waits for."""
    return f"kernel {1 + of - _futures(scope)} of {of}"


def _futures(scope: dict[str, Any]) -> int:
    return sum([hasattr(x, "result") for x in list(scope.values())])


AT = "_dtensor_at"
"""The attribute of an interpreter that holds the node that it runs."""

_running: dict[int, list[tuple[str, Callable[[], str]]]] = {}
"""Thread -> the functions of torch that it is in and that can say how far they are, innermost last: the names of their
classes, and what says it. Another thread must not follow the frames themselves: Dynamo runs code on frames of its own,
which are gone at any moment."""


def _tells(cls: type, name: str, say: Callable[..., str], more: Callable[..., tuple[Any, ...]] = lambda *_: ()) -> None:
    """Let a method of a class tell how far it is while it runs; `more` computes further arguments of `say` from its."""
    own = getattr(cls, name)

    @functools.wraps(own)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        stack = _running.setdefault(threading.get_ident(), [])
        stack.append((cls.__name__, functools.partial(say, self, *args, *more(*args))))
        try:
            return own(self, *args, **kwargs)
        finally:
            stack.pop()

    setattr(cls, name, run)


def _tell_interpreter() -> None:
    own = torch.fx.Interpreter.run_node

    @functools.wraps(own)
    def run_node(self: Any, n: Any) -> Any:
        setattr(self, AT, n)
        return own(self, n)

    torch.fx.Interpreter.run_node = run_node
    _tells(torch.fx.Interpreter, "run", _operator_of)


@functools.cache
def _modules_tell() -> None:
    """Let the functions of torch that take long tell how far they are, once their modules are imported."""

    def of(module: str, cls: str, *rest: Any) -> None:
        when_imported(module, lambda: _tells(getattr(sys.modules[module], cls), *rest))

    _tell_interpreter()
    of("torch._dynamo.symbolic_convert", "InstructionTranslatorBase", "run", _line_of)
    of("torch._inductor.scheduler", "Scheduler", "_codegen", _kernel_of)
    of("torch._inductor.async_compile", "AsyncCompile", "_wait_futures", _compiled_of, lambda scope: (_futures(scope),))


def _within(thread: int, event: str) -> str:
    """How far the innermost of the functions that tell it is that a thread is in; "" if that is unknown. Dynamo's is
    that in which all other steps begin."""
    try:
        name, say = _running[thread][-1]
        return "" if (name == "InstructionTranslatorBase") != (event == DYNAMO) else say()
    except Exception:  # it has not begun or has just ended, or another release names its variables otherwise
        return ""


def _id() -> Any:
    """What torch calls the compilation of this thread: the backward has that of its forward."""
    return CompileContext.current_compile_id()


def compile_context() -> Any:
    """The current compilation in this thread; None outside of one.

    It is a single object, with a `compile_id`, for everything made from one frame, including the backward.
    """
    return CompileContext.try_get()


def is_compiling(thread: int) -> bool:
    """Whether a thread is compiling."""
    return thread in _compiling


def compiling_at(thread: int) -> str | None:
    """The line of the user's at which a thread began to compile; None if it does not compile."""
    return _compiling.get(thread)


__all__ = ["COMPILING", "GENERATING", "LOADING", "PASSES", "PHASES", "SAVING", "TRACING", "WAITING", "Compilation"]
__all__ += [
    "Watcher",
    "compilation",
    "compile_context",
    "compiling_at",
    "current",
    "is_compiling",
    "phase",
    "repeats",
    "wait_for",
]
__all__ += ["watch_compilations"]
