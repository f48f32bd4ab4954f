"""Every cache of the library that holds a mesh, registered here so that they can be emptied together.

A mesh keeps its process groups alive, and a gloo group that is torn down by the interpreter's last clean-up may abort
the process. The caches are therefore emptied at exit, before that.
"""

import atexit
from collections.abc import MutableMapping
from typing import Any

_caches: list[MutableMapping[Any, Any]] = []


def cache() -> dict[Any, Any]:
    """A new dictionary that `clear_caches` empties."""
    made: dict[Any, Any] = {}
    _caches.append(made)
    return made


def clear_caches() -> None:
    """Empty all caches that hold meshes: specs, decisions, group names. Only the next calls are slower for it."""
    for c in _caches:
        c.clear()


atexit.register(clear_caches)

__all__ = ["cache", "clear_caches"]
