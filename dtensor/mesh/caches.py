"""Registry of all caches of the library that hold meshes, so that they can be cleared together.

A mesh keeps its process groups alive, and a gloo group that is destroyed during the interpreter's final cleanup can
abort the process. The caches are therefore cleared at exit, before that cleanup.
"""

import atexit
from collections.abc import MutableMapping
from typing import Any

_caches: list[MutableMapping[Any, Any]] = []


def cache() -> dict[Any, Any]:
    """A new dictionary that `clear_caches` clears."""
    made: dict[Any, Any] = {}
    _caches.append(made)
    return made


def clear_caches(but: MutableMapping[Any, Any] | None = None) -> None:
    """Clear all caches that hold meshes: specs, decisions, group names. This only makes the next calls slower.

    `but`: one that is left as it is.
    """
    for c in _caches:
        if c is not but:
            c.clear()


atexit.register(clear_caches)

__all__ = ["cache", "clear_caches"]
