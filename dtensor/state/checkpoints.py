"""`Checkpoints`: a folder of checkpoints in which every visible checkpoint is complete.

torch.distributed.checkpoint writes the tensors: `dtensor.tensor.dcp_protocol` determines which rank writes what, and
`files` how. It writes to a temporary folder, which gets the name of a checkpoint only when all ranks have written and
the index exists. So a rank that dies at any point leaves all earlier checkpoints intact. Loading verifies every byte
that it reads, skips damaged checkpoints, and reads tensors into their current mesh and placements. A failure on one
rank raises on all ranks, and so do calls that differ between ranks.
"""

import os
import re
import shutil
import threading
import uuid
import warnings
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ..dispatch.view_copies import fresh
from ..errors import ArgumentTypeError, CheckpointError, shown
from ..job.job import all_here
from ..program.stages import Stage
from ..tensor.tensor import DTensor
from ..torch_private.core import default_group_timeout, functional_collectives
from ..torch_private.staging import StateDictStager
from .files import Reader, attempted, gathered, line, of_ranks, read_into, said, save_from, tried
from .index import read_index
from .optimizers import to_save
from .plain_values import check_values
from .verify import verify

_NAME = re.compile(r"step-(\d+)|\.step-(\d+)\.replaced")


class Saving(futures.Future[None]):
    """The future of a background save. `result()` waits until the checkpoint is complete, or raises the error."""

    told: bool = False
    """Whether `result()` has been called after the save was done."""

    def result(self, timeout: float | None = None) -> None:
        """Wait for up to `timeout` seconds until the checkpoint is complete.

        Raises:
            TimeoutError: it is not complete by then.
            CheckpointError: it could not be written; or whatever else ended the save."""
        try:
            return super().result(timeout)
        finally:
            self.told = self.told or self.done()


class Checkpoints:
    """The checkpoints in one folder, which must be accessible from all ranks.

    Collective: every rank creates this object and calls its methods in the same order with the same arguments, except
    `steps`. Only one job at a time may write to a folder; others may read.

    Args:
        folder: the folder. Each checkpoint is a folder in it, such as `step-00000100`.
        keep: how many of the newest checkpoints to keep; older ones are removed after a save. None keeps all.

    Raises:
        CheckpointError: `keep` is not an int of at least 1, or differs between ranks; raised on all ranks.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int | None = None) -> None:
        if not isinstance(folder, (str, os.PathLike)):
            raise ArgumentTypeError(
                f"Checkpoints takes the path of a folder; got {shown(folder)}, write Checkpoints('ckpt')"
            )
        self.folder: Path = Path(folder)
        self.keep = keep
        # Saves in the background communicate concurrently with the program, so they need a separate process group.
        all_here()
        self._group: Any = (
            dist.new_group(backend="gloo", timeout=default_group_timeout()) if dist.is_initialized() else None
        )
        self._first = self._group is None or dist.get_rank(self._group) == 0
        self._saving: Saving | None = None
        self._asked(f"Checkpoints(keep={keep!r})", lambda: _check_keep(keep))

    def save(self, state: dict[str, Any], step: int) -> None:
        """Writes `state` as the checkpoint of `step`. The checkpoint is complete when this returns.

        Args:
            state: a state dict, which may be nested, of tensors, numbers, strings and containers of these, and of
                modules, optimizers and other objects with `state_dict` and `load_state_dict`. An optimizer is written
                by the names that its parameters have in the modules of `state`.
            step: the number of the checkpoint, at least 0. An existing checkpoint of this step is replaced.

        Raises:
            CheckpointError: a rank could not write, or a previous save in the background failed and `result()` was not
                called on it; raised on all ranks. Earlier checkpoints are intact. Before anything is written:
                an optimizer is given without the module that has its parameters, or as `optimizer.state_dict()`; two
                keys of a dict are the same as text (1 and "1"); or ranks have different numbers or strings for one key.
        """
        with Stage(f"saving the checkpoint of step {step}"):
            given = self._asked(f"save(step={step!r})", lambda: _state_of(state, step))
            check_values(given, self._group)
            self._write(given, self._begin(step), step)

    def save_async(self, state: dict[str, Any], step: int) -> Saving:
        """As `save`, but in the background. Returns once the values are copied to the host; they may then be modified.

        Args:
            state: as in `save`.
            step: as in `save`.

        Returns:
            A future that is done when the checkpoint is complete; its `result()` raises if the save failed. All other
            collective methods wait for it first. Call `wait()` before destroying the process groups.

        Raises:
            CheckpointError: as in `save`, for errors before the save starts.
        """
        with Stage(f"copying what the checkpoint of step {step} holds"):
            copied = self._asked(f"save_async(step={step!r})", lambda: _copied(_state_of(state, step)))
            check_values(copied, self._group)
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
            raise self._failed(step, error) from None

    def wait(self) -> None:
        """Waits for a save in the background.

        Raises:
            CheckpointError: the save failed, and `result()` was not called on its future; raised on all ranks.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            with Stage("waiting for the checkpoint that is saved in the background"):
                futures.wait([saving])
            if not saving.told:
                saving.result()

    def newest(self) -> int | None:
        """The step of the newest intact checkpoint, which `load` reads by default; None if there is none.

        To verify a checkpoint the ranks read every byte of it, each rank a share. Newer damaged checkpoints are
        skipped, with a warning on the first rank.
        """
        with Stage("verifying checkpoints"):
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
        """Reads a checkpoint into `state`.

        Args:
            state: a state dict like the one that was saved. Its tensors are overwritten, whatever their mesh and
                placements; other values are replaced in the dict. Modules and optimizers are given the state that
                they had. An optimizer then has state for those parameters for which it was saved, placed like them,
                and the settings of its groups, except foreach, fused, capturable and differentiable, which it keeps.
            step: the checkpoint to read; None reads the newest intact one and skips damaged ones with a warning.

        Returns:
            The step that was read.

        Raises:
            CheckpointError: there is no checkpoint, the checkpoint of `step` is damaged (`state` may then hold part of
                it), or its contents do not match `state`; raised on all ranks.
        """
        with Stage("loading a checkpoint"):
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
            raise CheckpointError(
                f"there is no {'intact ' if damaged else ''}checkpoint in {self.folder}{damaged}; give the folder that "
                "Checkpoints(folder).save(state, step) wrote to, or start anew where newest() is None"
            )

    def _read(self, state: dict[str, Any], step: int, path: Path) -> str:
        """Read a checkpoint into `state`. Returns a description of the damage, or "" for none."""
        with Stage(f"step {step}", inside=True):
            reader, torn = tried(lambda: Reader(path), self._group)
            if torn:
                return torn
            wrong, is_damage = read_into(state, reader, self._group)
        if wrong and not is_damage:
            raise CheckpointError(f"the checkpoint of step {step} cannot be read into the state: {wrong}")
        return wrong

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in ascending order. Not collective; does not verify the checkpoints."""
        return sorted(self._found())

    def _found(self) -> dict[int, Path]:
        return checkpoints_in(self.folder)

    def _path(self, step: int, state: str = "") -> Path:
        """The folder of a checkpoint, or of one in a state such as "replaced" or "removed"."""
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
        """Create an empty temporary folder to write to, and remove those that failed saves have left.

        The name is new each time. So a process of an earlier job that has yet to end never writes to what this one
        writes, and what it writes to is renamed before it is removed, so that it can add nothing.
        """

        def make() -> Path:
            if self.folder.exists() and not self.folder.is_dir():
                raise CheckpointError(f"{self.folder} is a file; give another path, for a folder")
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(".step-*.partial"):
                left.rename(left.with_suffix(".removed"))
            for left in self.folder.glob(".step-*.removed"):
                shutil.rmtree(left)
            partial = self._path(step, f"{uuid.uuid4().hex[:8]}.partial")
            partial.mkdir()
            return partial

        try:
            return self._together(make)
        except CheckpointError as error:
            raise self._failed(step, error) from None

    def _finish(self, partial: Path, step: int) -> None:
        """Give a complete checkpoint its final name, and remove the one it replaces and those beyond `keep`."""
        target, before = self._path(step), self._path(step, "replaced")
        if target.exists():
            shutil.rmtree(before, ignore_errors=True)
            target.rename(before)
        partial.rename(target)
        shutil.rmtree(before, ignore_errors=True)
        for old in self.steps()[: -self.keep] if self.keep is not None else ():
            # A partly removed checkpoint must not have the name of a complete one.
            removed = self._found()[old].rename(self._path(old, "removed"))
            shutil.rmtree(removed)

    @property
    def _share(self) -> tuple[int, int]:
        """This rank and the number of ranks."""
        return (0, 1) if self._group is None else (dist.get_rank(self._group), dist.get_world_size(self._group))

    def _warn(self, step: int, damaged: str) -> None:
        if damaged and self._first:
            warnings.warn(f"reading the checkpoint of step {step} in {self.folder}{damaged}", stacklevel=3)

    def _asked(self, call: str, prepare: Callable[[], Any]) -> Any:
        """Wait for the previous save and return the result of `prepare`, after checking that all ranks make `call`.

        Raises:
            CheckpointError: `prepare` fails on a rank, or ranks make different calls; raised on all ranks.
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
            raise CheckpointError(f"all ranks must make the same calls with the same arguments; here {asked}")
        return made

    def _together(self, act: Callable[[], Any]) -> Any:
        """Run `act` on the first rank and return its result on all ranks. If it raises, all ranks do."""
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
    """Step -> folder of its checkpoint, for all checkpoints in `folder`.

    If a rank died while a checkpoint was being replaced, its folder has the temporary name of the replaced one.
    """
    paths = sorted(folder.iterdir()) if folder.is_dir() else []  # names that begin with a dot come first
    matches = [(_NAME.fullmatch(path.name), path) for path in paths]
    return {int(match[1] or match[2]): path for match, path in matches if match}


def _torn(path: Path) -> str:
    """A description of what is wrong with the index and file sizes of a checkpoint; "" if nothing is."""
    try:
        read_index(path)
    except CheckpointError as error:
        return str(error)
    return ""


def _check_keep(keep: Any) -> None:
    if keep is not None and (not _is_number(keep) or keep < 1):
        raise CheckpointError(f"keep is the number of checkpoints to keep, at least 1, or None for all; got {keep!r}")


def _is_number(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _check(state: Any, step: Any) -> None:
    if not isinstance(state, dict):
        raise CheckpointError(
            f'the state is {shown(state)}; give a dict such as {{"model": model, "optimizer": optimizer}}'
        )
    if not _is_number(step):
        raise CheckpointError(f"step is a number of steps; got {step!r}")
    if step < 0:
        raise CheckpointError(f"step counts from 0; got {step}")


def _state_of(state: Any, step: Any) -> dict[str, Any]:
    """The state dict to save: `state`, with objects replaced by their state dicts."""
    _check(state, step)
    return to_save(state)


class _Stager(StateDictStager):
    """Torch's stager copies the bytes of storages. So views that read theirs with other signs are resolved first."""

    def deepcopy_with_tensor_offload(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """As torch's, which calls this for everything in a state dict, including the local tensor of a DTensor."""
        if isinstance(x, DTensor):
            x = fresh(x)
        elif isinstance(x, torch.Tensor):
            x = x.wait() if isinstance(x, functional_collectives.AsyncCollectiveTensor) else x
            x = x.resolve_conj().resolve_neg()
        return super().deepcopy_with_tensor_offload(x, *args, **kwargs)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state dict in host memory."""
    stager = _Stager()
    try:
        copied: Any = stager.stage(state)
        return copied
    finally:
        stager.close()


def _which(steps: list[int]) -> str:
    return f"; load(state, step=…) can read {', '.join(map(str, steps))}" if steps else ""


__all__ = ["Checkpoints", "checkpoints_in"]
