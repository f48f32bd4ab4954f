"""The README: its Python says what it says, it is short, and its links lead somewhere. (`test_pages` runs it, too.)"""

import re

import pytest

from dtensor.testing import with_ranks
from tests.docs.pages import README, ROOT, run_blocks

TEXT = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param(None, marks=pytest.mark.nightly)])
@with_ranks(2)
def test_python_of_the_readme_runs(rank, inner):
    names = run_blocks(README, inner=inner)
    assert names["y"].full_tensor()[0].tolist() == [5.0, 14.0, 23.0, 32.0]
    assert names["model"][0].weight.placements[0].is_shard(0)
    assert names["compiled"](names["torch"].ones(8, 64)).shape == (8, 64)


def test_is_short():
    assert len(TEXT.splitlines()) < 120


def test_one_command_is_that_of_ci():
    assert len(re.findall(r"^python3 -m venv .*pytest$", TEXT, flags=re.MULTILINE)) == 1
    assert len(re.findall(r"^python3 -m venv .*dtensor demo$", TEXT, flags=re.MULTILINE)) == 1


def test_its_links_lead_to_files():
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", TEXT) if ":" not in link]
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []
