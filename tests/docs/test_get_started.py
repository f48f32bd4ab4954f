"""Each block of the page to get started prints what the page shows below it."""

import contextlib
import io
import os
import re
import subprocess
import sys
import types

import pytest

import dtensor.compile
from dtensor.compile.reports.summary import summary
from dtensor.testing import run_ranks
from tests.docs.pages import DOCS, ROOT, blocks, hooks
from tests.interpreter import python

PAGE = "get_started.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$\n(?:\n^```text\n(.*?)^```$)?", flags=re.MULTILINE | re.DOTALL)
SHOWN = [(kind, text, shown) for kind, text, shown in FENCE.findall((DOCS / PAGE).read_text()) if kind != "text"]
PEAK = re.compile(r"  [\d,]+$", re.MULTILINE)
"""Peak memory at the end of a line: under Inductor it is another one."""

SCRIPT = "\n\n".join([text for kind, text, _ in SHOWN if kind == "python"][:3])
"""train.py, as steps 2 to 4 make it."""


def printed(rank, inner, folder):
    """What each block of Python prints on this rank. What they compile is dumped."""
    module = types.ModuleType("train")
    sys.modules["train"] = module
    texts = []
    for kind, text, _ in SHOWN:
        if kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out), dtensor.compile.dump(folder):
                exec(compile(text.replace("fullgraph=True", f"fullgraph=True{inner}"), PAGE, "exec"), vars(module))
            texts.append(out.getvalue())
    return texts


def test_blocks_print_what_is_shown(monkeypatch, tmp_path):
    monkeypatch.setenv("DTENSOR_LINKS", "")
    expected = [shown for kind, _, shown in SHOWN if kind == "python"]
    assert all(expected)
    # New processes: the names of frames count the classes that a process has made.
    got, _ = run_ranks(printed, 2, ', options={"inner": "aot_eager"}', tmp_path, fresh=True)
    assert got == expected
    (inspected,) = [shown for _, text, shown in SHOWN if "inspect --nproc" in text]
    for shown in (inspected, (DOCS / "guides/inspect.md").read_text()):
        assert PEAK.sub("", summary(tmp_path)) in PEAK.sub("", shown)


def run(*words, folder):
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(ROOT), "DTENSOR_LINKS": "", "PYTHON_EXEC": python()}
    return subprocess.run([python(), *words], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.nightly
def test_commands_print_what_is_shown(tmp_path):
    """torchrun, one process, and inspect, on the script that the page's first blocks are."""
    (tmp_path / "train.py").write_text(SCRIPT)
    of_script = "".join([shown for kind, _, shown in SHOWN if kind == "python"][:3])
    launched = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-ranks-filter", "0")
    done = run(*launched, "train.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, of_script), done.stderr
    done = run("train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "sharded:" in line] == [of_script.splitlines()[1]]
    done = run("-m", "dtensor", "inspect", "--nproc", "2", "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (shown,) = [shown for kind, text, shown in SHOWN if "inspect --nproc" in text]
    pattern = re.escape(shown.strip()).replace("…", ".*")
    assert re.search(pattern, done.stdout), done.stdout


@pytest.mark.nightly
def test_simulated_ranks(tmp_path):
    (text,) = [text for _, text in blocks(PAGE, "py")]
    (shown,) = [shown for kind, _, shown in SHOWN if kind == "py"]
    (tmp_path / "first.py").write_text(text)
    done = run("first.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, shown), done.stderr


def test_the_commands_are_those_of_the_readme():
    """Up to the script's own: nobody needs another page."""
    readme = (ROOT / "README.md").read_text()
    for kind, text, _ in SHOWN:
        if kind == "bash":
            assert text.strip() in readme


def test_what_we_write_is_there():
    """The names of this library in the tables for those who come from elsewhere."""
    page = (DOCS / "guides/you_write_we_write.md").read_text()
    ours = [line.strip("|").split(" | ", 1)[1] for line in page.splitlines() if line.startswith("| `")]
    names = {name for cell in ours for name in re.findall(r"\bdtensor((?:\.\w+)+)", cell)}
    assert len(ours) > 30
    assert len(names) > 12
    for name in names:
        assert hooks().found(f"dtensor{name}") is not None
