"""Names of this library that docstrings, comments and pages write out, such as `dtensor.comm.collectives`, exist."""

import importlib
import re
import tomllib
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


def texts():
    yield from ROOT.glob("*.md")
    for folder in FOLDERS:
        yield from (file for kind in ("py", "md") for file in (ROOT / folder).rglob(f"*.{kind}"))


def test_what_is_installed_by_name_is_this_library():
    """`dtensor` is another distribution on the package index, and would be installed without a word."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = str(project["optional-dependencies"])
    lines = [line for file in texts() if file.name != "CHANGELOG.md" for line in file.read_text().splitlines()]
    installed = [line.partition("pip ")[2] for line in lines if "pip install" in line]
    names = re.findall(r"([\w-]+)\[[a-z,]+\]", " ".join([needed, *installed]))
    assert names.count(project["name"]) > 10
    assert set(names) <= {project["name"], "pyright", "mkdocstrings"}
    assert not [line for line in installed if re.search(r"""install ([\w=.-]+ )*['"]?dtensor\b(?!-compile)""", line)]


def test_names_that_are_written_out_exist():
    written: dict[str, str] = {}
    for file in texts():
        for line in file.read_text().splitlines():
            for found in NAMED.finditer(line):
                written[found[1]] = f"{file.relative_to(ROOT)}: {line.strip()}"
    assert len(written) > 100
    assert [place for name, place in written.items() if name not in LOGGERS and not exists(name)] == []
