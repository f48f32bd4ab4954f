"""One rank compiles for all: the first that needs a frame compiles it, and the others take what it made.

    the first rank     leader/{key} = its number         compiles, then writes part/{key}/0, 1, … and done/{key}
    every other rank   waits for done/{key}              takes the frame, or compiles it by itself

All is in the job's store. The key says what is compiled: the code of the frame, what torch.compile was given, settings,
versions, meshes, and how many times the rank has compiled this before. A rank whose guards do not hold, because its
shards have other sizes for example, compiles by itself; so does one whose leader died, failed or takes too long. A rank
that compiles waits for nobody, so that no two ranks wait for each other.
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
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from dtensor.mesh import environment
from dtensor.mesh.job import job
from dtensor.torch_private.frames import FrameRecorder, caches_are_on, intercept_from_now_on

from .archive import World
from .entries import Entry, NotPortable, put_together, settings
from .identities import digest
from .keeping import kept, place

SWITCH, LIMIT = "DTENSOR_SHARE_COMPILES", "DTENSOR_SHARE_TIMEOUT"
"""The variables that switch it on, and that say after how many seconds of waiting a rank compiles by itself."""

PATIENCE = 600.0
"""These seconds by default."""

PART = 1 << 20
"""The most bytes of a value in the store."""

POLL = 0.05
"""Seconds between two looks into the store."""

SAID_AFTER = 5.0
"""Seconds after which a rank says that it waits."""

log: logging.Logger = logging.getLogger("dtensor")


@dataclass
class Shared:
    """What this rank took from others and gave to them.

    Attributes:
        taken: names of frames that another rank compiled.
        given: names of frames that this rank compiled for others.
        alone: names of frames that this rank compiled although another rank had, and why.
        waited: seconds of waiting.
    """

    taken: list[str] = field(default_factory=list[str])
    given: list[str] = field(default_factory=list[str])
    alone: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    waited: float = 0.0


class Sharing:
    """Takes frames from other ranks of the job, and gives to them."""

    anew: ClassVar[bool] = False

    def __init__(self) -> None:
        self.shared: Shared = Shared()
        self._asked: Counter[str] = Counter()
        self._leading: dict[int, str] = {}

    def answer(self, frame: Any, compiler: str) -> Any:
        """As `dtensor.torch_private.frames.Handler`."""
        here = job()
        if here is None or dist.get_world_size() == 1 or not _can_be_shared(compiler):
            return None
        key = self._key(frame, compiler)
        if here.store.add(f"{key}/asked", 1) == 1:
            here.store.set(f"{key}/leader", str(here.rank))
            self._leading[id(frame)] = key
            return None
        name, began = frame.f_code.co_qualname, time.monotonic()
        entry = self._wait(here, key, name)
        self.shared.waited += time.monotonic() - began
        found, why = (None, entry) if isinstance(entry, str) else self._put_together(entry, frame)
        if found is None:
            log.info("%s is compiled here, too: %s", name, why)
            self.shared.alone.append((name, why))
            return None
        self.shared.taken.append(name)
        return found

    def _key(self, frame: Any, compiler: str) -> str:
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        what = (digest(frame.f_code), compiler, sorted(settings().items()), asdict(World.here()), device)
        key = sha256(repr(what).encode()).hexdigest()[:32]
        self._asked[key] += 1
        return f"dtensor/frame/{key}/{self._asked[key]}"

    def _wait(self, here: Any, key: str, name: str) -> Entry | str:
        """What the leader made of a frame, or why this rank compiles it by itself."""
        limit, began, said = _limit(), time.monotonic(), False
        with here.waiting():
            while not here.store.check([f"{key}/done"]):
                waited = time.monotonic() - began
                leader = int(here.store.get(f"{key}/leader")) if here.store.check([f"{key}/leader"]) else None
                if waited > limit:
                    return f"rank {leader} did not finish it in {limit:.0f} s"
                if leader is not None and waited > 1 and (gone := here.absent(leader)):
                    return gone
                if waited > SAID_AFTER and not said:
                    said = True
                    log.info("waiting for rank %s, which compiles %s", leader, name)
                here.check()
                time.sleep(POLL)
            count, hash_or_why = here.store.get(f"{key}/done").decode().split(" ", 1)
            if not int(count):
                return hash_or_why
            data = b"".join([here.store.get(f"{key}/part/{k}") for k in range(int(count))])
        if here.store.add(f"{key}/read", 1) == dist.get_world_size() - 1:
            for k in range(int(count)):
                here.store.delete_key(f"{key}/part/{k}")
        if sha256(data).hexdigest() != hash_or_why:
            return "it did not arrive whole"
        return pickle.loads(zlib.decompress(data))

    def _put_together(self, entry: Entry, frame: Any) -> tuple[Any, str]:
        if entry.rank and entry.rank != place():
            return None, "its shards are uneven, and this rank has others"
        return put_together(entry, frame)

    @contextmanager
    def recording(self, frame: Any, compiler: str) -> Iterator[FrameRecorder | None]:
        """As `dtensor.torch_private.frames.Handler`."""
        key = self._leading.pop(id(frame), None)
        here = job()
        if key is None or here is None:
            yield None
            return
        made: list[Entry | NotPortable | None] = []
        try:
            with kept(frame, compiler, lambda entry, _: made.append(entry)) as recorder:
                yield recorder
        finally:
            _publish(here.store, key, made[0] if made else None, here.rank)
        if made and isinstance(made[0], Entry):
            self.shared.given.append(frame.f_code.co_qualname)


def _publish(store: Any, key: str, made: Entry | NotPortable | None, rank: int) -> None:
    if not isinstance(made, Entry):
        store.set(f"{key}/done", f"0 rank {rank} cannot give it: {made or 'it was not compiled'}")
        return
    data = zlib.compress(pickle.dumps(made), 1)
    parts = [data[k : k + PART] for k in range(0, len(data), PART)]
    for k, part in enumerate(parts):
        store.set(f"{key}/part/{k}", part)
    store.set(f"{key}/done", f"{len(parts)} {sha256(data).hexdigest()}")


def _can_be_shared(compiler: str) -> bool:
    name = compiler.partition(" ")[0]
    return (
        name in ("inductor", "dtensor") and "'inner'" not in compiler and "'dump'" not in compiler and caches_are_on()
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


_sharing: Sharing | None = None


def share() -> Shared:
    """Let one rank of a job compile for all, from now on; every rank calls it. The same as DTENSOR_SHARE_COMPILES=1.

    Returns:
        What this rank took from others and gave to them.
    """
    global _sharing
    if _sharing is None:
        _sharing = Sharing()
        intercept_from_now_on(_sharing)
    return _sharing.shared


def share_if_asked() -> None:
    """Share if the environment says so."""
    if environment.setting(SWITCH) == "1":
        share()


__all__ = ["Shared", "Sharing", "share", "share_if_asked"]
