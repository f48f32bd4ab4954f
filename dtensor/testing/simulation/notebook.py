"""`%%ranks`: in a notebook, a cell that begins with this line runs on every simulated rank."""

import sys
import weakref
from typing import Any

from ...errors import ArgumentError, CallOrderError

_newest: Any = None
"""A weak reference to the `Ranks` made last."""


def offer(ranks: Any) -> None:
    """Let cells run on `ranks`, if this is a notebook or a shell of IPython."""
    global _newest
    _newest = weakref.ref(ranks)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shell.register_magic_function(_run, "cell", "ranks")


def _run(line: str, cell: str) -> Any:
    """Run this cell on every rank of the `Ranks` made last by `dtensor.simulate`."""
    ranks = _newest and _newest()
    if ranks is None:
        raise CallOrderError("there are no simulated ranks any more; write: ranks = dtensor.simulate(2)")
    if line.strip():
        raise ArgumentError(f"%%ranks takes nothing after it, but got {line.strip()!r}; all ranks run the cell")
    return ranks.cell(cell)


__all__ = ["offer"]
