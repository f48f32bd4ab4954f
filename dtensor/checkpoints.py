"""`Checkpoints`: a folder of checkpoints of which every one that is there is whole.

torch.distributed.checkpoint writes the tensors (`checkpoint` tells it which part is whose) into a folder that nobody
takes for a checkpoint; only when all ranks have written, and the sizes of all files are noted, it gets its name. A rank
that dies on the way, wherever that is, leaves all earlier checkpoints as they were. Loading checks the sizes, passes
over what is damaged, and brings tensors into whatever mesh and placements they have now.
"""

import json
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
from .errors import CheckpointError
from .job import all_here

MANIFEST = "manifest.json"
"""The file of a checkpoint with the sizes of the others, in bytes."""

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
        partial = self._begin(step)
        try:
            dcp.save(state, checkpoint_id=partial, process_group=self._group)
            self._together(lambda: self._finish(partial, step))
        except (Exception, CheckpointException) as error:
            raise self._failed(step, error) from error

    def save_async(self, state: dict[str, Any], step: int) -> Saving:
        """As `save`, in the background: it returns when the values are copied, and they may change then.

        Returns:
            A future, which is done when the checkpoint is there; `result()` raises what went wrong. All other methods
            wait for it; write `wait()` before the process groups are destroyed.
        """
        partial = self._begin(step)
        started: Any = dcp.async_save(state, checkpoint_id=partial, process_group=self._group)
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

        A newer one that is damaged is passed over, with a warning on the first rank.
        """
        self.wait()
        return self._newest()[0]

    def load(self, state: dict[str, Any], step: int | None = None) -> int:
        """Read the checkpoint of `step`, by default the newest that is whole, into `state`; the step that was read.

        Tensors of `state` are written to, whatever their mesh and placements; other values are replaced in the dict.

        Raises:
            CheckpointError: on all ranks, if there is no checkpoint, or a file of that of `step` is not as long as when
                it was written, or it does not hold what `state` does.
        """
        self.wait()
        if step is None:
            chosen, damaged = self._newest()
            if chosen is None:
                raise CheckpointError(f"there is no {'whole ' if damaged else ''}checkpoint in {self.folder}{damaged}")
        else:
            chosen = step
            self._together(lambda: self._check(step))
        path = self._together(lambda: self._found()[chosen])
        try:
            dcp.load(state, checkpoint_id=path, process_group=self._group)
        except CheckpointException as error:
            text = f"the checkpoint of step {chosen} does not hold what the state does: {_said(error)}"
            raise CheckpointError(text) from error
        return chosen

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, ascending."""
        return sorted(self._found())

    def _found(self) -> dict[int, Path]:
        """Step -> its checkpoint: under its own name, or, where a rank died between the two, the one for the while in
        which it is replaced."""
        paths = sorted(self.folder.iterdir()) if self.folder.is_dir() else []  # names that begin with a dot first
        matches = [(_NAME.fullmatch(path.name), path) for path in paths]
        return {int(match[1] or match[2]): path for match, path in matches if match}

    def _path(self, step: int, state: str = "") -> Path:
        """The folder of a checkpoint; of one that is "partial", "replaced" or "removed"."""
        name = f"step-{step:08d}"
        return self.folder / (f".{name}.{state}" if state else name)

    def _begin(self, step: int) -> Path:
        """The folder to write to, empty."""
        if step < 0:
            raise ValueError(f"step counts from 0; got {step}")
        self.wait()
        partial = self._path(step, "partial")

        def make() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in (*self.folder.glob(".step-*.partial"), *self.folder.glob(".step-*.removed")):
                shutil.rmtree(left)
            partial.mkdir()

        self._together(make)
        return partial

    def _finish(self, partial: Path, step: int) -> None:
        """Note the sizes, and give the checkpoint its name."""
        sizes = {p.name: p.stat().st_size for p in sorted(partial.iterdir())}
        with open(partial / MANIFEST, "w") as file:
            json.dump(sizes, file)
            file.flush()
            os.fsync(file.fileno())
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

    def _check(self, step: int) -> None:
        found = self._found()
        if step not in found:
            raise CheckpointError(f"there is no checkpoint of step {step} in {self.folder}{_which(sorted(found))}")
        torn = _torn(found[step])
        if torn:
            whole = [s for s in sorted(found) if not _torn(found[s])]
            raise CheckpointError(f"the checkpoint of step {step} is damaged: {torn}{_which(whole)}")

    def _newest(self) -> tuple[int | None, str]:
        """The newest step whose checkpoint is whole, and what is wrong with those that are newer, in words."""

        def look() -> tuple[int | None, str]:
            damaged = ""
            for step, path in sorted(self._found().items(), reverse=True):
                torn = _torn(path)
                if not torn:
                    return step, damaged
                damaged += f"; that of step {step} is damaged: {torn}"
            return None, damaged

        step, damaged = self._together(look)
        if step is not None and damaged and self._first:
            warnings.warn(f"reading the checkpoint of step {step} in {self.folder}{damaged}", stacklevel=3)
        return step, damaged

    def _together(self, act: Callable[[], Any]) -> Any:
        """What `act` gives on the first rank, on all; all raise if it does."""
        said: list[Any] = [None, None]
        if self._first:
            try:
                said[0] = act()
            except (CheckpointError, OSError) as error:
                said[1] = error
        if self._group is not None:
            dist.broadcast_object_list(said, src=dist.get_global_rank(self._group, 0), group=self._group)
        if said[1] is not None:
            raise said[1]
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


def _torn(path: Path) -> str:
    """What is wrong with the files of a checkpoint; "" if nothing is."""
    try:
        sizes = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return f"{MANIFEST} is missing or cut short"
    for name, size in sizes.items():
        found = (path / name).stat().st_size if (path / name).exists() else None
        if found is None:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found:,} bytes of {size:,}"
    return ""


def _which(steps: list[int]) -> str:
    return f"; load(state, step=…) can read {', '.join(map(str, steps))}" if steps else ""


__all__ = ["Checkpoints"]
