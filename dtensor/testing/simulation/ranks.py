"""`simulate`, which starts ranks for a notebook, a shell or a script that was started without torchrun."""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ...errors import ArgumentError, ArgumentTypeError, CallOrderError
from ..processes import TIMEOUT
from . import by_value, notebook
from .cells import run_cell, variable
from .per_rank import PerRank
from .rank import RankCall, run
from .team import Team


def simulate(ranks: int, *, timeout: float = TIMEOUT) -> "Ranks":
    """Start `ranks` processes on this machine that are ranks of one process group, and return them.

    For notebooks, shells and first scripts: no torchrun, no GPU. The processes communicate over gloo and compile as
    ranks on many machines do; each uses one core. They live until the object is closed or dropped, or the program ends.

    Args:
        ranks: number of ranks.
        timeout: seconds that one call may take.

    Raises:
        ValueError: `ranks` is not an int of at least 1, or `timeout` is not a positive number.
        RuntimeError: this process is a rank itself.

    Example:
        >>> ranks = dtensor.simulate(2)
        >>> def part():
        ...     mesh = dtensor.init_device_mesh("cpu", (2,))
        ...     return dtensor.distribute_tensor(torch.arange(4), mesh, [dtensor.Shard(0)]).to_local()
        >>> ranks.run(part)
        rank 0: tensor([0, 1])
        rank 1: tensor([2, 3])
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ArgumentError(f"simulate takes a number of ranks, an int of at least 1; got {ranks!r}")
    if not isinstance(timeout, (int, float)) or timeout <= 0:
        raise ArgumentError(f"timeout must be a positive number of seconds; got {timeout!r}")
    if dist.is_initialized():
        raise CallOrderError(
            "this process is a rank of a process group, and a rank starts no others; "
            "call simulate in a process that is none, such as a notebook or a script without torchrun"
        )
    made = Ranks(ranks, timeout)
    notebook.offer(made)
    return made


class Ranks:
    """Simulated ranks, made by `dtensor.simulate`; also a context manager that closes them.

    In a notebook, a cell that begins with the line `%%ranks` runs on every rank of those made last, as `cell` does.
    """

    def __init__(self, n: int, timeout: float) -> None:
        self._n, self._cells = n, 0
        self._team = Team(n, timeout)
        self._team.start()
        weakref.finalize(self, self._team.end)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> PerRank:
        """Call `fn(*args, **kwargs)` on every rank.

        The function may be defined anywhere: in a cell, in a script, inside of another function. The globals that it
        uses are copied to the ranks. What ranks print is printed here, with their numbers.

        Returns:
            The values in the order of ranks.

        Raises:
            RankError: the function failed on a rank; the message holds the traceback.
            TimeoutError: it was not done in time; the message holds the stacks of all ranks.
            TypeError: the function, an argument or a value cannot be sent.
        """
        name = getattr(fn, "__qualname__", repr(fn))
        return self._answers(name, run, by_value.dumps((fn, args, kwargs)))

    def cell(self, text: str) -> PerRank | None:
        """Run `text`, lines of Python, on every rank, as a cell of a notebook that begins with `%%ranks` is run.

        What it defines stays: later cells and functions find it, and `ranks["name"]` reads it.

        Returns:
            What the last line shows on each rank, if it is an expression that is not None.

        Raises:
            RankError, TimeoutError: as of `run`.
        """
        self._cells += 1
        shown = self._answers("the cell", run_cell, f"cell-{self._cells}.py", text)
        return shown if any(value is not None for value in shown) else None

    def __getitem__(self, name: str) -> PerRank:
        """The variable `name` of each rank.

        Raises:
            RankError: a rank has no such variable, or its value cannot be sent, as that of a DTensor.
        """
        return self._answers(f"the variable {name!r}", variable, name)

    def __len__(self) -> int:
        return self._n

    __iter__ = None

    def close(self) -> None:
        """End the processes. A later call starts new ones."""
        self._team.end()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{self._n} simulated rank{'s' if self._n > 1 else ''}"

    def __reduce__(self) -> Any:
        raise ArgumentTypeError("simulated ranks are not there on the ranks themselves")

    def _answers(self, name: str, function: Callable[..., Any], *args: Any) -> PerRank:
        return PerRank(self._team.answers(name, RankCall(function, args, list(sys.path))))


__all__ = ["Ranks", "simulate"]
