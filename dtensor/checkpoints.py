"""`Checkpoints`: a folder of checkpoints of which every one that is there is whole.

torch.distributed.checkpoint writes the tensors (`checkpoint` tells it which part is whose, `checkpoint_files` how) into
a folder that nobody takes for a checkpoint; only when all ranks have written, and the index of what they wrote is
there, it gets its name. A rank that dies on the way, wherever that is, leaves all earlier checkpoints as they were.
Loading checks every byte that it reads, passes over what is damaged, and brings tensors into whatever mesh and
placements they have now. What goes wrong on one rank is an error on all, and so is it where ranks ask for different
things.
"""

import os
import re
import shutil
import warnings
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ._torch import default_group_timeout
from .checkpoint_files import (
    DamagedError,
    Reader,
    SafeLoadPlanner,
    SafeSavePlanner,
    TorchReader,
    Writer,
    read_index,
    verify,
)
from .errors import CheckpointError
from .job import all_here

_NAME = re.compile(r"step-(\d+)|\.step-(\d+)\.replaced")


class Saving(futures.Future):
    """A save in the background. `result()` waits until the checkpoint is there, and raises what went wrong."""

    told = False
    """Whether somebody has asked how it went."""

    def result(self, timeout: float | None = None) -> None:
        try:
            return super().result(timeout)
        finally:
            self.told = self.told or self.done()


class Checkpoints:
    """Checkpoints in one folder, which all ranks see.

    Collective: every rank makes it, and calls its methods in the same order. One job at a time writes to a folder;
    others may read.

    Args:
        folder: where they lie, each in a folder `step-00000100` of its own.
        keep: how many of the newest stay; older ones are removed after a save. None keeps all.

    Raises:
        ValueError: `keep` is less than 1.
    """

    def __init__(self, folder: str | os.PathLike, *, keep: int | None = None):
        if keep is not None and keep < 1:
            raise ValueError(f"keep is the number of checkpoints that stay, at least 1; got {keep}")
        self.folder = Path(folder)
        self.keep = keep
        # Saves in the background communicate while the program does: on a group of their own.
        all_here()
        self._group: Any = (
            dist.new_group(backend="gloo", timeout=default_group_timeout()) if dist.is_initialized() else None
        )
        self._first = self._group is None or dist.get_rank(self._group) == 0
        self._saving: Saving | None = None

    def save(self, state: dict[str, Any], step: int) -> None:
        """Write `state`, a state dict that may be nested, as the checkpoint of `step`; done when it returns.

        Raises:
            CheckpointError: on all ranks, if one of them could not write, or the save before this one, in the
                background, failed and nobody has asked. Earlier checkpoints are as they were.
        """
        partial = self._begin("save", state, step)
        try:
            dcp.save(state, storage_writer=Writer(partial), planner=SafeSavePlanner(), process_group=self._group)
            self._together(lambda: self._finish(partial, step))
        except (Exception, CheckpointException) as error:
            raise self._failed(step, error) from error

    def save_async(self, state: dict[str, Any], step: int) -> Saving:
        """As `save`, in the background: it returns when the values are copied, and they may change then.

        Returns:
            A future, which is done when the checkpoint is there; `result()` raises what went wrong. All other methods
            wait for it; write `wait()` before the process groups are destroyed.
        """
        partial = self._begin("save_async", state, step)
        started: Any = dcp.async_save(
            state, storage_writer=Writer(partial), planner=SafeSavePlanner(), process_group=self._group
        )
        saving = self._saving = Saving()

        def finish(written: Any) -> None:
            try:
                written.result()
                self._together(lambda: self._finish(partial, step))
                saving.set_result(None)
            except BaseException as error:
                saving.set_exception(self._failed(step, error))

        getattr(started, "upload_completion", started).add_done_callback(finish)
        return saving

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises:
            CheckpointError: on all ranks, if it failed and nobody has asked its future.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            futures.wait([saving])
            if not saving.told:
                saving.result()

    def newest(self) -> int | None:
        """The step of the newest whole checkpoint, which `load` reads; None if there is none.

        Whole is one of which every byte is as it was written: the ranks read it, each a share of it. A newer one that
        is damaged is passed over, with a warning on the first rank.
        """
        self.wait()
        self._asked("newest()")
        damaged = ""
        for step, path in self._newest_first():
            torn = _first_said(verify(path, self._share), self._group)
            if not torn:
                self._warn(step, damaged)
                return step
            damaged += f"; that of step {step} is damaged: {torn}"
        return None

    def load(self, state: dict[str, Any], step: int | None = None) -> int:
        """Read the checkpoint of `step`, by default the newest that is whole, into `state`; the step that was read.

        Tensors of `state` are written to, whatever their mesh and placements; other values are replaced in the dict.

        Raises:
            CheckpointError: on all ranks, if there is no checkpoint, or something that was read of that of `step` is
                not as it was written (`state` then holds part of it), or it does not hold what `state` does.
        """
        self.wait()
        self._asked(f"load(step={step!r})", _wrong(state) or ("" if step is None else _wrong_step(step)))
        if step is not None:
            path = self._together(lambda: self._path_of(step))
            torn = self._read(state, step, path)
            if torn:
                whole = [s for s, p in self._newest_first() if not _torn(p)]
                raise CheckpointError(f"the checkpoint of step {step} is damaged: {torn}{_which(sorted(whole))}")
            return step
        damaged = ""
        for newest, path in self._newest_first():
            torn = self._read(state, newest, path)
            if not torn:
                self._warn(newest, damaged)
                return newest
            damaged += f"; that of step {newest} is damaged: {torn}"
        raise CheckpointError(f"there is no {'whole ' if damaged else ''}checkpoint in {self.folder}{damaged}")

    def _read(self, state: dict[str, Any], step: int, path: Path) -> str:
        """Read a checkpoint into `state`; what is damaged, "" for nothing."""
        reader, torn = _made(lambda: Reader(path), self._group)
        if torn:
            return torn
        try:
            _read_by(reader, state, self._group)
        except CheckpointException as error:
            if any(isinstance(found, DamagedError) for found, _ in error.failures.values()):
                return _said(error)
            text = f"the checkpoint of step {step} does not hold what the state does: {_said(error)}"
            raise CheckpointError(text) from error
        return ""

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, ascending."""
        return sorted(self._found())

    def _found(self) -> dict[int, Path]:
        return checkpoints_in(self.folder)

    def _path(self, step: int, state: str = "") -> Path:
        """The folder of a checkpoint; of one that is "partial", "replaced" or "removed"."""
        name = f"step-{step:08d}"
        return self.folder / (f".{name}.{state}" if state else name)

    def _newest_first(self) -> list[tuple[int, Path]]:
        return self._together(lambda: sorted(self._found().items(), reverse=True))

    def _path_of(self, step: int) -> Path:
        found = self._found()
        if step not in found:
            raise CheckpointError(f"there is no checkpoint of step {step} in {self.folder}{_which(sorted(found))}")
        return found[step]

    def _begin(self, method: str, state: Any, step: Any) -> Path:
        """The folder to write to, empty."""
        self.wait()
        self._asked(f"{method}(step={step!r})", _wrong(state) or _wrong_step(step))
        partial = self._path(step, "partial")

        def make() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in (*self.folder.glob(".step-*.partial"), *self.folder.glob(".step-*.removed")):
                shutil.rmtree(left)
            partial.mkdir()

        try:
            self._together(make)
        except CheckpointError as error:
            raise self._failed(step, error) from error
        return partial

    def _finish(self, partial: Path, step: int) -> None:
        """Give the checkpoint its name."""
        target, before = self._path(step), self._path(step, "replaced")
        if target.exists():
            shutil.rmtree(before, ignore_errors=True)
            target.rename(before)
        partial.rename(target)
        shutil.rmtree(before, ignore_errors=True)
        for old in self.steps()[: -self.keep] if self.keep is not None else ():
            # One that is half removed must not have the name of a whole one.
            removed = self._found()[old].rename(self._path(old, "removed"))
            shutil.rmtree(removed)

    @property
    def _share(self) -> tuple[int, int]:
        """This rank among all."""
        return (0, 1) if self._group is None else (dist.get_rank(self._group), dist.get_world_size(self._group))

    def _warn(self, step: int, damaged: str) -> None:
        if damaged and self._first:
            warnings.warn(f"reading the checkpoint of step {step} in {self.folder}{damaged}", stacklevel=3)

    def _asked(self, call: str, wrong: str = "") -> None:
        """Find out whether all ranks were asked for the same, and for something that can be.

        Raises:
            CheckpointError: on all ranks.
        """
        asked = _gathered((call, wrong), self._group)
        problems = {wrong: rank for rank, (_, wrong) in reversed(list(enumerate(asked))) if wrong}
        if problems:
            said = "; ".join(f"{text} (rank {rank})" for text, rank in problems.items())
            raise CheckpointError(f"{call.partition('(')[0]}: {said}")
        if len({call for call, _ in asked}) > 1:
            said = ", ".join(f"{call} on rank {rank}" for rank, (call, _) in enumerate(asked))
            raise CheckpointError(f"all ranks call the same method for the same step; here {said}")

    def _together(self, act: Callable[[], Any]) -> Any:
        """What `act` gives on the first rank, on all; all raise if it does."""
        said: list[Any] = [None, None]
        if self._first:
            try:
                said[0] = act()
            except CheckpointError as error:
                said[1] = str(error)
            except Exception as error:
                said[1] = f"{type(error).__name__}: {error}"
        if self._group is not None:
            dist.broadcast_object_list(said, src=dist.get_global_rank(self._group, 0), group=self._group)
        if said[1] is not None:
            raise CheckpointError(said[1])
        return said[0]

    def _failed(self, step: int, error: BaseException) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self.folder}: {_said(error)}{_which(self.steps())}"
        )


def _said(error: BaseException) -> str:
    """What went wrong, in a line; torch shows the stacks of all ranks."""
    if not isinstance(error, CheckpointException):
        return str(error)
    lines: dict[str, list[int]] = {}
    for rank, (found, _) in error.failures.items():
        lines.setdefault(str(found), []).append(rank)
    return "; ".join(f"{line} (rank {', '.join(map(str, ranks))})" for line, ranks in lines.items())


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Step -> its checkpoint, of those in `folder`: under its own name, or, where a rank died between the two, the one
    for the while in which it is replaced."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []  # names that begin with a dot first
    matches = [(_NAME.fullmatch(path.name), path) for path in paths]
    return {int(match[1] or match[2]): path for match, path in matches if match}


def load_torch_checkpoint(state: dict[str, Any], folder: str | os.PathLike) -> None:
    """Read what `torch.distributed.checkpoint.save` wrote to `folder` into `state`, as `Checkpoints.load` does.

    Torch's own `load` runs whatever a checkpoint's pickles say; this makes tensors, numbers, texts and containers of
    them, and nothing else. Torch writes no checksums: a changed value is not noticed.

    Raises:
        CheckpointError: on all ranks, if there is no checkpoint, it holds something else than `state` or than such
            values.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    reader, wrong = _made(lambda: TorchReader(folder), group)
    if wrong:
        raise CheckpointError(wrong)
    try:
        _read_by(reader, state, group)
    except CheckpointException as error:
        raise CheckpointError(f"{folder} is not read: {_said(error)}") from error


def _gathered(mine: Any, group: Any) -> list[Any]:
    """What each rank has; this one alone if there is no group."""
    if group is None:
        return [mine]
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def _first_said(mine: str, group: Any) -> str:
    """What the first rank says that says anything, "" if none does."""
    return next(filter(None, _gathered(mine, group)), "")


def _made(make: Callable[[], Any], group: Any) -> tuple[Any, str]:
    """What `make` gives, and what is said by the first rank on which it fails."""
    made, wrong = None, ""
    try:
        made = make()
    except CheckpointError as error:
        wrong = str(error)
    return made, _first_said(wrong, group)


def _read_by(reader: Any, state: dict[str, Any], group: Any) -> None:
    dcp.load(state, storage_reader=reader, planner=SafeLoadPlanner(), process_group=group)


def _torn(path: Path) -> str:
    """What is wrong with the index and the sizes of a checkpoint; "" if nothing is."""
    try:
        read_index(path)
    except CheckpointError as error:
        return str(error)
    return ""


def _wrong(state: Any) -> str:
    return "" if isinstance(state, dict) else f"the state is a {type(state).__name__}; give a state dict"


def _wrong_step(step: Any) -> str:
    if not isinstance(step, int) or isinstance(step, bool):
        return f"step is a number of steps; got {step!r}"
    return "" if step >= 0 else f"step counts from 0; got {step}"


def _which(steps: list[int]) -> str:
    return f"; load(state, step=…) can read {', '.join(map(str, steps))}" if steps else ""


__all__ = ["Checkpoints", "checkpoints_in", "load_torch_checkpoint"]
