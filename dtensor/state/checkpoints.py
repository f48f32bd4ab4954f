"""`Checkpoints`: a folder of checkpoints of which every one that is there is whole.

torch.distributed.checkpoint writes the tensors (`dcp_protocol` tells it which part is whose, `files` how) into
a folder that nobody takes for a checkpoint; only when all ranks have written, and the index of what they wrote is
there, it gets its name. A rank that dies on the way, wherever that is, leaves all earlier checkpoints as they were.
Loading checks every byte that it reads, passes over what is damaged, and brings tensors into whatever mesh and
placements they have now. What goes wrong on one rank is an error on all, and so is it where ranks ask for different
things.
"""

import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ..errors import CheckpointError
from ..mesh.job import all_here
from ..torch_private.core import default_group_timeout
from .files import Reader, attempted, gathered, line, of_ranks, read_into, said, save_from, tried, without_objects
from .index import read_index
from .verify import verify

_NAME = re.compile(r"step-(\d+)|\.step-(\d+)\.replaced")


class Saving(futures.Future[None]):
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
        CheckpointError: on all ranks, if `keep` is no number of at least 1, or another one on some rank.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int | None = None) -> None:
        self.folder: Path = Path(folder)
        self.keep = keep
        # Saves in the background communicate while the program does: on a group of their own.
        all_here()
        self._group: Any = (
            dist.new_group(backend="gloo", timeout=default_group_timeout()) if dist.is_initialized() else None
        )
        self._first = self._group is None or dist.get_rank(self._group) == 0
        self._saving: Saving | None = None
        self._asked(f"Checkpoints(keep={keep!r})", lambda: _check_keep(keep))

    def save(self, state: dict[str, Any], step: int) -> None:
        """Write `state`, a state dict that may be nested, as the checkpoint of `step`; done when it returns.

        Raises:
            CheckpointError: on all ranks, if one of them could not write, or the save before this one, in the
                background, failed and nobody has asked. Earlier checkpoints are as they were.
        """
        given = self._asked(f"save(step={step!r})", lambda: _state_of(state, step))
        self._write(given, self._begin(step), step)

    def save_async(self, state: dict[str, Any], step: int) -> Saving:
        """As `save`, in the background: it returns when the values are copied, and they may change then.

        Returns:
            A future, which is done when the checkpoint is there; `result()` raises what went wrong. All other methods
            wait for it; write `wait()` before the process groups are destroyed.
        """
        copied = self._asked(f"save_async(step={step!r})", lambda: _copied(_state_of(state, step)))
        partial, saving = self._begin(step), Saving()

        def write() -> None:
            try:
                self._write(copied, partial, step)
                saving.set_result(None)
            except BaseException as error:
                saving.set_exception(error)

        self._saving = saving
        threading.Thread(target=write, name="dtensor checkpoint").start()
        return saving

    def _write(self, state: dict[str, Any], partial: Path, step: int) -> None:
        try:
            save_from(state, partial, self._group)
            self._together(lambda: self._finish(partial, step))
        except (Exception, CheckpointException) as error:
            raise self._failed(step, error) from error

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
        self._asked("newest()", lambda: None)
        damaged = ""
        for step, path in self._newest_first():
            torn = of_ranks(gathered(verify(path, self._share), self._group))
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
        self._asked(f"load(step={step!r})", lambda: _check(state, step or 0))
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
        reader, torn = tried(lambda: Reader(path), self._group)
        if torn:
            return torn
        wrong, is_damage = read_into(state, reader, self._group)
        if wrong and not is_damage:
            raise CheckpointError(f"the checkpoint of step {step} cannot be read into the state: {wrong}")
        return wrong

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

    def _begin(self, step: int) -> Path:
        """The folder to write to, empty."""
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

    def _asked(self, call: str, prepare: Callable[[], Any]) -> Any:
        """What `prepare` gives once the save before is done, if all ranks are asked for the same and none fails.

        Raises:
            CheckpointError: on all ranks.
        """

        def prepared() -> Any:
            self.wait()
            return prepare()

        made, wrong = attempted(prepared)
        calls, problems = zip(*gathered((call, wrong), self._group))
        if any(problems):
            raise CheckpointError(f"{call.partition('(')[0]}: {of_ranks(problems)}")
        if len(set(calls)) > 1:
            asked = ", ".join(f"{call} on rank {rank}" for rank, call in enumerate(calls))
            raise CheckpointError(f"all ranks make the same calls with the same arguments; here {asked}")
        return made

    def _together(self, act: Callable[[], Any]) -> Any:
        """What `act` gives on the first rank, on all; all raise if it does."""
        told: list[Any] = [None, None]
        if self._first:
            try:
                told[0] = act()
            except Exception as error:
                told[1] = line(error)
        if self._group is not None:
            dist.broadcast_object_list(told, src=dist.get_global_rank(self._group, 0), group=self._group)
        if told[1] is not None:
            raise CheckpointError(told[1])
        return told[0]

    def _failed(self, step: int, error: BaseException) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self.folder}: {said(error)}{_which(self.steps())}"
        )


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Step -> its checkpoint, of those in `folder`: under its own name, or, where a rank died between the two, the one
    for the while in which it is replaced."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []  # names that begin with a dot first
    matches = [(_NAME.fullmatch(path.name), path) for path in paths]
    return {int(match[1] or match[2]): path for match, path in matches if match}


def _torn(path: Path) -> str:
    """What is wrong with the index and the sizes of a checkpoint; "" if nothing is."""
    try:
        read_index(path)
    except CheckpointError as error:
        return str(error)
    return ""


def _check_keep(keep: Any) -> None:
    if keep is not None and (not _is_number(keep) or keep < 1):
        raise CheckpointError(f"keep is the number of checkpoints that stay, at least 1, or None for all; got {keep!r}")


def _is_number(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _check(state: Any, step: Any) -> None:
    if not isinstance(state, dict):
        raise CheckpointError(f"the state is a {type(state).__name__}; give a state dict")
    if not _is_number(step):
        raise CheckpointError(f"step is a number of steps; got {step!r}")
    if step < 0:
        raise CheckpointError(f"step counts from 0; got {step}")


def _state_of(state: Any, step: Any) -> dict[str, Any]:
    """What is to be saved of `state`."""
    _check(state, step)
    return without_objects(state)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """A copy on the host."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        copied: Any = stager.stage(state)
        return copied
    finally:
        stager.close()


def _which(steps: list[int]) -> str:
    return f"; load(state, step=…) can read {', '.join(map(str, steps))}" if steps else ""


__all__ = ["Checkpoints", "checkpoints_in"]
