"""The main loop of one rank: the process that `processes.run_ranks` starts.

The process receives a `ChildJob`, joins the process group, calls the function, and reports its progress through a pipe
as pickled pairs: ("started", None), then ("returned", pickled value) or ("raised", `Failure`). When the parent writes
`LEAVE`, it leaves the group, restores the state of the process (`renewal`), sends ("left", description of what could
not be restored), and waits for the next job.
"""

import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..torch_private.compiling import compile_quickly
from .process_reset import Beginning
from .references import FunctionReference

STACKS_SIGNAL = signal.SIGUSR1
"""Signal that makes a rank write its stacks to its file."""


LEAVE = b"leave"
"""Message to a rank that is done: its peers are done, too."""


@dataclass(frozen=True)
class Surroundings:
    """What a rank has in common with the others and with its parent: the environment, and the process group.

    Attributes:
        nproc: number of ranks.
        backend: backend of the process group.
        timeout: seconds a collective may take.
        folder: folder for the rendezvous and for stacks.
        environment: environment variables of the parent.
        working_directory: working directory of the parent.
        path: `sys.path` of the parent.
    """

    nproc: int
    backend: str
    timeout: float
    folder: str
    environment: dict[str, str]
    working_directory: str
    path: list[str]

    @classmethod
    def here(cls, nproc: int, backend: str, timeout: float, folder: str) -> "Surroundings":
        """Those of this process, for ranks that it starts."""
        return cls(nproc, backend, timeout, folder, dict(os.environ), os.getcwd(), list(sys.path))

    def stacks_file(self, rank: int) -> Path:
        """The file to which `rank` writes its stacks."""
        return Path(self.folder) / f"stacks-{rank}"

    def enter(self, rank: int) -> None:
        """Give this process the environment, one thread and, for NCCL, its GPU."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.working_directory)
        sys.path[:] = self.path
        torch.set_num_threads(1)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if "nccl" in self.backend:
            torch.cuda.set_device(rank)

    def join(self, rank: int, store: Any = None) -> None:
        """Make the process group, together with the other ranks, who meet in `store`, or else in the folder."""
        dist.init_process_group(
            self.backend,
            init_method=None if store else f"file://{self.folder}/rendezvous",
            store=store,
            rank=rank,
            world_size=self.nproc,
            timeout=timedelta(seconds=self.timeout),
        )


@dataclass(frozen=True)
class ChildJob:
    """A function for the ranks to run, and where to run it.

    Attributes:
        function: called as function(rank, *arguments).
        arguments: pickled tuple, unpickled only after the module of `function` has been loaded.
        around: environment and process group.
    """

    function: FunctionReference
    arguments: bytes
    around: Surroundings


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    Attributes:
        time: time of the failure in seconds, by a clock that the processes of a machine share.
        line: the error in one line.
        text: the traceback.
    """

    time: float
    line: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Return the failure that `error` caused, at the present time."""
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        return cls(time.monotonic(), line, "".join(traceback.format_exception(error)))


def rank_main(pipe: Connection) -> None:
    """Run the jobs that arrive through `pipe`, one after another, until its other end is closed.

    A job is a pair (rank, `ChildJob`). A rank that has finished stays in its process group until the parent writes
    `LEAVE`, so that peers can still communicate with it. What changes no result is left out of
    compilations in these processes.
    """
    compile_quickly()
    torch.manual_seed(0)  # torch seeds a process at random, and not all ranks are forked by the same one
    beginning = Beginning()
    while (message := received(pipe)) is not None:
        rank, job = pickle.loads(message)
        with job.around.stacks_file(rank).open("w") as stacks:
            faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
            pipe.send_bytes(pickle.dumps(("started", None)))
            try:
                with warnings.catch_warnings():
                    message = ("returned", _value(rank, job))
            except BaseException as error:
                message = ("raised", Failure.of(error))
            pipe.send_bytes(pickle.dumps(message))
            if received(pipe) != LEAVE:
                break
            pipe.send_bytes(pickle.dumps(("left", beginning.restore())))
            faulthandler.unregister(STACKS_SIGNAL)
    if dist.is_initialized():
        dist.destroy_process_group()


def _value(rank: int, job: ChildJob) -> bytes:
    job.around.enter(rank)
    function = job.function.load()
    arguments: tuple[Any, ...] = pickle.loads(job.arguments)
    job.around.join(rank)
    return pickle.dumps(function(rank, *arguments))


def received(pipe: Connection) -> bytes | None:
    """Return the next message, or None when the pipe is closed."""
    try:
        return pipe.recv_bytes()
    except (EOFError, ConnectionError):
        return None


__all__ = ["LEAVE", "STACKS_SIGNAL", "ChildJob", "Failure", "Surroundings", "rank_main", "received"]
