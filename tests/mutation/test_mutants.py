"""The mutants themselves: which there are of a text, and that rows of `equivalent.toml` are about code that exists."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.__main__ import ROOT, equivalents
from tests.mutation.mutants import Mutant, SwapMembership, mutant, places, sampled
from tests.mutation.targets import TARGETS

SOURCE = '''\
from functools import cache

Item = str | int


@cache
def f(x: int | None, y: list[Item] = [1]) -> int | str:
    """A text with 3 and not in it."""
    if x is None or x in y:
        return "none"
    for n in y:
        x = x + n if x < n else -x
    return g(*y, strict=True) and not sum(a * b for a, b in zip(y, y, strict=True))
'''


def made(source=SOURCE) -> list[Mutant]:
    return [m for place in places("f.py", source) if (m := mutant(place, source)) is not None]


def test_all_mutants_of_a_text():
    assert sorted({m.after for m in made()}) == [
        "def f(x: int | None, y: list[Item] = [ 0]) -> int | str:",
        "def f(x: int | None, y: list[Item] = [ 2]) -> int | str:",
        "for n in []:",
        "if not x is None or x in y:",
        "if x is None and x in y:",
        "if x is None or x not in y:",
        "if x is not None or x in y:",
        "return g(*y, strict=False) and not sum(a * b for a, b in zip(y, y, strict=True))",
        "return g(*y, strict=True) and  sum(a * b for a, b in zip(y, y, strict=True))",
        "return g(*y, strict=True) and not sum(a + b for a, b in zip(y, y, strict=True))",
        "return g(*y, strict=True) and not sum(a / b for a, b in zip(y, y, strict=True))",
        "return g(*y, strict=True) or not sum(a * b for a, b in zip(y, y, strict=True))",
        "x = x + n if x < n else x",
        "x = x + n if x <= n else -x",
        "x = x + n if x >= n else -x",
        "x = x - n if x < n else -x",
    ]


def test_a_mutant_knows_its_lines():
    found = {m.after: m for m in made()}
    one = found["for n in []:"]
    assert (one.lines, one.before, one.operator) == ((11,), "for n in y:", "ZeroIterationForLoop")
    assert one.source == SOURCE.replace("for n in y:", "for n in []:")
    wide = "f(\n    1\n    + 2,\n)\n"
    found = {(m.lines, m.before, m.after) for m in made(wide)}
    assert found >= {((3,), "+ 2,", "- 2,"), ((3,), "+ 2,", "+ 3,"), ((1, 2), "f( 1", "f( 2")}


def test_what_is_no_program_or_the_same_is_none():
    assert {m.after for m in made("def f(*, x): pass\n")} == set()
    assert {m.after for m in made("x = +1\n")} == {"x = + 2", "x = + 0"}


def test_literal_strings_are_not_compared_by_order():
    assert {m.after for m in made('x = name == "sum"\n')} == {'x = name != "sum"'}
    assert {m.after for m in made('x = name == "sum" + y\n')} >= {'x = name <= "sum" + y'}


def test_membership():
    for example in SwapMembership.examples():
        assert [m.source.split() for m in made(example.pre_mutation_code)] == [example.post_mutation_code.split()]


def test_samples_follow_from_the_seed_and_do_not_overlap(tmp_path):
    (tmp_path / "f.py").write_text(SOURCE)
    found = places("f.py", SOURCE)
    first, again = (sampled(tmp_path, found, 6, 3) for _ in range(2))
    assert first == again
    assert len({m.source for m in first}) == 6
    assert sampled(tmp_path, found, 6, 4) != first
    everything = sampled(tmp_path, found, 100, 3)
    assert sampled(tmp_path, found, 100, 3, len(found)) == []
    assert everything[:6] == first
    assert {m.source for m in everything} == {m.source for m in made()}


def test_targets_exist():
    for target in TARGETS.values():
        assert len(target.paths(ROOT)) >= 3
        assert all((ROOT / test).exists() for test in target.tests)


@pytest.mark.parametrize(("file", "before", "after"), sorted(equivalents()))
def test_equivalent_mutants_are_about_code_that_exists(file, before, after):
    assert before != after
    lines = [line.strip() for line in (ROOT / file).read_text().splitlines()]
    assert before in lines or before in " ".join(lines)
    assert equivalents()[file, before, after].endswith(".")


@pytest.mark.nightly
def test_mutants_of_a_small_file_are_killed(tmp_path):
    command = [sys.executable, "-m", "tests.mutation", "layout", "--file", "chunks", "--sample", "8", "--out", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *_, row = done.stdout.splitlines()
    assert [cell.strip() for cell in row.strip("|").split("|")][0::7] == ["layout", "100.0 %"], done.stdout
    assert (Path(tmp_path) / "layout-0-0.json").exists()
