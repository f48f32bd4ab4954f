"""Each pass declares what a pass declares, and has its tests: a failure names the pass and what it lacks."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

from dtensor import passes
from dtensor.passes import EXACTNESS, REGISTERED, STAGES, Pass
from dtensor.passes.runner import check_pass

TESTS = Path(__file__).parent
WANTED = {
    "golden text": ("assert_expected_inline", "assert_expected_inline(bench.text(gm), ...)"),
    "a graph on which it does not fire": ("keeps", "assert bench.keeps({kind}(...), gm)"),
    "a replay on simulated ranks": ("apply", "assert bench.apply({kind}(...), gm) == 1"),
}
"""What the tests of a pass show -> the call that shows it, and how it is written."""

NAMES = [p.name for p in REGISTERED]


def shown(path, kind):
    """What a module of tests calls, by name: on a pass of that kind, or on nothing but text."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            of = {n.id for n in ast.walk(node.args[0]) if isinstance(n, ast.Name)}
            yield node.func.attr if kind in of else ""


@pytest.mark.parametrize("p", REGISTERED, ids=NAMES)
def test_a_pass_has_its_tests(p):
    kind = type(p).__name__
    files = list(TESTS.glob(f"*/test_{p.name}.py"))
    assert files, (
        f"the pass {p.name!r} has no tests; write tests/passes/{type(p).__module__.split('.')[2]}/test_{p.name}.py"
    )
    called = set(shown(files[0], kind))
    for what, (call, how) in WANTED.items():
        assert call in called, f"the pass {p.name!r} lacks {what}; write in {files[0].name}: {how.format(kind=kind)}"


@pytest.mark.parametrize("p", REGISTERED, ids=NAMES)
def test_a_pass_declares_what_it_is(p):
    assert check_pass(p) is p
    stages = {stage.name for stage in STAGES if p in stage.passes}
    assert stages == {p.stage}, f"the pass {p.name!r} declares the stage {p.stage!r} and stands in {stages}"
    assert p.exactness in EXACTNESS
    said = inspect.getdoc(type(p)) or ""
    for word in ("Before:", "After:"):
        assert word in said, f"the docstring of the pass {p.name!r} shows no graph {word.lower()[:-1]} it"
    assert type(p).__name__ in passes.__all__, f"write {type(p).__name__!r} in __all__ of passes/pipeline.py"


def test_names_are_unique():
    assert len({type(p) for p in REGISTERED}) == len(NAMES) == len(set(NAMES))


def test_every_pass_stands_in_the_table():
    """A class of passes in a module of the rooms of passes."""
    found = set()
    for room in ("algebra", "borders", "functional", "overlap"):
        package = importlib.import_module(f"dtensor.passes.{room}")
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            members = vars(importlib.import_module(module.name)).values()
            found |= {c for c in members if inspect.isclass(c) and issubclass(c, Pass) and c.__module__ == module.name}
    missing = {c.__name__ for c in found - {type(p) for p in REGISTERED}}
    assert not missing, f"{missing} stand in no row of STAGES in passes/pipeline.py"
