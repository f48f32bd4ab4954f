"""The files of a record: one for each rank, written while the program runs and read as a whole.

Each line is a checksum and a JSON object: a header, then meshes, specs and values as they are met, and an end. So a
damaged line and a file that was not closed are both noticed. Fingerprints are float64, in base64.
"""

import base64
import contextlib
import json
import os
import shlex
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ...errors import RecordError
from .fingerprint import Vector

FORMAT = 1
"""The version of the format. Records of another version are refused."""


def path_of(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank{rank:05d}.jsonl"


def refuse_earlier(folder: Path, path: Callable[[Path, int], Path], rank: int, world: int) -> None:
    """Raise if a folder holds files of an earlier run, which are not written over.

    What this rank has not written yet is there already, or files of more ranks than there are. A rank that finds
    nothing of the kind is told by those that do, as of any error.

    Args:
        folder: the folder.
        path: the file of a rank in it.
        rank: this rank.
        world: the number of ranks.

    Raises:
        RecordError: it does.
    """
    found = [p for p in (path(folder, rank), path(folder, world)) if p.exists()]
    if found and not int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0):
        raise RecordError(
            f"{folder} holds the files of an earlier run ({found[0].name}), which are not written over; name another "
            f"folder, or remove it first: rm -r {shlex.quote(str(folder))}"
        )


class RecordWriter:
    """Writes the file of one rank. A failure to write ends the record with a warning, and never the program."""

    def __init__(self, folder: Path, rank: int, header: dict[str, Any]) -> None:
        self.path: Path = path_of(folder, rank)
        self.broken: bool = False
        self._file: TextIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w")
        except OSError as error:
            self._give_up(error)
        self.write({"format": FORMAT, **header})

    def write(self, *lines: dict[str, Any]) -> None:
        """Append lines."""
        if self._file is None:
            return
        texts = [json.dumps(line, separators=(",", ":")) for line in lines]
        try:
            self._file.writelines([f"{zlib.crc32(text.encode()):08x} {text}\n" for text in texts])
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self, end: dict[str, Any]) -> None:
        """Write the last line and close the file."""
        self.write({"end": end})
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what is left in its buffer finds no room either
                self._file.close()
        self.broken, self._file = True, None
        warnings.warn(
            f"recording ends here, because {self.path} cannot be written: {error.strerror or error}; the program goes "
            "on. Free some space or name another folder, and record again",
            stacklevel=2,
        )


def packed(vector: Vector) -> str:
    """A fingerprint as text."""
    return base64.b64encode(vector.tobytes()).decode()


def unpacked(text: str) -> Vector:
    """The fingerprint of a text."""
    return np.frombuffer(base64.b64decode(text), dtype=np.float64)


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Return the header, the lines and the end of a rank's file.

    Raises:
        RecordError: the file is damaged, was not closed, or is of another format.
    """
    try:
        lines = list(_lines(path))
    except (ValueError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} is damaged ({error}); record the run again") from error
    if not lines or "format" not in lines[0]:
        raise RecordError(
            f"{path} has no header, so it is not a file of a record, or an empty one; record the run again"
        )
    header, *rest = lines
    if header["format"] != FORMAT:
        raise RecordError(
            f"{path} has format {header['format']}, and this version reads format {FORMAT}; record the run again"
        )
    if not rest or "end" not in rest[-1]:
        raise RecordError(
            f"{path} has no end: its program still runs, or ended in the middle of the record; let it come to the end "
            "of `dtensor.record`, or record the run again"
        )
    return header, rest[:-1], rest[-1]["end"]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        checksum, _, text = line.partition(" ")
        if len(checksum) != 8 or zlib.crc32(text.encode()) != int(checksum, 16):
            raise ValueError(f"the checksum of line {number} is wrong")
        yield json.loads(text)


__all__ = ["FORMAT", "RecordWriter", "packed", "path_of", "read", "refuse_earlier", "unpacked"]
