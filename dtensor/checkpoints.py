"""`Checkpoints`: a folder of checkpoints of which every one that is there is whole.

torch.distributed.checkpoint writes the tensors (`checkpoint` tells it which part is whose) into a folder that nobody
takes for a checkpoint; only when all ranks have written, and the sizes of all files are noted, it gets its name. A rank
that dies on the way leaves all earlier checkpoints as they were. Loading checks the sizes, and brings tensors into
whatever mesh and placements they have now.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from .errors import CheckpointError

MANIFEST = "manifest.json"
"""The file of a checkpoint with the sizes of the others, in bytes."""

_NAME = re.compile(r"step-(\d+)")


class Checkpoints:
    """Checkpoints in one folder, which all ranks see.

    Collective: every rank makes it, and calls its methods in the same order.

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
        self._group: Any = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._first = self._group is None or dist.get_rank(self._group) == 0

    def save(self, state: dict[str, Any], step: int) -> None:
        """Write `state`, a state dict that may be nested, as the checkpoint of `step`; done when it returns.

        Raises:
            CheckpointError: on all ranks, if one of them could not write. Earlier checkpoints are as they were.
        """
        partial = self._begin(step)
        try:
            dcp.save(state, checkpoint_id=partial, process_group=self._group)
        except (Exception, CheckpointException) as error:
            raise self._failed(step, error) from error
        self._together(lambda: self._finish(partial, step))

    def save_async(self, state: dict[str, Any], step: int) -> "Future[None]":
        """As `save`, in the background: it returns when the values are copied, and they may change then.

        Returns:
            A future, which is done when the checkpoint is there; `result()` raises what went wrong. Wait for it before
            the next save.
        """
        partial = self._begin(step)
        started: Any = dcp.async_save(state, checkpoint_id=partial, process_group=self._group)
        done: Future[None] = Future()

        def finish(written: Any) -> None:
            try:
                written.result()
                if self._first:
                    self._finish(partial, step)
                done.set_result(None)
            except BaseException as error:
                done.set_exception(self._failed(step, error))

        getattr(started, "upload_completion", started).add_done_callback(finish)
        return done

    def load(self, state: dict[str, Any], step: int | None = None) -> int:
        """Read the checkpoint of `step`, the newest by default, into `state`; the step that was read.

        Tensors of `state` are written to, whatever their mesh and placements; other values are replaced in the dict.

        Raises:
            CheckpointError: on all ranks, if there is no checkpoint, or a file of it is not as long as when it was
                written, or it does not hold what `state` does.
        """
        chosen = self._together(lambda: self._checked(step))
        try:
            dcp.load(state, checkpoint_id=self._path(chosen), process_group=self._group)
        except CheckpointException as error:
            text = f"the checkpoint of step {chosen} does not hold what the state does: {_said(error)}"
            raise CheckpointError(text) from error
        return chosen

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, ascending."""
        found = [_NAME.fullmatch(p.name) for p in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(m[1]) for m in found if m)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _begin(self, step: int) -> Path:
        """The folder to write to, empty."""
        if step < 0:
            raise ValueError(f"step counts from 0; got {step}")
        partial = self.folder / f".{self._path(step).name}.partial"

        def make() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

        self._together(make)
        return partial

    def _finish(self, partial: Path, step: int) -> None:
        """Note the sizes, and give the checkpoint its name."""
        sizes = {p.name: p.stat().st_size for p in sorted(partial.iterdir())}
        with open(partial / MANIFEST, "w") as file:
            json.dump(sizes, file)
            file.flush()
            os.fsync(file.fileno())
        target, before = self._path(step), self.folder / f".{self._path(step).name}.replaced"
        if target.exists():
            shutil.rmtree(before, ignore_errors=True)
            target.rename(before)
        partial.rename(target)
        shutil.rmtree(before, ignore_errors=True)
        for old in self.steps()[: -self.keep] if self.keep is not None else ():
            shutil.rmtree(self._path(old))

    def _checked(self, step: int | None) -> int:
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(f"there is {wanted} in {self.folder}{_which(steps)}")
        chosen = steps[-1] if step is None else step
        torn = _torn(self._path(chosen))
        if torn:
            whole = [s for s in steps if s != chosen and not _torn(self._path(s))]
            raise CheckpointError(f"the checkpoint of step {chosen} is damaged: {torn}{_which(whole)}")
        return chosen

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
