"""The commands that run a script: what they leave, and what they do not write over."""

import json

import pytest
from click.testing import CliRunner

from dtensor.tools.cli import main

SCRIPT = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["dtensor"])
    (tmp_path / "train.py").write_text(SCRIPT)
    return lambda *words: CliRunner().invoke(main, words)


def test_trace(run, tmp_path):
    done = run("trace", "--skip", "1", "--steps", "1", "traces", "train.py")
    assert (done.exit_code, done.output) == (0, "The trace: traces/trace.json, for https://ui.perfetto.dev\n")
    events = json.loads((tmp_path / "traces" / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e.get("cat") == "step"] == ["step 1"]
    (tmp_path / "traces" / "trace.json").unlink()
    assert run("trace", "--merge", "traces").output == "The trace: traces/trace.json\n"
    done = run("trace", "traces", "train.py")
    assert done.exit_code == 1
    assert "not written over; name another folder, or remove it first: rm -r traces" in done.output
    done = run("trace", "--skip", "9", "more", "train.py")
    assert (done.exit_code, "took no more than 9 steps, which were skipped; write --skip 0" in done.output) == (1, True)
    assert run("trace", "more").exit_code == 2


def test_record_does_not_write_over(run, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "rank00000.jsonl").write_text("before")
    done = run("record", "one", "train.py")
    assert done.exit_code == 1
    assert "one holds the files of an earlier run (rank00000.jsonl), which are not written over" in done.output
    assert (tmp_path / "one" / "rank00000.jsonl").read_text() == "before"
