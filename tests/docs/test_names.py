"""Names of this library that docstrings, comments and pages write out, such as `dtensor.comm.collectives`, exist."""

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(dtensor(?:\.\w+)+)(?:\([^`]*\)[^`]*)?`")
LOGGERS = ("dtensor.progress",)
FOLDERS = ("dtensor", "compile", "passes", "bench", "tests", "examples", "docs")


def exists(name: str) -> bool:
    parts = name.split(".")
    for k in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:k]))
        except ImportError:
            continue
        for part in parts[k:]:
            found = getattr(found, part, None)
        return found is not None
    return False


def test_names_that_are_written_out_exist():
    files = list(ROOT.glob("*.md"))
    for folder in FOLDERS:
        files += [file for kind in ("py", "md") for file in (ROOT / folder).rglob(f"*.{kind}")]
    written: dict[str, str] = {}
    for file in files:
        for line in file.read_text().splitlines():
            for found in NAMED.finditer(line):
                written[found[1]] = f"{file.relative_to(ROOT)}: {line.strip()}"
    assert len(written) > 100
    assert [place for name, place in written.items() if name not in LOGGERS and not exists(name)] == []
