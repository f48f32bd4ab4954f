"""The main loop of a simulated rank: joins the process group, and then runs one call after another.

What it receives is pickled: a `Start`, then `RankCall`s. It answers with ("returned", pickled value) or ("raised",
`CallFailure`). While it has answered and the others have not, it counts for the job as a rank that waits for them, so
that a rank which waits for it in a collective does not wait for ever.
"""

import faulthandler
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...errors import ArgumentTypeError
from ...job.job import job, leave
from ...program.source_lines import is_users
from ...tensor.tensor import DTensor
from ...torch_private.compiling import compile_quickly
from ..child import STACKS_SIGNAL, Failure, Surroundings, received
from . import by_value

_FOLDER = str(Path(__file__).parent)
_LIBRARY = str(Path(__file__).parent.parent.parent)

_LEFT_OUT = "  … within torch and this library: {} more\n"


@dataclass(frozen=True)
class Start:
    """What makes a process a rank.

    Attributes:
        rank: its number.
        around: environment and process group.
        port: port of the job's store on this machine.
    """

    rank: int
    around: Surroundings
    port: int


@dataclass(frozen=True)
class RankCall:
    """A call to run.

    Attributes:
        function: a function of this package.
        arguments: those of `function`.
        path: `sys.path` of the parent.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    path: list[str]


@dataclass(frozen=True)
class CallFailure(Failure):
    """How a call failed.

    Attributes:
        kind: type of the error.
        where: file and line of each frame.
        broken: whether the rank's connections to the others are broken.
    """

    kind: str = ""
    where: tuple[tuple[str, int], ...] = ()
    broken: bool = False

    def is_like(self, other: "CallFailure") -> bool:
        """Whether two ranks failed in the same place, so that neither has begun a collective that the other has not."""
        return (self.kind, self.where) == (other.kind, other.where) and not (self.broken or other.broken)


def rank_main(pipe: Connection, output: Connection, errors: Connection) -> None:
    """Run calls until the other end of `pipe` is closed; `output` and `errors` take what the process prints."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent ends its ranks
    for number, (name, connection) in enumerate((("stdout", output), ("stderr", errors)), start=1):
        os.dup2(connection.fileno(), number)
        setattr(sys, name, os.fdopen(number, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False))
    sys.modules["__main__"] = types.ModuleType("__main__")  # where the globals of the parent's `__main__` arrive
    multiprocessing.set_start_method(None, force=True)  # that of any program, for a DataLoader's workers
    logging.getLogger("dtensor").addFilter(_is_news)
    compile_quickly()
    start: Start = pickle.loads(pipe.recv_bytes())
    with start.around.stacks_file(start.rank).open("w") as stacks:
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        _join(start)
        while (message := received(pipe)) is not None:
            answer = _answer(message)
            _idle(True)
            sys.stdout.flush()
            sys.stderr.flush()
            pipe.send_bytes(pickle.dumps(answer))
    leave()
    dist.destroy_process_group()


def _join(start: Start) -> None:
    """Make the process group, and the variables by which torchrun's programs know who they are."""
    start.around.enter(start.rank)
    world = str(start.around.nproc)
    os.environ.update(RANK=str(start.rank), LOCAL_RANK=str(start.rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(start.port))
    start.around.join(start.rank, dist.TCPStore("127.0.0.1", start.port, start.around.nproc, False))
    job()


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record says what the error of the call does not say."""
    return "gives up waiting" not in record.msg


def _idle(idle: bool) -> None:
    here = job()
    if here is not None:
        here.idle = idle


def _answer(message: bytes) -> tuple[str, Any]:
    _idle(False)
    try:
        call: RankCall = pickle.loads(message)
        sys.path[:] = call.path
        return "returned", _pickled(call.function(*call.arguments))
    except BaseException as error:
        return "raised", _failure(error)


def _pickled(value: Any) -> bytes:
    if isinstance(value, DTensor):
        raise ArgumentTypeError("a DTensor lives on the ranks; return x.full_tensor() or x.to_local()")
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise ArgumentTypeError(
            f"a {type(value).__name__} cannot be sent from the ranks: {error}; return tensors, numbers or text"
        ) from error


def _failure(error: BaseException) -> CallFailure:
    """How the call failed. If others could not go on without this rank, or it without them, the reason is told."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_FOLDER)]
    where = tuple([(frame.filename, frame.lineno or 0) for frame in frames])
    here = job()
    broken = here.broken if here is not None else ""
    text = _told(error, frames) + (f"{broken}\n" if broken and broken not in str(error) else "")
    return CallFailure(time.monotonic(), Failure.of(error).line, text, type(error).__name__, where, bool(broken))


def _told(error: BaseException, frames: list[traceback.FrameSummary]) -> str:
    """The traceback with the user's frames, and the last one if it is torch's."""
    if isinstance(error, SyntaxError) or not frames:
        return "".join(traceback.format_exception_only(error))
    lines, left_out = ["Traceback (most recent call last):\n"], 0
    for frame in frames:
        if is_users(frame.filename) or (frame is frames[-1] and not frame.filename.startswith(_LIBRARY)):
            lines += [_LEFT_OUT.format(left_out)] if left_out else []
            lines += traceback.format_list([frame])
            left_out = 0
        else:
            left_out += 1
    lines += [_LEFT_OUT.format(left_out)] if left_out else []
    return "".join([*lines, *traceback.format_exception_only(error)])


def run(sent: bytes) -> Any:
    """Call the function that `sent` holds, with its arguments."""
    fn, args, kwargs = by_value.loads(sent)
    return fn(*args, **kwargs)


__all__ = ["CallFailure", "RankCall", "Start", "rank_main", "run"]
