"""Numbers and strings in a state dict, of which a checkpoint has one for all ranks: do the ranks have the same?

Torch's planner writes one rank's value, for each key that of another rank. So a save compares them first: a checksum of
all of them, and if that differs, each. Keys that only some ranks have belong to these ranks.
"""

import zlib
from collections.abc import Iterator
from typing import Any

from ..errors import CheckpointError
from .files import gathered

COMPARED = (str, bytes, int, float, complex, bool, type(None))
"""The types whose values are compared."""

SHOWN = 60
"""Characters of a value that an error shows."""


def check_values(state: dict[str, Any], group: Any) -> None:
    """Compare the plain values of `state` between the ranks of `group`.

    Raises:
        CheckpointError: two ranks have different values for one key; raised on all ranks.
    """
    mine = dict(_values(state, ()))
    if len(set(gathered(zlib.crc32(repr(sorted(mine.items())).encode()), group))) == 1:
        return
    first: dict[str, tuple[int, str]] = {}
    for rank, values in enumerate(gathered(mine, group)):
        for key, value in values.items():
            other, before = first.setdefault(key, (rank, value))
            if value != before:
                raise CheckpointError(
                    f"{key!r} is {before[:SHOWN]} on rank {other} and {value[:SHOWN]} on rank {rank}, but a checkpoint "
                    f"has one value for it; give all ranks the same, or each a key of its own, such as "
                    f"f'{key}/{{rank}}'"
                )


def _values(x: Any, at: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(x, dict):
        for key, inner in x.items():
            yield from _values(inner, (*at, str(key)))
    elif isinstance(x, (list, tuple)):
        for i, inner in enumerate(x):
            yield from _values(inner, (*at, str(i)))
    elif isinstance(x, COMPARED):
        yield ".".join(at), repr(x)


__all__ = ["check_values"]
