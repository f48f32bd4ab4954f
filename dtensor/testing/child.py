"""What runs in a process that `processes.run_ranks` starts: one rank.

It takes a `Job`, joins the process group, calls the function, and says through a pipe how that went: pickled
pairs ("started", None), ("returned", pickled value) or ("raised", `Failure`).
"""

import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .references import FunctionReference

STACKS_SIGNAL = signal.SIGUSR1
"""Makes a rank write its stacks to its file."""


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
    """

    function: FunctionReference
    arguments: bytes
    nproc: int
    backend: str
    timeout: float
    folder: str
    environment: dict[str, str]

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


def rank_main(pipe: Connection, rank: int, job: Job) -> None:
    """Be `rank`: report to `pipe`, then stay until its other end is closed, so that no peer loses this rank
    midway."""
    with job.stacks_file(rank).open("w") as stacks:
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        pipe.send_bytes(pickle.dumps(("started", None)))
        try:
            message = ("returned", _value(rank, job))
        except BaseException as error:
            message = ("raised", Failure.of(error))
        pipe.send_bytes(pickle.dumps(message))
        _wait_for_end(pipe)
        if dist.is_initialized():
            dist.destroy_process_group()


def _value(rank: int, job: Job) -> bytes:
    os.environ.clear()
    os.environ.update(job.environment)
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


def _wait_for_end(pipe: Connection) -> None:
    try:
        pipe.recv_bytes()
    except (EOFError, ConnectionError):
        return


__all__ = ["STACKS_SIGNAL", "Failure", "Job", "rank_main"]
