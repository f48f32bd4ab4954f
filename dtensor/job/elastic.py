"""A store for each round of a job that torchrun restarts.

torchrun starts all ranks anew after a failure, and when a host joins or leaves; each start begins a new round. By
default its agent keeps one TCPStore for all rounds. So a rank of a later round would find the keys of an earlier one,
such as the addresses of ranks that are gone (https://github.com/pytorch/pytorch/issues/135712). No environment variable
tells the rounds apart: TORCHELASTIC_RESTART_COUNT is the count of one agent, and may differ between hosts.

Here the ranks of a round agree on a name for it, which then is the prefix of every key. Each rank asks for the name by
a random word of its own, so that no answer of an earlier round can be taken for one of this:

    ask/{rank}        the rank's own word, a random one
    answer/{word}     the round's name, from rank 0, which answers whatever is asked until all ranks are there
    {name}/here/{rank}  set once that rank knows the name

A process that nothing has launched is a job of its own: its process group has one rank, and a store in its memory.

If `init_device_mesh` makes the process group, torch's keys are under that name too. If the program made it, only the
library's are (`join_round`, `own_keys`), and a warning says that torch's are not.

A rank whose torchrun was killed is not ended by anyone, and would write to what belongs to the next job. So it ends by
itself: a thread that starts with this module looks for its parent once a second.
"""

import logging
import os
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..errors import AgreementError
from ..torch_private.core import default_group_timeout, default_store

KEPT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""The environment variable with which torchrun says that its agent has the store, through all rounds."""

MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
"""The environment variable with the number of restarts that torchrun was given."""

RUN = "TORCHELASTIC_RUN_ID"
"""An environment variable that every process started by torchrun has."""

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The environment variables by which torch's processes find each other. A launcher sets all of them."""

SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS")
"""Where launchers that do not set those say how many processes there are."""

LOOK = 1.0
"""Seconds between two looks for the launcher."""

PAUSE = 0.02
"""Seconds between two looks into the store."""

log: logging.Logger = logging.getLogger("dtensor")

_launcher = os.getppid()
_joined: tuple[Any, Any] = (None, None)
"""The store of the default process group, and the same with the prefix of this round."""


def under_torchrun() -> bool:
    """Whether torchrun started this process, and so ends or restarts the others if this one fails."""
    return RUN in os.environ


def started_alone() -> bool:
    """Whether nothing has launched this process as one of several, and there is no process group yet."""
    several = any(os.environ.get(name, "1") != "1" for name in SIZES)
    return not (dist.is_initialized() or several or any(name in os.environ for name in RENDEZVOUS))


def end(why: str) -> None:
    """End this process at once, because its main thread cannot be reached; torchrun, if there, starts it anew."""
    log.error("rank %s ends, because %s", os.environ.get("RANK"), why)
    os._exit(1)


def this_process() -> str:
    """A name of this process by which others on its host find it: host and namespace, id, time of start."""
    try:
        return f"{_host()} {os.getpid()} {_stat(os.getpid())[1]}"
    except OSError:
        return ""


def state_of(process: str) -> str:
    """The state of a process of that name: "ended", "stopped" or "running"; "" if it is on another host."""
    if not process or not (here := this_process()) or process.split()[0] != here.split()[0]:
        return ""
    _, pid, since = process.split()
    try:
        state, started = _stat(int(pid))
    except OSError:
        return "ended"
    if started != since or state in "ZX":
        return "ended"
    return "stopped" if state in "Tt" else "running"


def _host() -> str:
    """The kernel and the namespace of processes."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"


def _stat(pid: int) -> tuple[str, str]:
    """State and time of start of a process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return words[0], words[19]


def _watch_launcher() -> None:
    """End this process when its parent has changed, which is when torchrun has ended."""
    while os.getppid() == _launcher and not _is_adopted():
        time.sleep(LOOK)
    end("torchrun, which started it, is gone")


def _is_rank() -> bool:
    """Whether torchrun itself started this process. What a rank starts has its variables, but so has its parent."""
    try:
        return f"{RUN}=".encode() not in Path(f"/proc/{_launcher}/environ").read_bytes()
    except OSError:
        return True


def _is_adopted() -> bool:
    """Whether the parent is the init process, which has adopted this one; in a container torchrun may be process 1."""
    try:
        return os.getppid() == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes()
    except OSError:
        return False


def init_process_group(timeout: timedelta | None) -> None:
    """Make the default process group, on a store that only this round's ranks use; of one rank if started alone.

    Args:
        timeout: for how long ranks wait for each other, here and in collectives; None for torch's default.

    Raises:
        RuntimeError: a rank did not come in time.
    """
    global _joined
    if started_alone():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    if not _store_is_kept():
        dist.init_process_group(timeout=timeout)
        return
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        _warn("a torchrun that is started again on another host would not find it; set {}")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    longest = timeout or dist.default_pg_timeout
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout=longest)
    store = dist.PrefixStore("dtensor/rounds", store)
    name = agreed_round(store, rank, world, longest)
    dist.init_process_group(store=dist.PrefixStore(name, store), rank=rank, world_size=world, timeout=timeout)
    _joined = default_store(), default_store()


def join_round() -> None:
    """For a process group that the program made: have this round's own keys for what the library writes. Collective."""
    global _joined
    store = default_store()
    if store is None or store is _joined[0] or not _store_is_kept():
        return
    _warn("restarted ranks find the addresses of those before them; let init_device_mesh make the group, or set {}")
    rounds = dist.PrefixStore("dtensor/rounds", store)
    name = agreed_round(rounds, dist.get_rank(), dist.get_world_size(), default_group_timeout())
    _joined = store, dist.PrefixStore(name, rounds)


def own_keys(store: Any) -> Any:
    """The store of the default process group, with the prefix of this round where one is needed."""
    return _joined[1] if store is not None and store is _joined[0] else store


def _store_is_kept() -> bool:
    return os.environ.get(KEPT_STORE) == str(True)


def _warn(why: str) -> None:
    """Log on rank 0 that this job cannot be restarted, if torchrun is to restart it."""
    if os.environ.get("RANK") == "0" and os.environ.get(MAX_RESTARTS, "0") != "0":
        log.warning("torchrun keeps one store for all restarts: " + why.format("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"))


def agreed_round(store: Any, rank: int, world: int, timeout: timedelta) -> str:
    """The name of this round, the same on all ranks; all of them have come when this returns on rank 0.

    Raises:
        RuntimeError: a rank did not come in time.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if rank != 0:
        return _asked(store, rank, deadline)
    name, answered = uuid.uuid4().hex, set()
    missing = list(range(1, world))
    while missing:
        for other in missing:
            if store.check([key := f"ask/{other}"]) and (word := store.get(key).decode()) not in answered:
                store.set(f"answer/{word}", name)
                answered.add(word)
        missing = [other for other in missing if not store.check([f"{name}/here/{other}"])]
        _pause(deadline, f"ranks {missing} of {world} have not come to make the process group")
    return name


def _asked(store: Any, rank: int, deadline: float) -> str:
    word = uuid.uuid4().hex
    store.set(f"ask/{rank}", word)
    while not store.check([f"answer/{word}"]):
        _pause(deadline, "rank 0 has not come to make the process group")
    name = store.get(f"answer/{word}").decode()
    store.set(f"{name}/here/{rank}", "")
    return name


def _pause(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise AgreementError(
            f"{what} in time; they hang, or their host is lost. init_device_mesh(timeout=…) sets the time"
        )
    time.sleep(PAUSE)


if under_torchrun() and _is_rank():
    threading.Thread(target=_watch_launcher, name="dtensor launcher", daemon=True).start()

__all__ = [
    "agreed_round",
    "end",
    "init_process_group",
    "join_round",
    "own_keys",
    "started_alone",
    "state_of",
    "this_process",
    "under_torchrun",
]
