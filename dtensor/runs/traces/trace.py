"""`dtensor.trace`: a profile of some steps on every rank, in one file for Perfetto.

torch.profiler -> its trace of this rank -> `events` names what is in it -> FOLDER/rank00000.json
                                            the last rank to come merges -> FOLDER/trace.json
"""

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

from ...comm import profiled
from ...errors import ArgumentError, ArgumentTypeError, CallOrderError
from ...program.files import write_whole
from ..records.recorder import rank_and_world
from ..records.storage import refuse_earlier
from .eager import namer, noting_places
from .events import STEP, exposed, rewritten
from .merging import merge, path_of

profiled.namer = namer.describe


class Trace:
    """Traces what this process runs, as a context. See `dtensor.trace`.

    Attributes:
        folder: where the traces go.
        path: the trace of all ranks, if this rank wrote it; else None.
        is_written: whether the trace of this rank is.
        exposed: seconds of a step for which this rank only waited for communication, measured; None until it is
            written.
    """

    def __init__(self, folder: str | os.PathLike[str], *, skip: int = 0, steps: int | None = None) -> None:
        self.folder: Path = Path(folder)
        self.path: Path | None = None
        self.is_written: bool = False
        self.exposed: float | None = None
        self.skip: int = skip
        self.steps: int | None = steps
        self._passed: int = 0
        self._stack: ExitStack = ExitStack()
        self._profile: profile | None = None
        self._hook: Any = None

    def __enter__(self) -> "Trace":
        refuse_earlier(self.folder, path_of, *rank_and_world())
        if self._hook is not None:
            raise CallOrderError("this trace is in use; make another one with dtensor.trace(folder)")
        self._hook = register_optimizer_step_post_hook(self._stepped)
        if not self.skip:
            self._start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        self._hook = None
        self._stop()

    def step(self) -> None:
        """End a step. The end of an optimizer's step does so, too."""
        self._passed += 1
        if self._profile is not None:
            with record_function(f"{STEP}step {self._passed - 1}"):
                pass
            if self.steps is not None and self._passed - self.skip >= self.steps:
                self._stop()
        elif self._passed == self.skip:
            self._start()

    def _stepped(self, *_: Any) -> None:
        self.step()

    def _start(self) -> None:
        gpus = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        namer.forget()
        self._stack.enter_context(noting_places())
        self._profile = self._stack.enter_context(profile(activities=[ProfilerActivity.CPU, *gpus], record_shapes=True))

    def _stop(self) -> None:
        done, self._profile = self._profile, None
        self._stack.close()
        if done is not None:
            self.path, self.exposed = write_trace(done, self.folder)
            self.is_written = True


def trace(folder: str | os.PathLike[str], *, skip: int = 0, steps: int | None = None) -> Trace:
    """Profile what this process runs, as a context, and write one trace of all ranks for Perfetto (ui.perfetto.dev).

    It is torch.profiler's trace, in which collectives have names: operator, placements before and after, mesh axis,
    parameter or module, and the line of the program that asked for it, in eager and in compiled code. Each rank is a
    process. Its threads are as torch.profiler shows them; compiled graphs, steps and what is on its way to other ranks
    have rows and slices of their own.

        with dtensor.trace("traces", skip=2, steps=2):
            for batch in batches:
                train(batch)

    Every rank writes a file into the folder; the last one to do so writes `trace.json`, with all of them. On machines
    without a common folder, collect the files in one and call `dtensor.merge_traces`.

    Args:
        folder: where the traces go; the same one on all ranks.
        skip: the number of steps of an optimizer that pass before, such as those in which something is compiled.
        steps: end the trace after so many steps of an optimizer; None for all in the context. A profile takes some
            hundred bytes for each operator: a few steps are enough.

    Returns:
        The trace, a context. Its `step()` ends a step where no optimizer does; afterwards `path` is the trace of all
        ranks on the rank that wrote it, and `exposed` the seconds of a step for which this rank only waited for
        communication.

    Raises:
        TypeError: `folder` is no path, or `skip` or `steps` no number.
        ValueError: `skip` is less than 0, or `steps` less than 1.
        RecordError: the folder holds traces already.
    """
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise ArgumentTypeError(f"folder is the path of a folder, got {folder!r}; write dtensor.trace('traces')")
    for name, given, least in (("skip", skip, 0), ("steps", steps, 1)):
        if given is None and name == "steps":
            continue
        if isinstance(given, bool) or not isinstance(given, int):
            raise ArgumentTypeError(f"{name} is a number of optimizer steps, got {given!r}; write {name}=2")
        if given < least:
            raise ArgumentError(f"{name} is {given}; write {least} or more")
    return Trace(folder, skip=skip, steps=steps)


def trace_handler(folder: str | os.PathLike[str]) -> Callable[[profile], None]:
    """Return what a profiler of your own writes its traces with, as `trace` does.

        torch.profiler.profile(record_shapes=True, on_trace_ready=dtensor.trace_handler("traces"))

    With `record_shapes=True`, collectives of one kind in a compiled graph are told apart by their sizes, too, and not
    by their order alone. A collective that only a backward has is named by the operator whose gradient it computes;
    `trace` finds its line, too.

    Args:
        folder: where the traces go; the same one on all ranks. A later trace of the same profiler replaces them.
    """

    def write(done: profile) -> None:
        write_trace(done, Path(folder))

    return write


def write_trace(done: profile, folder: Path) -> tuple[Path | None, float]:
    """Write the trace of this rank; return the path of that of all ranks, if all are there, and what is exposed.

    Raises:
        OSError: it cannot be written.
    """
    rank, world = rank_and_world()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        file = os.path.join(scratch, "trace.json")
        done.export_chrome_trace(file)
        with open(file, encoding="utf-8") as content:
            made = json.load(content)
    made["traceEvents"] = rewritten(made["traceEvents"], profiled.NAMES, profiled.GRAPHS)
    made["dtensor"] = {"rank": rank, "world": world}
    write_whole(path_of(folder, rank), json.dumps(made))
    whole = merge(folder) if all(path_of(folder, r).exists() for r in range(world)) else None
    return whole, exposed(made["traceEvents"])


def merge_traces(folder: str | os.PathLike[str]) -> Path:
    """Write `trace.json`, one trace of all ranks, next to the traces of the ranks, and return its path.

    Args:
        folder: the folder with a trace of each rank.

    Raises:
        RecordError: it holds no trace, not those of all ranks, or a damaged one.
        OSError: the file cannot be written.
    """
    return merge(Path(folder))


__all__ = ["Trace", "merge_traces", "trace", "trace_handler", "write_trace"]
