"""What a program is at that takes long, told to whoever waits for it: a line every few seconds, on every rank.

Code that may last enters `with Stage("loading the checkpoint of step 100"):`. Stages nest, and a thread of this process
writes what its threads are in, how long each stage has lasted, and for whom the rank waits (`dtensor.job.job`):

    12:03:05 dtensor, rank 1: demo (21 s): sharded, compiled: step 1 of 30 (9 s): compiling loss (8 s): joint graph

A program whose stages end within `EVERY` seconds writes nothing. The lines go to the logger "dtensor.progress"; where
nobody has given it or those above it a handler, to standard error. There, if it is a terminal, rank 0 rewrites one line
instead, and removes it in the end.
"""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import wraps
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

import torch.distributed as dist

from . import environment

P = ParamSpec("P")
T = TypeVar("T")

SWITCH = "DTENSOR_PROGRESS"
"""The variable that forbids all lines (0), or asks for lines that stay on a terminal, too (1)."""

EVERY = 4.0
"""Seconds in stages after which a line is written, and then another one."""

TICK = 0.5
"""Seconds between two looks at the stages."""

LIVE = 1.0
"""Seconds that a stage has lasted when it appears on a terminal."""

CLEAR = "\r\x1b[2K"
"""What removes the line of a terminal that the cursor is in."""

WIDTH = 110
"""The most characters of a line on a terminal."""

log: logging.Logger = logging.getLogger("dtensor.progress")
log.setLevel(logging.INFO)

Inner = Callable[[], Iterable[tuple[str, float]]]
"""Gives what goes on inside of a stage: texts, outermost first, and when each began, as `time.monotonic` gives it."""


class Stage:
    """A context that may take long. As a decorator, each call of the function is one.

    Args:
        what: what goes on, such as "loading the checkpoint of step 3". It may be changed inside the context.
        inner: what goes on inside, where something else knows it.
        inside: whether it counts only inside of another stage of its thread, such as one of a save that is waited for.

    Raises:
        ValueError: the environment's switch is neither 0 nor 1; where the context is entered.
    """

    def __init__(self, what: str, inner: Inner | None = None, *, inside: bool = False) -> None:
        self.what = what
        self.inner = inner
        self.inside = inside
        self.began: float = 0.0
        self.told = False
        self._thread = 0

    def __enter__(self) -> Self:
        self.began, self._thread = time.monotonic(), threading.get_ident()
        if self._thread in _stacks:
            _stacks[self._thread].append(self)
        elif not self.inside and environment.is_on(SWITCH) is not False:
            _stacks[self._thread] = [self]
            _wake()
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        stack = _stacks.get(self._thread, [])
        if self in stack:
            del stack[stack.index(self) :]
        if not stack:
            _stacks.pop(self._thread, None)
        if self.told and not stack:
            say(f"{self.what}: {'done' if error[0] is None else 'ended by an error'} after {self.seconds:.0f} s")

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with Stage(self.what, self.inner, inside=self.inside):
                return function(*args, **kwargs)

        return call

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began


_stacks: dict[int, list[Stage]] = {}
"""Thread -> the stages that it is in, outermost first."""

_waits: tuple[str, str, float] | None = None
"""In what the program waits, for whom, and since when."""


def waits(where: str, for_whom: str = "", seconds: float = 0.0) -> None:
    """Note in what this process waits, for whom, and for how many seconds already; "" if it does not wait."""
    global _waits
    if not where:
        _waits = None
    elif environment.setting(SWITCH) != environment.OFF:
        _waits = where, for_whom, time.monotonic() - seconds
        _wake()


def now(thread: int) -> str:
    """The stages of a thread, with the seconds that each has lasted; "" if it is in none."""
    return _told(_of(thread))


def _of(thread: int) -> list[tuple[str, float]]:
    return [part for each in list(_stacks.get(thread, ())) for part in ((each.what, each.began), *_within(each))]


def _within(each: Stage) -> Iterable[tuple[str, float]]:
    return each.inner() if each.inner is not None else ()


def _told(parts: list[tuple[str, float]]) -> str:
    """Texts and seconds; those of a stage that began with the one inside it are left out."""
    clock, said = time.monotonic(), []
    for k, (what, began) in enumerate(parts):
        lasted = f"{clock - began:.0f}"
        same = k + 1 < len(parts) and f"{clock - parts[k + 1][1]:.0f}" == lasted
        said.append(what if same or lasted == "0" else f"{what} ({lasted} s)")
    return ": ".join(said)


def say(text: str) -> None:
    """Write a line now, unless the environment forbids it."""
    if environment.setting(SWITCH) != environment.OFF:
        _write(text)


def rank() -> int:
    """The rank of this process; 0 if it is none."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _write(text: str) -> None:
    is_rank = dist.is_initialized() or "RANK" in os.environ
    if log.hasHandlers():
        log.info("%s%s", f"rank {rank()}: " if is_rank else "", text)
    elif log.isEnabledFor(logging.INFO):
        clear, who = CLEAR if is_live() else "", f", rank {rank()}" if is_rank else ""
        _put(f"{clear}{time.strftime('%H:%M:%S')} dtensor{who}: {text}\n")


def _put(text: str) -> None:
    if _ended:
        return
    with _writing:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (AttributeError, OSError, ValueError):
            pass  # standard error is gone


def is_live() -> bool:
    """Whether a line on the terminal is rewritten: on rank 0, unless the environment asks for lines that stay."""
    return not environment.setting(SWITCH) and rank() == 0 and sys.stderr is not None and sys.stderr.isatty()


class _Teller(threading.Thread):
    """The thread that looks at the stages every `TICK` seconds, and sleeps while there are none."""

    def __init__(self) -> None:
        super().__init__(name="dtensor progress", daemon=True)
        self.awake = threading.Event()

    def run(self) -> None:
        before = last = time.monotonic()
        silent, paused, shown = 0.0, 0.0, False
        while not _ended:
            if paused > EVERY:
                self.awake.clear()
                if not _stacks and _waits is None:
                    self.awake.wait()
                silent, paused, before = 0.0, 0.0, time.monotonic()
            time.sleep(TICK)
            clock = time.monotonic()
            passed, before = clock - before, clock
            held, parts = _waits, _parts()
            if not parts:
                paused += passed
                if shown:
                    _put(CLEAR)
                    shown = False
                continue
            paused, silent = 0.0, silent + passed
            if held is not None:  # which was silent before it was noticed
                silent = max(silent, clock - max(held[2], last))
            texts, live = list(map(_told, parts)), is_live()
            if live and clock - parts[0][0][1] > LIVE:
                _put(CLEAR + texts[0][:WIDTH])
                shown = True
            if silent >= EVERY and (not live or log.hasHandlers()):
                silent, last = 0.0, clock
                for stage in [stage for stack in list(_stacks.values()) for stage in list(stack)]:
                    stage.told = True
                for text in texts:
                    _write(text)


def _parts() -> list[list[tuple[str, float]]]:
    """What each thread is at: first the main thread, and for whom it waits."""
    main = threading.main_thread().ident or 0
    threads = sorted(_stacks, key=lambda thread: thread != main)
    parts, held = [_of(thread) for thread in threads], _waits
    if held is not None:
        first = parts.pop(0) if threads[:1] == [main] else []
        parts.insert(0, [*first, (held[0], held[2]), (held[1], time.monotonic())])
    return [p for p in parts if p]


_teller: _Teller | None = None
_lock, _writing = threading.Lock(), threading.Lock()
_ended = False


def _wake() -> None:
    """Let the thread look."""
    global _teller
    with _lock:
        if _teller is None:
            _teller = _Teller()
            _teller.start()
    _teller.awake.set()


def _forked() -> None:
    """A process that was forked off has neither the thread nor its stages."""
    global _teller, _lock, _writing, _waits
    _teller, _waits, _lock, _writing = None, None, threading.Lock(), threading.Lock()
    _stacks.clear()


def _end() -> None:
    """Let the thread write nothing while the interpreter ends."""
    global _ended
    _ended = True
    _writing.acquire(timeout=1.0)


os.register_at_fork(after_in_child=_forked)
atexit.register(_end)

__all__ = ["EVERY", "SWITCH", "Stage", "is_live", "now", "rank", "say", "waits"]
