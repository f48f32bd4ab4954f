"""Every public name has a place in the reference, a docstring, and a page with an example."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
NAME = re.compile(r"^::: (\S+)", flags=re.MULTILINE)
PACKAGES = ("dtensor", "dtensor.parallel", "dtensor.compile", "dtensor.passes", "dtensor.testing", "dtensor.interop")
ELSEWHERE = {"dtensor.DeviceMesh": "torch's own"}
WRITTEN = {name for page in FOLDER.glob("*.md") for name in NAME.findall(page.read_text())}


def public():
    for package in PACKAGES:
        yield from (f"{package}.{name}" for name in importlib.import_module(package).__all__)
    import dtensor

    for module in ("random", "safetensors"):
        yield from (f"dtensor.{module}.{name}" for name in getattr(dtensor, module).__all__)


PUBLIC = sorted(public())


def found(name):
    thing = importlib.import_module("dtensor")
    for part in name.split(".")[1:]:
        thing = getattr(thing, part)
    return thing


@pytest.mark.parametrize("name", [n for n in PUBLIC if n not in ELSEWHERE])
def test_public_name_is_in_the_reference(name):
    assert name in WRITTEN, f"write '::: {name}' on a page of docs/reference"
    thing = found(name)
    if callable(thing):
        assert inspect.getdoc(thing), f"{name} has no docstring"


def test_reference_names_what_is_there():
    for name in WRITTEN:
        found(name)


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda p: p.name)
def test_reference_page_has_an_example(page):
    assert "```python\n" in page.read_text() or page.name == "command_line.md"
