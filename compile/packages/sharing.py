"""One rank compiles for all: of the ranks that come to equal graphs, the first compiles, and the others take that.

Every rank traces by itself, so that guards, constants and graph are its own. AOTAutograd and Inductor, which take most
of the time, work once for all ranks whose graphs are equal:

    the first rank     leader/{key} = its number         compiles, then writes part/{key}/0, 1, … and done/{key}
    every other rank   waits for done/{key}              loads what it holds, or compiles by itself

All is in the job's store, and in AOTAutograd's cache on each machine, where the next start finds it. The key is that of
AOTAutograd, without what differs between ranks (`keys_of_any_rank`), and with the processor and the sizes of all
tensors in the graph. Two things of a trace depend on the rank and are not in the key: lengths of uneven shards between
operators, and where a trace says so (`note_place`). They are noted, and ranks for which they do not hold form the next
group, with a leader of its own. A rank whose leader died, failed, makes no progress or takes too long compiles by
itself. A rank that compiles waits for nobody, so that no two ranks wait for each other.
"""

import logging
import pickle
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

import torch.distributed as dist

from dtensor.errors import ArgumentError, ShardingError
from dtensor.job.job import Job, job
from dtensor.layout.chunks import Lengths, uneven_noted
from dtensor.mesh.mesh import forget_all_but_meshes, keys_of_any_rank
from dtensor.mesh.provenance import keeps_specs
from dtensor.program import environment
from dtensor.tensor.tensor import DTensor
from dtensor.torch_private.frames import caches_are_on
from dtensor.torch_private.kernels.libraries import noted_kernels, using_kernels
from dtensor.torch_private.phases import LOADING, SAVING, WAITING, current, phase, wait_for

from ..backends.run_passes import WATCHERS
from ..recording.frames import Frame, recent_frames, remember
from .archive import World
from .beat import PULSE, Beat
from .entries import as_libraries, by_reference, libraries, reported
from .which_ranks import other_part, uneven_lengths

SHARE = "DTENSOR_SHARE_COMPILES"
"""The variable that says, with 0, that every rank compiles for itself."""

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

GROUPS = 8
"""The most groups of ranks with equal shards, one of which after the other a rank tries."""


log: logging.Logger = logging.getLogger("dtensor")


@dataclass
class Shared:
    """What this rank took from others and gave to them.

    Attributes:
        taken: names of frames with a graph that another rank compiled.
        kept: names of frames with a graph that was compiled before on this machine.
        given: names of frames with a graph that this rank compiled for others.
        alone: names of frames with a graph that this rank compiled although another rank had, and why.
        waited: seconds of waiting.
    """

    taken: list[str] = field(default_factory=list[str])
    kept: list[str] = field(default_factory=list[str])
    given: list[str] = field(default_factory=list[str])
    alone: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    waited: float = 0.0


@dataclass(frozen=True)
class Note:
    """What AOTAutograd's key does not say of what was compiled.

    Attributes:
        lengths: (length, group, part): lengths that do not divide, and the part of a rank for which this holds.
        rank: the rank for which it holds; None if it holds for all.
        kernels: hash of a kernel's source -> its library.
        report: what is known of the frame for reports, pickled.
    """

    lengths: tuple[tuple[int, str, int], ...]
    rank: int | None
    kernels: dict[str, bytes] = field(repr=False)
    report: bytes = field(repr=False)


class Sharing:
    """See `dtensor.torch_private.graph_cache.Exchange`."""

    def __init__(self) -> None:
        self.shared: Shared = Shared()

    @contextmanager
    def session(self) -> Iterator["Compiled | None"]:
        """A context in which a frame is compiled; None if its graphs are not shared."""
        here = job()
        if here is None or dist.get_world_size() == 1 or not _can_be_shared():
            yield None
            return
        with ExitStack() as until_compiled:
            made = Compiled(self.shared, here, until_compiled)
            try:
                yield made
            finally:
                made.give_up()


class Compiled:
    """A frame that is compiled. See `dtensor.torch_private.graph_cache.Session`."""

    def __init__(self, shared: Shared, here: Job, until_compiled: ExitStack) -> None:
        found = current()
        self._name: str = "a frame" if found is None else found.name
        self._shared, self._job, self._until_compiled = shared, here, until_compiled
        self._leading: dict[str, str] = {}
        self._taken: set[str] = set()
        self._before: list[Frame] = recent_frames()
        self._noted: tuple[dict[str, Callable[[], Any]], Lengths] | None = None

    def takes(self, kinds: set[type]) -> bool:
        """Other subclasses than ours may put the rank into what is made of a graph, and do not say so."""
        return kinds <= {DTensor}

    @contextmanager
    def key_of_all(self) -> Iterator[str]:
        """Keys with what the processor can do, which decides how kernels are built."""
        with keys_of_any_rank():
            yield repr((asdict(World.here()), dist.get_world_size(), str(dist.get_backend_config())))

    def answers(self, key: str) -> Iterator[bytes]:
        """What the leaders of the groups made, one after the other. Ends where this rank is a leader."""
        why, store = "", self._job.store
        try:
            for group in range(GROUPS):
                at = f"dtensor/graph/{key}/{group}"
                if store.add(f"{at}/asked", 1) == 1:
                    store.set(f"{at}/leader", str(self._job.rank))
                    self._until_compiled.enter_context(Beat(store, f"{at}/beat"))
                    self._leading[key] = at
                    return
                began = time.monotonic()
                with phase(WAITING):
                    content, why = self._wait(at)
                self._shared.waited += time.monotonic() - began
                if content is None:
                    break
                self._taken.add(key)
                with phase(LOADING):
                    yield content
                self._taken.discard(key)
                why = "what other ranks compiled does not hold for its sizes or shards"
        except ShardingError:
            raise
        except RuntimeError as error:
            why = f"the job's store does not answer: {error}"
        log.info("%s is compiled here, too: %s", self._name, why)
        self._shared.alone.append((self._name, why))

    def _wait(self, at: str) -> tuple[bytes | None, str]:
        """What the leader made, or None and why this rank compiles it by itself."""
        here, limit, began, poll = self._job, _limit(), time.monotonic(), POLL
        store, looked, moved, beat = here.store, began, began, b""
        with here.waiting():
            while not store.check([f"{at}/done"]):
                time.sleep(poll)
                poll, now = min(poll * 1.2, POLL_MOST), time.monotonic()
                if now - looked < min(PULSE, limit):
                    continue
                looked = now
                here.check()
                leader = int(store.get(f"{at}/leader")) if store.check([f"{at}/leader"]) else None
                wait_for("another rank" if leader is None else here.does(leader))
                if now - began > limit:
                    return None, f"rank {leader} did not finish it in {limit:.0f} s"
                if leader is not None and (gone := here.absent(leader)):
                    return None, gone
                before, beat = beat, store.get(f"{at}/beat") if store.check([f"{at}/beat"]) else b""
                moved = now if before != beat else moved
                if now - moved > STALL:
                    return None, f"rank {leader} has made no progress for {STALL:.0f} s"
            count, hash_or_why = store.get(f"{at}/done").decode().split(" ", 1)
            if not int(count):
                return None, hash_or_why
            data = b"".join([store.get(f"{at}/part/{k}") for k in range(int(count))])
        if store.add(f"{at}/read", 1) == dist.get_world_size() - 1:
            store.set(f"{at}/done", "0 all ranks have taken it, and it is no longer in the store")
            for k in range(int(count)):
                store.delete_key(f"{at}/part/{k}")
        if sha256(data).hexdigest() != hash_or_why:
            return None, "it did not arrive whole"
        return zlib.decompress(data), ""

    def making(self, key: str) -> None:
        """Take all decisions anew, so that what they depend on is noted."""
        if self._noted is None:
            forget_all_but_meshes()
            enter = self._until_compiled.enter_context
            self._noted = enter(noted_kernels()), enter(uneven_noted())

    def note(self) -> Note:
        """What was noted while the frame was compiled."""
        assert self._noted is not None, "what is noted was made here"
        kernels, lengths = self._noted
        with phase(SAVING):
            return Note(*uneven_lengths(lengths), libraries(kernels), reported(self._before))

    def made(self, key: str, content: bytes) -> None:
        """Give it to the ranks that wait, and to those that come."""
        at = self._leading.pop(key, None)
        if at is not None:
            with phase(SAVING):
                _publish(self._job.store, at, content)
            self._shared.given.append(self._name)

    def give_up(self) -> None:
        """Tell those who wait for what was not made, at the end of the frame."""
        for at in self._leading.values():
            why = f"0 rank {self._job.rank} cannot give it: AOTAutograd kept nothing of it"
            _tell(self._job.store, {f"{at}/done": why})
        self._leading.clear()

    def fits(self, note: Note) -> bool:
        """Whether what was noted holds for this rank, too."""
        return not other_part(note.lengths, note.rank)

    @contextmanager
    def using(self, key: str, note: Note) -> Iterator[None]:
        """Load it with its kernels, which this machine need not build."""
        (self._shared.taken if key in self._taken else self._shared.kept).append(self._name)
        for known in pickle.loads(note.report):
            remember(known)
        with phase(LOADING), using_kernels(as_libraries(note.kernels)):
            yield

    def by_reference(self, obj: Any) -> Any:
        """A mesh is pickled as what it is on every rank."""
        return by_reference(obj)


def _publish(store: Any, at: str, content: bytes) -> None:
    data = zlib.compress(content, 1)
    parts = [data[k : k + PART] for k in range(0, len(data), PART)]
    said = {f"{at}/part/{k}": part for k, part in enumerate(parts)}
    _tell(store, {**said, f"{at}/done": f"{len(parts)} {sha256(data).hexdigest()}"})


def _tell(store: Any, said: dict[str, Any]) -> None:
    try:
        for key, value in said.items():
            store.set(key, value)
    except RuntimeError as error:
        log.info("what was compiled cannot be given to other ranks, as the job's store does not answer: %s", error)


def _can_be_shared() -> bool:
    """Whether nobody wants to see this rank's own graphs.

    Raises:
        ValueError: the switch is neither 0 nor 1.
    """
    if environment.is_on(SHARE) is False:
        return False
    wanted = [environment.text("dump"), environment.text("verify") == "1", environment.findings(), environment.level()]
    return caches_are_on() and not any(wanted) and not WATCHERS and not keeps_specs()


def _limit() -> float:
    """Seconds that a rank waits.

    Raises:
        ValueError: the variable holds no number.
    """
    given = environment.setting(LIMIT)
    try:
        return float(given) if given else PATIENCE
    except ValueError:
        raise ArgumentError(f"the environment variable {LIMIT} is {given!r}; write a number of seconds") from None


sharing: Sharing = Sharing()
"""What this process takes and gives."""


def shared() -> Shared:
    """Return what this rank has taken from other ranks of its job and given to them, since the process began."""
    return sharing.shared


__all__ = ["Compiled", "Note", "Shared", "Sharing", "shared", "sharing"]
