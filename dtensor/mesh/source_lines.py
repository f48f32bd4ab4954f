"""Whose code a file is: the user's, or that of torch or this library."""

from pathlib import Path

import torch

_LIBRARY = Path(__file__).parent.parent
_NOT_USERS = (f"{Path(torch.__file__).parent}/", f"{_LIBRARY}/", "<")
_STILL_USERS = (str(_LIBRARY / "testing" / "models"), str(_LIBRARY / "tools"))


def is_users(file: str) -> bool:
    """Whether a file belongs to neither torch nor this library. The library's demo and its test models count as the
    user's."""
    return file.startswith(_STILL_USERS) or not file.startswith(_NOT_USERS)


__all__ = ["is_users"]
