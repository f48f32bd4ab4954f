"""Runs steps of a program under torch.profiler, to show what its collectives take beside what they were estimated to.

dtensor.compile.measure(step)                runs the step a few times and returns a report
dtensor inspect --measure 3 train.py         measures three steps of a program; a step ends with `optimizer.step()`
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, supported_activities

from dtensor.errors import ArgumentError, ArgumentTypeError
from dtensor.program.files import write_whole
from dtensor.torch_private.compiling import dynamo_counters

from ..recording.folder import rank_folder
from .measured import FILE, PROFILE, attach, events_of, measured
from .reading import read
from .report import Report, report

WARM = 2
"""Steps that run before those that are measured."""


def measure(step: Callable[[], Any], model: nn.Module | Callable[..., Any] | None = None, *, steps: int = 5) -> Report:
    """Run a step several times under torch.profiler, and report measured beside estimated times.

    All ranks call it together. The first two calls are not measured: they compile. Gradients, optimizer and data are
    those of real steps.

    Args:
        step: runs one step, forward and backward; its result is ignored.
        model: as `report` takes it: what to report; None for everything that was compiled.
        steps: number of steps that are measured, at least 1. Times are their medians.

    Returns:
        The report. What ran has `measured` in its collectives: `seconds`, and `exposed`, in which the rank waited, both
        in seconds; it is absent for graphs that did not run.

    Raises:
        TypeError: `step` cannot be called.
        ValueError: `steps` is less than 1, or nothing was compiled.
    """
    if not callable(step):
        raise ArgumentTypeError(
            f"measure runs a step, but {step!r} cannot be called; write measure(lambda: train(batch))"
        )
    if steps < 1:
        raise ArgumentError(f"{steps} steps measure nothing; write steps=1 or more")
    for _ in range(WARM):
        step()
    profiler = _profiler()
    with profiler:
        for _ in range(steps):
            step()
    made = report(model)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / PROFILE
        profiler.export_chrome_trace(str(path))
        attach(measured(events_of(path), made.names, made.manifests), made.names, made.manifests)
    return made


def _profiler() -> profile:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available() and ProfilerActivity.CUDA in supported_activities():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, acc_events=True)


class MeasuredSteps:
    """Profiles some steps of a program that ends each with `optimizer.step()`, from the first one after a step in which
    nothing was compiled.

    Attributes:
        wanted: number of steps to measure.
        seen: number of steps that were measured.
        done: whether all of them were.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted: int = wanted
        self.seen: int = 0
        self.done: bool = False
        self._graphs, self._profiler = -1, None

    def __call__(self, *_: Any) -> None:
        """A step ended."""
        if self.done:
            return
        if self._profiler is not None:
            self.seen += 1
            if self.seen == self.wanted:
                self.stop()
            return
        graphs = dynamo_counters()["stats"]["unique_graphs"]
        if graphs and graphs == self._graphs:
            self._profiler = _profiler()
            self._profiler.start()
        self._graphs = graphs

    def stop(self) -> None:
        """Stop measuring."""
        if self._profiler is not None and not self.done:
            self._profiler.stop()
            self.done = True

    def write(self, folder: Path) -> None:
        """Write the profile, and what it says of the graphs of this rank, into its folder of a dump.

        Raises:
            ValueError: the dump is damaged.
            OSError: it cannot be written.
        """
        if self._profiler is None or not self.seen:
            return
        self._profiler.export_chrome_trace(str(folder / PROFILE))
        mine = [f for f in read(folder.parent) if f.folder.parent == folder and f.manifest]
        found = measured(events_of(folder / PROFILE), [f.name for f in mine], [f.manifest or {} for f in mine])
        write_whole(folder / FILE, json.dumps(found | {"steps": self.seen}, indent=1))


@contextmanager
def measuring(wanted: int, root: Path) -> Iterator[MeasuredSteps | None]:
    """Measure `wanted` steps of what runs inside, and write the times to this rank's folder of the dump `root`; nothing
    where `wanted` is 0."""
    if not wanted:
        yield None
        return
    steps = MeasuredSteps(wanted)
    hook = register_optimizer_step_post_hook(steps)
    try:
        yield steps
    finally:
        hook.remove()
        steps.stop()
    steps.write(rank_folder(root))


__all__ = ["MeasuredSteps", "measure", "measuring"]
