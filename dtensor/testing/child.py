"""What runs in a process that `processes.run_ranks` starts: one rank.

It takes a `Job`, joins the process group, calls the function, and says through a pipe how that went: pickled
pairs ("started", None), ("returned", pickled value) or ("raised", `Failure`). Told to leave the group, it puts the
process back as it was (`renewal`), says ("left", what it could not put back), and takes the next job.
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

from ..torch_private.compiling import leave_guards_untimed
from .process_reset import Beginning
from .references import FunctionReference

STACKS_SIGNAL = signal.SIGUSR1
"""Makes a rank write its stacks to its file."""


LEAVE = b"leave"
"""Tells a rank that is done that its peers are done, too."""


@dataclass(frozen=True)
class Job:
    """What the ranks are to do.

    Attributes:
        function: called as function(rank, *arguments).
        arguments: pickled tuple, to be read after the module of `function` is there.
        nproc: number of ranks.
        backend: backend of the process group.
        timeout: seconds a collective may take.
        folder: folder for the rendezvous and for stacks.
        environment: variables of the parent.
        working_directory: that of the parent.
        path: where the parent looks for modules.
    """

    function: FunctionReference
    arguments: bytes
    nproc: int
    backend: str
    timeout: float
    folder: str
    environment: dict[str, str]
    working_directory: str
    path: list[str]

    def stacks_file(self, rank: int) -> Path:
        """Where `rank` writes its stacks."""
        return Path(self.folder) / f"stacks-{rank}"


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    Attributes:
        time: when, by the clock that the processes of a machine share.
        line: the error in one line.
        text: its traceback.
    """

    time: float
    line: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """The failure by `error`, now."""
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        return cls(time.monotonic(), line, "".join(traceback.format_exception(error)))


def rank_main(pipe: Connection) -> None:
    """Run the jobs that come through `pipe`, one after another, until its other end is closed.

    A job is a pair (rank, `Job`). When it is done the rank stays in its process group, so that no peer loses it midway,
    until the parent writes `LEAVE`. Dynamo does not time its guards in these processes.
    """
    leave_guards_untimed()
    beginning = Beginning()
    while (received := _received(pipe)) is not None:
        rank, job = pickle.loads(received)
        with job.stacks_file(rank).open("w") as stacks:
            faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
            pipe.send_bytes(pickle.dumps(("started", None)))
            try:
                with warnings.catch_warnings():
                    message = ("returned", _value(rank, job))
            except BaseException as error:
                message = ("raised", Failure.of(error))
            pipe.send_bytes(pickle.dumps(message))
            if _received(pipe) != LEAVE:
                break
            pipe.send_bytes(pickle.dumps(("left", beginning.restore())))
            faulthandler.unregister(STACKS_SIGNAL)
    if dist.is_initialized():
        dist.destroy_process_group()


def _value(rank: int, job: Job) -> bytes:
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.working_directory)
    sys.path[:] = job.path
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "nccl" in job.backend:
        torch.cuda.set_device(rank)
    function = job.function.load()
    arguments: tuple[Any, ...] = pickle.loads(job.arguments)
    dist.init_process_group(
        job.backend,
        init_method=f"file://{job.folder}/rendezvous",
        rank=rank,
        world_size=job.nproc,
        timeout=timedelta(seconds=job.timeout),
    )
    return pickle.dumps(function(rank, *arguments))


def _received(pipe: Connection) -> bytes | None:
    """The next message, None at the end."""
    try:
        return pipe.recv_bytes()
    except (EOFError, ConnectionError):
        return None


__all__ = ["LEAVE", "STACKS_SIGNAL", "Failure", "Job", "rank_main"]
