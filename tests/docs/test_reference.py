"""The reference of the manual has every public name, with its docstring, and an example on each page."""

import inspect
import os
import re
from dataclasses import fields

import pytest

import dtensor.passes
from dtensor.compile import Options
from tests.docs.pages import DOCS, ROOT, blocks, hooks

PACKAGES = ("dtensor", "dtensor.parallel", "dtensor.compile", "dtensor.passes", "dtensor.testing")
MODULES = ("dtensor.interop", "dtensor.random", "dtensor.safetensors")
"""Of these, functions are public."""

found = hooks().found
PAGES = sorted(str(path.relative_to(DOCS)) for path in (DOCS / "reference").glob("*.md"))
TEXTS = {page: hooks().expanded(page) for page in PAGES}
ENTRY = re.compile(r"^::: (\S+)|^#+ .*\{ #(dtensor\.\S+) \}", flags=re.MULTILINE)
ENTRIES = [(page, found[1] or found[2], found.end()) for page in PAGES for found in ENTRY.finditer(TEXTS[page])]


def public():
    for package in PACKAGES:
        yield from (f"{package}.{name}" for name in found(package).__all__)
    for name in MODULES:
        module = found(name)
        yield from (f"{name}.{given}" for given in module.__all__ if inspect.isfunction(getattr(module, given)))


@pytest.mark.parametrize("name", sorted(public()))
def test_a_public_name_has_one_place_and_a_docstring(name):
    assert [entry for _, entry, _ in ENTRIES].count(name) == 1
    thing = found(name)
    if callable(thing):
        assert inspect.getdoc(thing)


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_shows_is_public(package):
    """Beside the packages and modules below it, which a program names by their path."""
    shown = {name: getattr(found(package), name) for name in dir(found(package)) if not name.startswith("_")}
    below = {name for name, value in shown.items() if inspect.ismodule(value)}
    assert shown.keys() - below - {"Any", "TYPE_CHECKING"} == set(found(package).__all__)
    for name in below:
        path = shown[name].__name__
        assert path == f"{package}.{name}" or f"{package}.{name}" in MODULES, f"{package}.{name} is {path}"


def test_every_entry_is_public():
    assert {entry for _, entry, _ in ENTRIES} == set(public())


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_an_example(page):
    assert blocks(page, "python") or (page == "reference/command_line.md" and blocks(page, "bash"))


SHARED = {
    "dtensor.testing.with_ranks",  # above it
    "dtensor.passes.insert",  # with replace
    "dtensor.passes.Stage",  # with the table
    "dtensor.passes.REGISTERED",  # below the lists
    "dtensor.passes.PIPELINE",
    "dtensor.passes.PREPARE",
    "dtensor.passes.SIMPLIFY",
}
"""Entries whose example stands with another's."""


def test_an_entry_has_an_example():
    """Between it and the next one; the classes of passes share one, and so do names that not every version has."""
    without = set()
    of_passes = {hooks().public_name(p) for part in hooks().passes().values() for p in part}
    for (page, name, end), (after, _, start) in zip(ENTRIES, [*ENTRIES[1:], ("", "", 0)]):
        text = TEXTS[page][end : start if after == page else None]
        if not re.search(r"^```(python|py)$", text, flags=re.MULTILINE):
            without.add(name)
    unexplained = without - of_passes - SHARED - set(re.findall(r"dtensor\.\w+\.\w+", _there("reference/compile.md")))
    assert unexplained == set()


def _there(page):
    return "".join(re.findall(r"<!-- there: (\S+) -->", (DOCS / page).read_text()))


def test_every_option_has_a_row():
    text = TEXTS["reference/compile.md"]
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", text, flags=re.MULTILINE))
    of_options = {name: value for name, value in rows.items() if not name.startswith("DTENSOR_")}
    defaults = {f.name: f"{f.default!r}".replace("'", '"') for f in fields(Options)}
    assert of_options == defaults


def test_every_environment_variable_has_a_row():
    rows = set(re.findall(r"^\| `(DTENSOR_\w+)` \|", TEXTS["reference/compile.md"], flags=re.MULTILINE))
    folders = [ROOT / name for name in ("dtensor", "compile", "passes")]
    sources = [path.read_text() for folder in folders if folder.is_dir() for path in folder.rglob("*.py")]
    assert rows == set(re.findall(r"\bDTENSOR_[A-Z_0-9]+\b", "\n".join(sources)))


def test_every_command_is_there():
    text = TEXTS["reference/command_line.md"]
    names = [name for name, _ in hooks().commands()]
    assert len(names) > 8
    assert [name for name in names if f"\n### {name}\n" not in text] == []


PRINTED = re.compile(r"(<!-- printed from passes/pipeline.py -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def test_architecture_shows_the_pipeline():
    """`EXPECTTEST_ACCEPT=1` prints it anew."""
    page = ROOT / "ARCHITECTURE.md"
    before = page.read_text()
    after = PRINTED.sub(lambda found: f"{found[1]}{hooks().stages()}\n{found[2]}", before)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        page.write_text(after)
    else:
        assert before == after, (
            "the table of the pipeline has changed; EXPECTTEST_ACCEPT=1 writes it to ARCHITECTURE.md"
        )


def test_every_pass_has_a_section():
    text = hooks().expanded("how/passes.md")
    members = [p for part in hooks().passes().values() for p in part]
    assert {p.name for p in dtensor.passes.REGISTERED} == {p.name for p in members}
    for p in members:
        section = text.split(f"### `{p.name}` {{")[1].split("\n### ")[0]
        assert re.findall(r"^\*\*(Before|After)\*\*$", section, flags=re.MULTILINE) == ["Before", "After"]
