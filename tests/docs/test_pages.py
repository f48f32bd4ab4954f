"""Every block of Python in the manual runs, on two ranks, page by page."""

import pytest

from dtensor.testing import run_ranks
from tests.docs.pages import PAGES, README, blocks, run_blocks

NOT_RUN = {
    "guides/comparing.md": (1, "a part of examples/qwen3_by_hand.py, which `test_comparing` runs"),
    "get_started.md": (1, "starts ranks of its own; `test_get_started` runs it"),
    "guides/fsdp.md": (1, "a mesh of 64 GPUs"),
    "guides/gpus.md": (1, "a GPU"),
    "guides/own_operators.md": (1, "starts ranks as threads, which a process that is a rank cannot"),
    "guides/packages.md": (1, "a script, which `test_packages` runs"),
    "guides/running.md": (1, "initialises the process group, which is there"),
    "guides/trainers.md": (6, "scripts, which tests/examples/test_trainers.py runs, and what differs from them"),
    "guides/two_dimensional.md": (1, "a mesh of 64 GPUs"),
    "reference/compile.md": (7, "packages, which are tested in tests/compile/packages"),
    "reference/errors.md": (1, "ends the job of all ranks"),
    "reference/testing.md": (9, "start ranks of their own, or are parts of test modules"),
}
"""Page -> how many blocks of it are fenced as ```py, which nothing runs, and why."""

WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
"""The README is run by `test_readme`."""

LONG = ("guides/search.md", "guides/slow_links.md")
"""Pages that search for plans, and so are run at night."""


def run_page(rank, page, folder, inner):
    run_blocks(page, folder, inner)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.nightly] if page in LONG else []) for page in WITH_PYTHON]
)
def test_python_runs(page, tmp_path):
    run_ranks(run_page, 2, page, str(tmp_path), "aot_eager")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.nightly] if page in LONG else []) for page in WITH_PYTHON]
)
def test_python_runs_under_inductor(page, tmp_path):
    run_ranks(run_page, 2, page, str(tmp_path), None)


def test_what_is_not_run_is_known():
    found = {page: len(blocks(page, "py")) for page in (README, *PAGES)}
    assert {page: n for page, n in found.items() if n} == {page: n for page, (n, _) in NOT_RUN.items()}
