"""One rank compiles for all: the first that needs a frame compiles it, and the others take what it made.

    the first rank     leader/{key} = its number         compiles, then writes part/{key}/0, 1, … and done/{key}
    every other rank   waits for done/{key}              takes the frame, or compiles it by itself

All is in the job's store. The key says what is compiled: the code of the frame, what torch.compile was given, settings,
versions, meshes, plain values and shapes of shards that the frame is given, and how many times the rank has compiled
this before. Ranks whose uneven shards differ in the middle of a frame form the next group, with a leader of its own. A
rank for which other guards do not hold compiles by itself; so does one whose leader died, failed, makes no progress or
takes too long. A rank that compiles waits for nobody, so that no two ranks wait for each other.

What was compiled is kept on disk, too (`on_disk`), since the leader finds nothing in AOTAutograd's cache.
"""

import logging
import pickle
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from dtensor.errors import ShardingError
from dtensor.mesh import environment
from dtensor.mesh.job import job
from dtensor.mesh.provenance import keeps_specs
from dtensor.tensor.compile_hooks import share_from_now_on
from dtensor.tensor.tensor import DTensor
from dtensor.torch_private.frames import FrameRecorder, caches_are_on
from dtensor.torch_private.phases import LOADING, SAVING, WAITING, phase, wait_for

from ..backends.run_passes import WATCHERS
from ..estimates.meshes import mesh_groups
from .archive import World
from .beat import PULSE, Beat
from .entries import Entry, NotPortable, asks_for_rank, changed_source, other_parts, put_together, settings
from .identities import digest
from .keeping import kept
from .on_disk import from_disk, is_on_disk, to_disk

LIMIT = "DTENSOR_SHARE_TIMEOUT"
"""The variable that says after how many seconds of waiting a rank compiles by itself."""

PATIENCE = 600.0
"""These seconds by default."""

STALL = 30.0
"""Seconds after which a rank that waits gives up a leader that does nothing: that hangs, or waits for this rank."""

PART = 1 << 20
"""The most bytes of a value in the store."""

POLL, POLL_MOST = 0.02, 0.5
"""Seconds between two looks into the store, at first and at most."""

SAID_AFTER = 5.0
"""Seconds after which a rank says that it waits."""

GROUPS = 8
"""The most groups of ranks with equal shards, one of which after the other a rank tries."""


OPTIMIZERS = str(Path(torch.optim.__file__).parent)
"""Where code lies that is not shared: which frames of a step Dynamo compiles depends on what the rank has compiled."""

log: logging.Logger = logging.getLogger("dtensor")


@dataclass
class Shared:
    """What this rank took from others and gave to them.

    Attributes:
        taken: names of frames that another rank compiled.
        kept: names of frames that an earlier job on this machine compiled.
        given: names of frames that this rank compiled for others.
        alone: names of frames that this rank compiled although another rank had, and why.
        waited: seconds of waiting.
    """

    taken: list[str] = field(default_factory=list[str])
    kept: list[str] = field(default_factory=list[str])
    given: list[str] = field(default_factory=list[str])
    alone: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    waited: float = 0.0


class Sharing:
    """Takes frames from other ranks of the job, and gives to them."""

    anew: ClassVar[bool] = False

    def __init__(self) -> None:
        self.shared: Shared = Shared()
        self._job: Any = None
        self._asked: Counter[str] = Counter()
        self._own: set[str] = set()
        self._leading: dict[int, tuple[str, str]] = {}

    def answer(self, frame: Any, compiler: str) -> Any:
        """As `dtensor.torch_private.frames.Handler`."""
        here = job()
        if here is None or dist.get_world_size() == 1 or not _can_be_shared(frame, compiler):
            return None
        if here is not self._job:  # another job of this process, in whose store nothing was asked for
            self._job = here
            self._asked.clear()
            self._own.clear()
        if not self._own.isdisjoint((compiler, code := digest(frame.f_code))):
            return None
        try:
            return self._found(here, frame, compiler, code)
        except ShardingError:
            raise
        except RuntimeError as error:
            log.info("%s is compiled here, as the job's store does not answer: %s", frame.f_code.co_qualname, error)
            return None

    def _found(self, here: Any, frame: Any, compiler: str, code: str) -> Any:
        name, what = frame.f_code.co_qualname, _key(frame, compiler, code)
        self._asked[what] += 1
        if is_on_disk(what):
            with phase(LOADING):
                for entry in from_disk(what):
                    found, _ = _put_together(entry, frame)
                    if found is not None:
                        self.shared.kept.append(name)
                        return found
        why = ""
        for group in range(GROUPS):
            key = f"dtensor/frame/{what}/{self._asked[what]}/{group}"
            if here.store.add(f"{key}/asked", 1) == 1:
                here.store.set(f"{key}/leader", str(here.rank))
                self._leading[id(frame)] = key, what
                return None
            began = time.monotonic()
            with phase(WAITING):
                entry, why = self._wait(here, key, name)
            self.shared.waited += time.monotonic() - began
            if entry is None:
                break
            with phase(LOADING):
                found, why = _put_together(entry, frame)
                if found is not None:
                    self.shared.taken.append(name)
                    to_disk(what, entry)
                    return found
                if entry.rank is not None or not other_parts(entry):
                    self._own.add(code)
                    break
        if "AOTAutograd kept nothing" in why:
            self._own.add(compiler)
        log.info("%s is compiled here, too: %s", name, why)
        self.shared.alone.append((name, why))
        return None

    def _wait(self, here: Any, key: str, name: str) -> tuple[Entry | None, str]:
        """What the leader made of a frame, or None and why this rank compiles it by itself."""
        store, limit, began, poll, said = here.store, _limit(), time.monotonic(), POLL, False
        looked, moved, beat = began, began, b""
        with here.waiting():
            while not store.check([f"{key}/done"]):
                time.sleep(poll)
                poll, now = min(poll * 1.2, POLL_MOST), time.monotonic()
                if now - looked < min(PULSE, limit):
                    continue
                looked = now
                here.check()
                leader = int(store.get(f"{key}/leader")) if store.check([f"{key}/leader"]) else None
                wait_for("another rank" if leader is None else f"rank {leader}")
                if now - began > limit:
                    return None, f"rank {leader} did not finish it in {limit:.0f} s"
                if leader is not None and (gone := here.absent(leader)):
                    return None, gone
                before, beat = beat, store.get(f"{key}/beat") if store.check([f"{key}/beat"]) else b""
                moved = now if before != beat else moved
                if now - moved > STALL:
                    return None, f"rank {leader} has made no progress for {STALL:.0f} s"
                if now - began > SAID_AFTER and not said:
                    said = True
                    log.info("waiting for rank %s, which compiles %s", leader, name)
            count, hash_or_why = store.get(f"{key}/done").decode().split(" ", 1)
            if not int(count):
                return None, hash_or_why
            data = b"".join([store.get(f"{key}/part/{k}") for k in range(int(count))])
        if store.add(f"{key}/read", 1) == dist.get_world_size() - 1:
            for k in range(int(count)):
                store.delete_key(f"{key}/part/{k}")
        if sha256(data).hexdigest() != hash_or_why:
            return None, "it did not arrive whole"
        return pickle.loads(zlib.decompress(data)), ""

    @contextmanager
    def recording(self, frame: Any, compiler: str) -> Iterator[FrameRecorder | None]:
        """As `dtensor.torch_private.frames.Handler`."""
        key, what = self._leading.pop(id(frame), ("", ""))
        here = job()
        if not key or here is None:
            yield None
            return
        made: list[Entry | NotPortable | None] = []
        try:
            with (
                Beat(here.store, f"{key}/beat"),
                kept(frame, compiler, lambda entry, _: made.append(entry)) as recorder,
            ):
                yield recorder
        finally:
            with phase(SAVING):
                _publish(here.store, key, made[0] if made else None, here.rank)
        if made and isinstance(made[0], Entry):
            self.shared.given.append(frame.f_code.co_qualname)
            with phase(SAVING):
                to_disk(what, made[0])
        elif made and "AOTAutograd kept nothing" in str(made[0]):
            self._own.add(compiler)


def _key(frame: Any, compiler: str, code: str) -> str:
    """What is compiled, as a hash. Ranks whose graphs are certain to differ have different ones."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    meshes = [(m.names, m.network.sizes, m.network.links) for m in mesh_groups()]
    values = [(name, _said(value)) for name, value in sorted(frame.f_locals.items())]
    what = (code, compiler, sorted(settings().items()), asdict(World.here()), meshes, device, values)
    return sha256(repr(what).encode()).hexdigest()[:32]


PLAIN = (bool, int, float, str, type(None))
"""Types of the values that Dynamo compares, or makes constants."""


def _said(value: Any) -> str:
    """A value that a frame is given, in words, as far as it may differ between ranks."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, nn.Module):
        parameters = [*value.parameters(), *value.buffers()]
        return f"{type(value).__name__} {[_said(x) for x in parameters if isinstance(x, DTensor)]}"
    if isinstance(value, DTensor):
        return str(tuple(value._local_tensor.shape))
    return type(value).__name__


def _put_together(entry: Entry, frame: Any) -> tuple[Any, str]:
    if why := changed_source(entry) or other_parts(entry):
        return None, why
    return put_together(entry, frame)


def _publish(store: Any, key: str, made: Entry | NotPortable | None, rank: int) -> None:
    try:
        if not isinstance(made, Entry):
            store.set(f"{key}/done", f"0 rank {rank} cannot give it: {made or 'it was not compiled'}")
            return
        data = zlib.compress(pickle.dumps(made), 1)
        parts = [data[k : k + PART] for k in range(0, len(data), PART)]
        for k, part in enumerate(parts):
            store.set(f"{key}/part/{k}", part)
        store.set(f"{key}/done", f"{len(parts)} {sha256(data).hexdigest()}")
    except RuntimeError as error:
        log.info("what was compiled cannot be given to other ranks, as the job's store does not answer: %s", error)


def _can_be_shared(frame: Any, compiler: str) -> bool:
    """Whether others can use what is compiled of a frame, and nobody wants to see this rank's own graphs."""
    name = compiler.partition(" ")[0]
    wanted = [environment.text("dump"), environment.text("verify") == "1", environment.findings(), environment.level()]
    return (
        name in ("inductor", "dtensor")
        and not any(f"'{option}'" in compiler for option in ("inner", "dump", "verify"))
        and caches_are_on()
        and not any(wanted)
        and not WATCHERS
        and not keeps_specs()
        and not asks_for_rank(frame.f_code)
        and not frame.f_code.co_filename.startswith(OPTIMIZERS)
    )


def _limit() -> float:
    """Seconds that a rank waits.

    Raises:
        ValueError: the variable holds no number.
    """
    given = environment.setting(LIMIT)
    try:
        return float(given) if given else PATIENCE
    except ValueError:
        raise ValueError(f"the environment variable {LIMIT} is {given!r}; write a number of seconds") from None


sharing: Sharing = Sharing()
"""What this process takes and gives."""


def share() -> Shared:
    """Let one rank of a job compile for all, from now on; every rank calls it. The same as DTENSOR_SHARE_COMPILES=1.

    Returns:
        What this rank took from others and gave to them.
    """
    share_from_now_on()
    return sharing.shared


__all__ = ["Shared", "Sharing", "share", "sharing"]
