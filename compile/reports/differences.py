"""What differs between two dumps, or two files or folders of them: two versions, two ranks, two passes.

Files are compared by name. Remarks are left out: a line number that moved is no difference. Of two manifests only
what is communicated is compared, not estimated times; of the order of passes, guards and bytecode the text.
"""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtensor.passes.graph.text import REMARK

from .reading import read_manifest

KEYS = ("direction", "op", "reduce_op", "axis", "dtype", "shapes", "bytes", "how", "move", "module")
"""What two collectives of two manifests must have in common to be taken for the same."""

LEFT_OUT = ("trace.json", "index.html")
"""Files that say nothing that others do not."""

_VOLATILE = re.compile(r"0x[0-9a-f]+|\d{6,}\w*|__(?:compiled_fn|temp)_\w+|Guard latency = .*")


def differences(a: Path, b: Path) -> Iterator[str]:
    """The lines of a unified diff of two files, or of all files of two folders; nothing where they are alike.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: one is a file and the other a folder, or a manifest is damaged.
    """
    for path in (a, b):
        if not path.exists():
            raise FileNotFoundError(f"there is no {path}")
    if a.is_dir() != b.is_dir():
        raise ValueError(f"{a} and {b} are a file and a folder; give two of a kind")
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
    """Names below a folder -> files."""
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
    """A collective of a manifest in one line, without what is estimated, and without line numbers."""
    return ", ".join([f"{key}={c[key]}" for key in KEYS])


__all__ = ["KEYS", "collective_line", "differences"]
