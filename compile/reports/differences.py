"""The differences between two dumps, or between two files or folders of dumps: two versions, two ranks, two passes.

Files are compared by name. Remarks are ignored, so a line number that moved is not a difference. For manifests only the
communication is compared, not estimated times; for the order of passes, guards and bytecode the text is compared.
"""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtensor.errors import ArgumentError
from dtensor.passes.graph.text import REMARK

from .reading import read_manifest

KEYS = ("direction", "op", "reduce_op", "axis", "dtype", "shapes", "bytes", "how", "move", "module")
"""The fields that must be equal for two collectives of two manifests to count as the same."""

LEFT_OUT = ("trace.json", "index.html", "measured.json", "profile.json")
"""Files that hold what other files hold, or what was measured."""

_VOLATILE = re.compile(r"0x[0-9a-f]+|\d{6,}\w*|__(?:compiled_fn|temp)_\w+|Guard latency = .*")


def differences(a: Path, b: Path) -> Iterator[str]:
    """Yield the lines of a unified diff of two files, or of all files of two folders; nothing if they are the same.

    Raises:
        ValueError: a file or folder does not exist, one is a file and the other a folder, or a manifest is damaged.
    """
    for path in (a, b):
        if not path.exists():
            raise ArgumentError(f"there is no {path}; give two files or two folders of dumps")
    if a.is_dir() != b.is_dir():
        raise ArgumentError(f"{a} and {b} are a file and a folder; give two files or two folders")
    if not a.is_dir():
        yield from _of_files(a, b, a.name, b.name)
        return
    mine, theirs = _files(a), _files(b)
    for name in sorted({*mine, *theirs}):
        if name not in mine or name not in theirs:
            yield f"only in {b if name in theirs else a}: {name}"
        else:
            yield from _of_files(mine[name], theirs[name], f"{a}/{name}", f"{b}/{name}")


def _files(folder: Path) -> dict[str, Path]:
    """Relative names of the files below a folder -> their paths."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in LEFT_OUT)
    return {str(path.relative_to(folder)): path for path in found}


def _of_files(a: Path, b: Path, called: str, other: str) -> Iterator[str]:
    yield from difflib.unified_diff(_lines(a), _lines(b), called, other, lineterm="", n=2)


def _lines(path: Path) -> list[str]:
    if path.name == "manifest.json":
        return [collective_line(c) for c in read_manifest(path)["collectives"]]
    text = path.read_text(encoding="utf-8")
    return [_VOLATILE.sub("…", line.split(REMARK)[0]) for line in text.splitlines()]


def collective_line(c: dict[str, Any]) -> str:
    """Return a collective of a manifest as one line, without estimates and line numbers."""
    return ", ".join([f"{key}={c[key]}" for key in KEYS])


__all__ = ["KEYS", "collective_line", "differences"]
