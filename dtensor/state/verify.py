"""Whether a checkpoint is as it was written: its index, the sizes of its files, and the checksum of every part."""

from collections.abc import Callable, Iterable
from pathlib import Path

from ..errors import CheckpointError
from .index import StoredPart, read_index


def verify(
    folder: Path,
    share: tuple[int, int] = (0, 1),
    shown: Callable[[list[StoredPart]], Iterable[StoredPart]] = iter,
) -> str:
    """Read every byte of a checkpoint and describe what is wrong with it; "" if nothing is.

    Args:
        folder: the folder of the checkpoint.
        share: (k, n) reads only the k-th of n shares of the parts, counted from 0.
        shown: iterates over the list of parts, and may show progress.
    """
    k, n = share
    try:
        parts = sorted(read_index(folder).parts(), key=lambda p: (p.file, p.begin))
        for part in shown(parts[k::n]):
            part.read(folder)
    except CheckpointError as error:
        return str(error)
    return ""


__all__ = ["verify"]
