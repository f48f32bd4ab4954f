"""What the tests of the manual share: its pages, their blocks, and how these are run."""

import importlib.util
import os
import re
import sys
import types
from itertools import count
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
README = "../README.md"
"""The README as a page, for it is run as the pages are."""

PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def hooks() -> Any:
    """The hooks of the manual (docs/hooks.py)."""
    if "hooks_of_manual" not in sys.modules:
        spec = importlib.util.spec_from_file_location("hooks_of_manual", DOCS / "hooks.py")
        sys.modules["hooks_of_manual"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["hooks_of_manual"]


NUMBERS = count()


def blocks(page: str, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of a page in that language, each with the number of its first line."""
    text = (DOCS / page).read_text()
    found = re.finditer(rf"^( *)```{language}(?: [^\n]*)?\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL)
    shown = []
    for match in found:
        indent = len(match[1])
        lines = [line[indent:] for line in match[2].splitlines()]
        shown.append((text[: match.start(2)].count("\n") + 1, "\n".join(lines) + "\n"))
    return shown


def run_blocks(page: str, folder: str | None = None, inner: str | None = None) -> dict[str, Any]:
    """Run the Python of a page in order, in one namespace, which is given back.

    With `inner`, that stands for Inductor in whatever is compiled: most pages say something about graphs, and code that
    g++ makes of them takes a second a kernel.
    """
    module = types.ModuleType(f"page_of_manual_{next(NUMBERS)}")  # Dynamo finds it by its name, and keeps what it found
    names = vars(module)
    kept, where, path = torch.compile, os.getcwd(), list(sys.path)
    sys.path.insert(0, str(ROOT / "examples"))
    sys.modules[module.__name__] = module
    if inner is not None:
        torch.compile = _with_inner(kept, inner)
    try:
        if folder is not None:
            os.chdir(folder)
        for line, text in blocks(page, "python"):
            exec(compile("\n" * (line - 1) + text, str(DOCS / page), "exec"), names)
    finally:
        torch.compile = kept
        os.chdir(where)
        sys.path[:] = path
    return names


def _with_inner(compile_: Any, inner: str) -> Any:
    def compiled(model=None, *, backend="inductor", options=None, **others):
        if backend == "inductor":
            backend = inner
        elif backend == "dtensor":
            options = {"inner": inner, **(options or {})}
        return compile_(model, backend=backend, options=options, **others)

    return compiled
