"""What the ranks of a job shared is kept beside Inductor's caches, so that the next start of the job compiles nothing.

{Inductor's cache}/dtensor/{what is compiled}/{hash of the content}.pickle
"""

import logging
import os
import pickle
import zlib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from dtensor.errors import PackageError
from dtensor.torch_private.kernels import cache_folder

from .archive import check_place
from .entries import Entry

MOST = 16
"""The most entries of one key that are tried, and written."""

log: logging.Logger = logging.getLogger("dtensor")


def is_on_disk(what: str) -> bool:
    """Whether there may be entries."""
    return _folder(what).exists()


def from_disk(what: str) -> Iterator[Entry]:
    """The entries that were kept of what is compiled, newest first; not from files that others could write to."""
    for path in _newest(_folder(what))[:MOST]:
        try:
            check_place(path)
            data = path.read_bytes()
            if sha256(data).hexdigest() == path.stem:
                yield pickle.loads(zlib.decompress(data))
        except (PackageError, OSError) as error:
            log.info("%s is not used: %s", path, error)


def to_disk(what: str, entry: Entry) -> None:
    """Keep an entry, unless it is there or cannot be written."""
    data, folder = zlib.compress(pickle.dumps(entry), 1), _folder(what)
    path = folder / f"{sha256(data).hexdigest()}.pickle"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists() and len(_newest(folder)) < MOST:
            partial = folder / f".{path.name}.{os.getpid()}"
            partial.write_bytes(data)
            partial.replace(path)
    except OSError as error:
        log.info("%s is not kept: %s", path, error)


def _folder(what: str) -> Path:
    return Path(cache_folder()) / "dtensor" / what


def _newest(folder: Path) -> list[Path]:
    try:
        return sorted(folder.glob("*.pickle"), key=lambda path: -path.stat().st_mtime)
    except OSError:
        return []


__all__ = ["from_disk", "is_on_disk", "to_disk"]
