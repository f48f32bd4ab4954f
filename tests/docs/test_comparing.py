"""The guide to comparing shows what its commands print."""

import os
import re
import shlex
import subprocess

import pytest
from click.testing import CliRunner

from dtensor.testing import run_ranks
from dtensor.tools.cli import main
from tests.docs.pages import DOCS, ROOT, blocks, run_blocks
from tests.interpreter import python

PAGE = "guides/comparing.md"
EXAMPLE = "qwen3_by_hand.py"
WORDS = {
    "dtensor": ["-m", "dtensor"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone"],
}
"""Command -> how the Python of this process runs it."""


def shown(text):
    """A report without what differs from machine to machine: versions, lines of other libraries, measured numbers."""
    text = re.sub(r"torch \S+,", "torch N,", text)
    text = re.sub(r"modeling_qwen3\.py:\d+", "modeling_qwen3.py:N", text)
    text = re.sub(r"\[\d+:\d+\]", "REGION", text).replace("everywhere", "REGION")
    return re.sub(r"-?\d+\.\d+(e[+-]\d+)?", "N", text)


def run(line, folder):
    command, *words = shlex.split(line)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {
        "PYTHONPATH": str(ROOT),
        "PYTHON_EXEC": python(),
    }
    return subprocess.run(
        [python(), *WORDS[command], *words], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.nightly
def test_the_example_prints_what_the_guide_shows(tmp_path, monkeypatch):
    (commands,) = [text for _, text in blocks(PAGE, "bash") if EXAMPLE in text]
    (printed,) = [text for _, text in blocks(PAGE, "text") if EXAMPLE in text]
    (plan,) = [text for _, text in blocks(PAGE, "py")]
    assert plan in (ROOT / "examples" / EXAMPLE).read_text()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    *records, compare = commands.splitlines()
    losses = []
    for line in records:
        done = run(line, tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append(re.findall(r"loss (\S+)", done.stdout)[-1])
    said = (DOCS / PAGE).read_text()
    assert all(loss[:6] in said for loss in losses)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, shlex.split(compare)[1:])
    assert done.exit_code == 1, done.output
    assert shown(done.stdout) == shown(printed)
    page = (tmp_path / "comparison.html").read_text()
    assert len(re.findall(r'"title":"Unexplained difference"', page)) == 4


def on_rank(rank, folder):
    run_blocks(PAGE, folder, "aot_eager")


def test_the_records_of_the_guide_agree(tmp_path):
    run_ranks(on_rank, 2, str(tmp_path))
    done = CliRunner().invoke(main, ["compare", str(tmp_path / "runs/eager"), str(tmp_path / "runs/compiled")])
    assert done.exit_code == 0, done.output
    assert "2 ranks, 2 steps" in done.output
    assert "The runs agree" in done.output
    done = CliRunner().invoke(main, ["compare", str(tmp_path / "runs/by_hand"), str(tmp_path / "runs/by_hand")])
    assert "2 ranks, 2 steps" in done.output


def test_messages_are_quoted_as_they_are():
    """Those of the table of errors stand in the source."""
    rows = re.findall(
        r"^\| (?:warning: )?`([^`]+)` \|", (DOCS / PAGE).read_text().split("## Errors")[1], flags=re.MULTILINE
    )
    files = ("records/storage.py", "comparing/values.py", "comparing/report.py")
    source = "".join([(ROOT / "dtensor/runs" / file).read_text() for file in files])
    source = re.sub(r'"\s*f?"', "", source)
    assert len(rows) == 10
    for row in rows:
        for words in re.split(r"[…()]|\[3\]|\d+|\b[AB]\b", row):
            assert words.strip(" ,:") in source, (row, words)
