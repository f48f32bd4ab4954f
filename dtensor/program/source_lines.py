"""Whose code a file or a class is: the user's, or that of Python, torch or this library."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

_LIBRARY = Path(__file__).parent.parent
_NOT_USERS = (f"{Path(torch.__file__).parent}/", f"{_LIBRARY}/", "<")
_PYTHON, _INSTALLED = f"{Path(os.__file__).parent}/", ("site-packages/", "dist-packages/")
_GENERATED = re.compile(r"/(\w\w)/c\1\w{49}\.py$")
"""The files that Inductor writes, in any folder."""

_STILL_USERS = (str(_LIBRARY / "testing" / "models"), str(_LIBRARY / "tools"))
_TAKE_STEPS = (f"{Path(torch.__file__).parent / 'optim'}/", str(_LIBRARY / "torch_private/training/whole_steps.py"))

MADE = "_dtensor_made"
"""The attribute of a class of modules that this library generated: the function that generated it, its base class and
the other arguments."""


def not_generated(cls: type) -> type:
    """The class that the user gave a module, before any class was generated for it."""
    while MADE in vars(cls):
        cls = vars(cls)[MADE][1]
    return cls


def is_users(file: str) -> bool:
    """Whether a file belongs to neither Python, torch nor this library. The library's demo and its test models count as
    the user's, and so do other packages."""
    of_python = file.startswith(_PYTHON) and not file.startswith(_INSTALLED, len(_PYTHON))
    return file.startswith(_STILL_USERS) or not (of_python or file.startswith(_NOT_USERS) or _GENERATED.search(file))


def takes_steps(file: str) -> bool:
    """Whether a file belongs to torch's optimizers, or calls the step of any."""
    return file.startswith(_TAKE_STEPS)


def users_level() -> int:
    """The `stacklevel` by which a warning of the calling function names the user's line; 2 if there is none."""
    frame: Any = sys._getframe(1)
    level = 1
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return 2 if frame is None else level


__all__ = ["MADE", "is_users", "not_generated", "takes_steps", "users_level"]
