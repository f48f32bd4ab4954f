"""Whether a checkpoint is as it was written: its index, the sizes of its files, and the checksum of every part."""

from collections.abc import Callable, Iterable
from pathlib import Path

from ..errors import CheckpointError
from .index import Part, read_index


def verify(
    folder: Path,
    share: tuple[int, int] = (0, 1),
    shown: Callable[[list[Part]], Iterable[Part]] = iter,
) -> str:
    """What is wrong with a checkpoint, "" if nothing is: every byte is read.

    Args:
        folder: the checkpoint's.
        share: (k, n) reads the k-th of n shares of the parts.
        shown: goes through the parts one by one, and may show how far it is.
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
