"""The Python of the README and of the manual runs as it stands, page by page, on two ranks (four where a page says so).

The blocks of a page share their names, in order. What cannot run here, such as code for GPUs, is fenced as `py`.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dtensor.testing import run_ranks, with_ranks

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
RANKS = re.compile(r"<!-- ranks: (\d+) -->")
ELSEWHERE = {"guides/examples.md"}
"""Pages whose code is tested as scripts, in tests/examples."""


def blocks(path):
    return BLOCK.findall(path.read_text())


PAGES = [p for p in sorted((ROOT / "docs").rglob("*.md")) if blocks(p)]
NAMES = [n for n in (str(p.relative_to(ROOT / "docs")) for p in PAGES) if n not in ELSEWHERE]

UNTRIED = {
    "guides/distribute_model.md": 2,  # T5, which the zoo trains; a mesh of four ranks
    "guides/from_torch_dtensor.md": 1,  # 32 GPUs
    "guides/fsdp.md": 4,  # eight GPUs, parts of programs
    "guides/gpus.md": 1,  # a GPU
    "guides/tensor_parallel.md": 1,  # a plan without its model
}
"""Blocks of a page that are not run, and why."""


def run_page(rank, path):
    names: dict = {}
    for block in blocks(Path(path)):
        exec(compile(block, path, "exec"), names)


@pytest.mark.parametrize("name", NAMES)
def test_python_of_the_manual_runs(name):
    path = ROOT / "docs" / name
    ranks = RANKS.search(path.read_text())
    run_ranks(run_page, int(ranks[1]) if ranks else 2, str(path), timeout=300)


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: p.name)
def test_what_is_not_run_is_listed(path):
    name = str(path.relative_to(ROOT / "docs"))
    assert len(re.findall(r"^```py\n", path.read_text(), flags=re.MULTILINE)) == UNTRIED.get(name, 0)


@with_ranks(2)
def test_python_of_the_readme_runs(rank):
    names: dict = {}
    for block in blocks(ROOT / "README.md"):
        exec(compile(block, "README.md", "exec"), names)
    torch.testing.assert_close(names["compiled"](names["x"]), names["expected"])
    assert names["model"][0].weight.grad.to_local().shape == (128, 64)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


def test_the_manual_builds(tmp_path):
    """Strictly: a link to nothing, or a name that the reference does not find, fails. It takes no network."""
    pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ("index.html", "how/passes/index.html", "reference/tensors/index.html"):
        assert (tmp_path / "site" / page).is_file()
