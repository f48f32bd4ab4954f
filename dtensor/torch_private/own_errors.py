"""Errors of this library leave torch as themselves: not inside of one of Dynamo's, nor below frames of torch.

Dynamo wraps whatever a backend or an operator on fake tensors raises, in text of its own. `in_the_open` takes a
`ShardingError` out again, so that compiled code raises the class and the text that eager code does, with the lines of
the user. `without_torch` does the same to what torch raises about shapes, and keeps torch from logging it.
"""

import functools
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

from ..errors import ShardingError

FRAME = re.compile(r' *File "(?P<file>[^"]+)", line \d+, in .*\n(?: {4}.*(?:\n|$))*')
"""One frame in the text of a traceback."""

AT = "from user code:\n"


@functools.cache
def _in_the_open() -> Any:
    """The class that carries an error through Dynamo, which asks it for the error to raise."""
    from torch._dynamo.exc import ShortenTraceback

    class InTheOpen(ShortenTraceback):
        def __init__(self, error: ShardingError) -> None:
            super().__init__(str(error), first_useful_frame=None)
            self.error = error

        def remove_dynamo_frames(self) -> Any:
            return self.error.with_traceback(None)

    return InTheOpen


_users: list[Callable[[str], bool]] = []
"""Tell whether a file is the user's."""


def show_lines_of(is_users: Callable[[str], bool]) -> None:
    """Show those lines of compiled code for whose file `is_users` is true."""
    _users[:] = [is_users]


def in_the_open(error: Exception, whole: bool) -> Exception | None:
    """What Dynamo should raise in place of `error`; None if it is not about an error of this library.

    Args:
        error: What Dynamo raised while it compiled a frame.
        whole: Whether a frame that cannot be compiled is an error (fullgraph=True).
    """
    from torch._dynamo import config

    own = None if config.verbose else _own(error, whole)
    if own is None:
        return None
    text, _, frames = str(own).partition("\n\nWhile executing ")
    lines = "".join(
        m[0]
        for m in FRAME.finditer(frames or str(error).partition(AT)[2])
        if all(is_users(m["file"]) for is_users in _users)
    )
    own.args = (f"{text}\n\n{AT}{lines}".rstrip() if lines else text, *own.args[1:])
    own.__cause__ = own.__context__ = None
    return _in_the_open()(own)


def _own(error: Any, whole: bool) -> ShardingError | None:
    from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError, Unsupported

    if isinstance(error, BackendCompilerFailed):
        found = error.inner_exception
    elif isinstance(error, TorchRuntimeError):  # made of an `Unsupported`, which has the cause
        found = getattr(error.__context__, "__cause__", None)
    else:
        found = error.__cause__ if whole and isinstance(error, Unsupported) else None
    return found if isinstance(found, ShardingError) else None


class _Shapes(threading.local):
    asked = False


_shapes = _Shapes()


class unlogged:
    """A context in which torch does not log what it raises while it propagates shapes."""

    def __enter__(self) -> None:
        self.before: bool = _shapes.asked
        _shapes.asked = True

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        _shapes.asked = self.before


class without_torch(unlogged):
    """As `unlogged`; what is raised has no frames of torch, either."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        if error is not None:
            error.__traceback__ = None


# torch logs an error of a meta kernel with its traceback, and raises it nevertheless.
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: not _shapes.asked)

__all__ = ["in_the_open", "show_lines_of", "unlogged", "without_torch"]
